"""`holdfast ask`: asks a running job to save, to stop, or how it is."""

from __future__ import annotations

import math

import click

from holdfast.asking import ask, describe, is_late
from holdfast.catalog import split_place
from holdfast.catalog.requests import COMMANDS, Command
from holdfast.cli.completion import RunPath
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.report import Report, verb
from holdfast.cli.screen import GOOD, NOTABLE
from holdfast.errors import UsageError
from holdfast.numbers import parse_time


def _read_time(ctx: click.Context, parameter: click.Parameter, value: str) -> float:
    seconds = parse_time(value) or (float(value) if value.isdecimal() else 0.0)
    if not 0 < seconds < math.inf:
        raise click.BadParameter(f"{value!r} is not a time such as 90s or 10min", ctx, parameter)
    return seconds


@verb("ask")
@click.argument("run", metavar="RUN", type=RunPath(takes_step=False))
@click.argument("command", metavar=f"[{'|'.join(COMMANDS)}]", type=click.Choice(COMMANDS))
@click.option(
    "--timeout", callback=_read_time, default="10min", metavar="TIME",
    help="How long to wait until it is done, 10min by default.",
)  # fmt: skip
@click.option(
    "--generation", type=click.IntRange(min=0), metavar="N",
    help="Ask only if this is the newest start of the run, by its number in holdfast list.",
)  # fmt: skip
def command(report: Report, run: str, command: Command, timeout: float, generation: int | None) -> None:
    """Ask a running job to save now, to save and stop, or how it is.

    The job may run on another machine that shares the run's directory or bucket, and have several workers, which save
    at the end of the same step. This returns when the checkpoint is committed. After `stop` the job exits with code
    130, as after Ctrl-C. A request that no job hears is withdrawn, and never stops a later start.

    The exit code is 7 if no job answers, 8 if one is alive and does not do it in time, and 9 if the run was started
    again since.
    """
    storage, location, step = split_place(run)
    if step is not None:
        raise UsageError(f"{run}: a run is expected here, not one of its steps", hint=f"Write {location}.")
    reply = ask(storage, command, timeout_seconds=timeout, generation=generation)
    late = is_late(reply)
    report.fields = {
        "run": storage.url,
        "command": command,
        "step": reply.step,
        "committed_step": reply.committed_step,
        "doing": reply.doing,
        "since_seconds": reply.since_seconds,
        "step_seconds": reply.step_seconds,
        "may_hang": late,
        "workers": reply.workers,
        "host": reply.host,
        "process": reply.process,
    }
    if command == "status":
        newest = "nothing is committed" if reply.committed_step is None else f"step {reply.committed_step} is committed"
        who = f"process {reply.process} on {reply.host}" + (f", {reply.workers} workers" if reply.workers > 1 else "")
        report.line((f"{location} is running ({who}): {describe(reply)}; {newest}", NOTABLE if late else GOOD))
        if late:
            report.exit_code = ExitCode.UNANSWERED
        return
    then = "; the job exits" if command == "stop" else ""
    report.line((f"step {reply.committed_step} of {location} is committed{then}", GOOD))
