"""`holdfast follow`: runs a command for each checkpoint of a run; and `pin` and `unpin`, which keep one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from holdfast.catalog.holds import pin, unpin
from holdfast.cli.completion import RunPath
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.report import Report, name_fields, verb
from holdfast.cli.screen import BAD, FAINT, GOOD, make_notes
from holdfast.cli.target import RunTarget, choose_step, find_target
from holdfast.errors import UsageError
from holdfast.following import Followed, follow, make_reader_name
from holdfast.numbers import parse_time


@dataclass(frozen=True, slots=True)
class _Line:
    """The facts of a checkpoint for a command, or a line."""

    step: int
    generation: int
    run: str
    directory: str


def _read_idle(ctx: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    seconds = None if value is None else parse_time(value)
    if value is not None and not seconds:
        raise click.BadParameter(f"{value!r} is not a time such as 90s or 10min", ctx, parameter)
    return seconds


class _CommandLine(click.Command):
    """Takes options before and after RUN; what follows `--` is the command, with options of its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        left = super().parse_args(ctx, args[:end])
        if (words := ctx.params.get("words")) and not ctx.resilient_parsing:
            raise UsageError(
                f"{words[0]} comes after RUN", hint=f"Write the command after `--`: -- {shlex.join(words)}"
            )
        ctx.params["words"] = tuple(args[end + 1 :])
        return left


@click.command("follow", cls=_CommandLine)
@click.option("--every", is_flag=True, help="Each checkpoint in order, and not the newest one only.")
@click.option(
    "--max-behind", type=click.IntRange(min=0), metavar="N",
    help="With --every, keep up to N checkpoints that wait for the command; 3 by default.",
)  # fmt: skip
@click.option(
    "--name", metavar="NAME", help="The name under which the run knows this reader; by default the command's."
)
@click.option(
    "--idle", callback=_read_idle, metavar="TIME", help="End if no new checkpoint comes for so long, such as 30min."
)
@click.option("--json", "as_json", is_flag=True, help="Without a command, write one JSON object a line.")
@click.argument("run", metavar="RUN", type=RunPath(takes_step=False))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    every: bool,
    max_behind: int | None,
    name: str | None,
    idle: float | None,
    as_json: bool,
    run: str,
    words: tuple[str, ...],
) -> None:
    """Run a command for the newest checkpoint of a run, and again for each that comes later.

    In the command, {step}, {generation}, {run} and {directory} are replaced; they are in its environment too, as
    HOLDFAST_STEP and so on. The checkpoint is not removed while the command runs. A command that fails is reported, and
    the next checkpoint is waited for. Without a command, this writes a line for each checkpoint.

    \b
    holdfast follow runs/gpt -- python evaluate.py --step {step}
    holdfast follow runs/gpt --every --idle 1h -- holdfast export {run}@{step} out/{step} --to safetensors
    """  # noqa: D301 - click wants the character.
    if words and as_json:
        raise UsageError("--json is for lines, and a command is given", hint="Leave out --json, or the command.")
    if max_behind is not None and not every:
        raise UsageError("without --every none waits: only the newest checkpoint is read", hint="Add --every.")
    for word in words:
        for found in re.findall(r"(?<!\$)\{([a-z]+)\}", word):
            near = get_close_matches(found, _Line.__slots__)
            if near and found not in _Line.__slots__:
                raise UsageError(f"{{{found}}} in the command is not replaced", hint=f"Did you mean {{{near[0]}}}?")
    if name is None:
        name = make_reader_name(Path(words[0]).stem, "\0".join([str(every), *words])) if words else ""
    notes, failed = make_notes(), 0
    most = 3 if max_behind is None else max_behind
    with follow(run, every=every, max_behind=most, name=name, timeout_seconds=idle) as checkpoints:
        for checkpoint in checkpoints:
            line = _Line(checkpoint.step, checkpoint.generation, run, checkpoint.directory)
            if not words:
                _write(line, checkpoint, as_json=as_json)
                continue
            filled = [_fill(word, line) for word in words]
            environment = {f"HOLDFAST_{key.upper()}": str(value) for key, value in asdict(line).items()}
            try:
                code = subprocess.run(filled, env={**os.environ, **environment}, check=False).returncode
            except OSError as error:
                raise UsageError(f"the command {filled[0]} cannot be run: {error.strerror}") from error
            if code:
                failed += 1
                notes.say(
                    (f"step {line.step}: ", BAD), f"the command ended with exit code {code}: {shlex.join(filled)}"
                )
    if failed:
        raise click.exceptions.Exit(ExitCode.FAILED)


def _find_run(checkpoint: str) -> RunTarget:
    target = find_target(checkpoint, hint="Write RUN@STEP, where RUN is the directory that the job saves into.")
    if target.is_step:
        raise UsageError(
            f"{target.location} is the directory of a single step", hint="Write RUN@STEP, with the directory above it."
        )
    return target


def _fill(word: str, line: _Line) -> str:
    for key, value in asdict(line).items():
        word = word.replace(f"{{{key}}}", str(value))
    return word


def _write(line: _Line, checkpoint: Followed, *, as_json: bool) -> None:
    fields: dict[str, Any] = asdict(line)
    if as_json:
        print(json.dumps({**fields, "metrics": checkpoint.metrics, "missed": checkpoint.missed}))
    else:
        print(*fields.values())
    sys.stdout.flush()


@verb("pin")
@click.argument("checkpoint", metavar="RUN@STEP", type=RunPath())
def command_of_pin(report: Report, checkpoint: str) -> None:
    """Keep a checkpoint, regardless of the job's retention and of `holdfast prune`, until it is unpinned."""
    target = _find_run(checkpoint)
    choose_step(target.run.look(), target)  # Its errors say more than those of a program do.
    name = pin(checkpoint)
    report.fields = {"run": checkpoint, **name_fields(name), "is_pinned": True}
    report.line((f"step {name.step} is pinned", GOOD))
    place = f"{checkpoint.rpartition('@')[0] or checkpoint}@{name.step}"
    report.line(("to undo this: ", FAINT), f"holdfast unpin {shlex.quote(place)}")


@verb("unpin")
@click.argument("checkpoint", metavar="RUN@STEP", type=RunPath())
def command_of_unpin(report: Report, checkpoint: str) -> None:
    """Remove a pin: from its next save on, the job may remove the checkpoint."""
    _find_run(checkpoint)
    was_pinned = unpin(checkpoint)
    report.fields = {"run": checkpoint, "was_pinned": was_pinned}
    report.line((f"{checkpoint} is no longer pinned", GOOD) if was_pinned else f"{checkpoint} was not pinned")
