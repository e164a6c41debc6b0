"""`holdfast run` and `holdfast worker`: run a training program, which is started again when it dies."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from holdfast.errors import UsageError
from holdfast.supervise import client
from holdfast.supervise.imports import find_record
from holdfast.supervise.launch import find_flags, make_command
from holdfast.supervise.program import Program
from holdfast.supervise.supervisor import Supervised

_AGAIN: Final = {"restart": True, "leave": False}


class _Run(click.Command):
    """Knows whether `--` came first: it is written before a command other than a program of Python."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, [*args])
        words = ctx.params["program"]
        ctx.params["is_command"] = bool(words) and args[len(args) - len(words) - 1 :][:1] == ["--"]
        return rest


def _read_codes(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[int, bool]]:
    found = []
    for value in values:
        code, _, what = value.partition("=")
        if not code.isdecimal() or int(code) > 255 or what not in _AGAIN:
            raise click.BadParameter(f"{value!r} is not such as 3=restart or 1=leave", ctx, parameter)
        found.append((int(code), _AGAIN[what]))
    return found


@click.command("run", cls=_Run, context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="Run a module, as with python -m.")
@click.option("--max-restarts", type=click.IntRange(min=0), metavar="N", help="Start it again at most N times.")
@click.option(
    "--on-code", callback=_read_codes, multiple=True, metavar="CODE=restart|leave",
    help="What to do when it ends with this exit code; may be repeated.",
)  # fmt: skip
@click.option("--no-spare", is_flag=True, help="Keep no spare interpreter, and start each time afresh.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TRAIN.PY [ARGUMENTS]...")
def command(
    is_module: bool,
    max_restarts: int | None,
    on_code: list[tuple[int, bool]],
    no_spare: bool,
    program: tuple[str, ...],
    is_command: bool,
) -> None:
    """Run a training program, and start it again when it dies.

    A spare interpreter that has imported the same modules waits beside it, so that a new start takes a fraction of a
    second. The program is not started again when it succeeds, was preempted (exit code 42), was stopped by Ctrl-C
    (130), ended with a save that failed (74), or fails again and again at the same step.

    \b
    holdfast run train.py --lr 0.1
    holdfast run -m package.train
    holdfast run -- torchrun --nproc-per-node 8 train.py     any command, without the spare
    """  # noqa: D301 - click wants the character.
    task = plan(is_module, program, is_command)._replace(
        max_restarts=max_restarts, on_code=on_code, has_spare=not no_spare
    )
    # A process of its own kind: without the modules of this one, it has a few megabytes and one thread.
    sys.stdout.flush()
    sys.stderr.flush()
    shown = ["run", *program]
    words = make_command("supervisor", *task, flags=["-S", "-E"], show=shown)
    os.execv(words[0], words)


def plan(is_module: bool, program: tuple[str, ...], is_command: bool) -> Supervised:
    """Returns how the words of a command line are run.

    Raises:
        UsageError: If there is no such program.
    """
    task = Supervised(command=[], program=[], has_spare=True, max_restarts=None, on_code=[])
    target, *arguments = program
    if is_command and not is_module:
        if shutil.which(target) is None:
            raise UsageError(f"the command {target} was not found")
        return task._replace(command=[*program])
    if is_module:
        if _find_module(target) is None:
            raise UsageError(f"no module named {target} can be imported from here")
        record = find_record(f"-m {target}", arguments)
    else:
        if not Path(target).exists():
            raise UsageError(
                f"{target} does not exist",
                hint="holdfast run TRAIN.PY runs a program of Python; holdfast run -- COMMAND runs any command.",
            )
        record = find_record(os.path.realpath(target), arguments)
    fields: Any = Program(target, is_module, arguments, find_flags(), record, board=-1, words=-1)
    return task._replace(program=[*fields])


def _find_module(name: str) -> object:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return None


@click.command("worker", context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="Run a module, as with python -m.")
@click.option("--no-spare", is_flag=True, help="Use no spare, and start afresh.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="TRAIN.PY [ARGUMENTS]...")
def command_of_worker(is_module: bool, no_spare: bool, program: tuple[str, ...]) -> None:
    """Run a training program as a worker that a launcher starts, and starts again.

    All workers of a node are forked from one spare interpreter, which has imported what the program imports, so a
    restart by the launcher takes a fraction of a second. This process ends with the exit code, or the signal, of the
    worker.

    \b
    torchrun --nproc-per-node 8 --no-python holdfast worker train.py
    """  # noqa: D301 - click wants the character.
    client.main(Program(*plan(is_module, program, is_command=False).program), has_spare=not no_spare)
