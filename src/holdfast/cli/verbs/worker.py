"""`holdfast worker`: runs a training program as a worker of a launcher, forked from a spare of its node."""

from __future__ import annotations

import click

from holdfast.cli.verbs.run import plan
from holdfast.supervise import client
from holdfast.supervise.program import Program


@click.command("worker", context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="Run a module, as with python -m.")
@click.option("--no-spare", is_flag=True, help="Use no spare, and start afresh.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TRAIN.PY [ARGUMENTS]...")
def command(is_module: bool, no_spare: bool, program: tuple[str, ...]) -> None:
    """Run a training program as a worker that a launcher starts, and starts again.

    All workers of a node are forked from one spare interpreter, which has imported what the program imports, so a
    restart by the launcher takes a fraction of a second. This process ends with the exit code, or the signal, of the
    worker.

    \b
    torchrun --nproc-per-node 8 --no-python holdfast worker train.py
    """  # noqa: D301 - click wants the character.
    client.main(Program(*plan(is_module, program, is_command=False).program), has_spare=not no_spare)
