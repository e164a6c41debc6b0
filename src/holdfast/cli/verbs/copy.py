"""`holdfast copy`: copies a run, or steps of it, from one place to another."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import click

from holdfast.catalog import Catalog, split_place
from holdfast.catalog.named_step import LATEST
from holdfast.cli.completion import RunPath
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.report import Report, name_fields, problem_fields, verb
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, counted
from holdfast.cli.target import MOST_LOOKS, RunTarget, belongs_to_run, choose_step, find_target, no_living, takes_tiers
from holdfast.errors import NoCheckpointError, UsageError
from holdfast.format.names import StepName, is_own_file, parse_step_directory
from holdfast.numbers import size_text, time_text
from holdfast.process.exit import ending_on
from holdfast.restore.copying import CopiedStep, CopyOutcome, copy_steps
from holdfast.storage import Storage

_RANGE: Final = re.compile(r"(\d{1,16})(?:-(\d{1,16}))?", re.ASCII)


_STYLES: Final = {
    CopyOutcome.COPIED: ("✓ ", GOOD),
    CopyOutcome.THERE: ("= ", FAINT),
    CopyOutcome.DAMAGED: ("✗ ", BAD),
    CopyOutcome.REMOVED: ("- ", FAINT),
}


@verb("copy")
@click.argument("source", metavar="RUN[@STEP]", type=RunPath())
@click.argument("destination", metavar="DESTINATION", type=RunPath(takes_step=False))
@click.option("--steps", metavar="A,B-C,...", default="", help="Copy only these steps, and those from B to C.")
@takes_tiers
def command(report: Report, source: str, destination: str, steps: str, tiers: tuple[str, ...]) -> None:
    """Copy a run, or steps of it, to another place.

    RUN and DESTINATION are directories or URLs, such as runs/gpt and s3://bucket/gpt. All steps of the current lineage
    are copied unless you add a step, as in runs/gpt@latest, or --steps. Steps to which these refer are copied too.

    Every byte is checked as it passes, and a step counts in DESTINATION only when all of it is there. After an
    interruption the same command continues; what is there and whole is not copied again. DESTINATION is a new place, or
    has an earlier copy of the same run. A job can continue there. No job may save there during the copy.

    The exit code is 0 if everything is in DESTINATION, and 1 if a step is damaged.
    """
    target = find_target(source, tiers)
    if target.is_step:
        raise UsageError(
            f"{source} is the directory of a single step", hint="Name the run above it, as in RUN@STEP or --steps."
        )
    if steps and target.step is not None:
        raise UsageError("--steps and @ cannot be combined", hint=f"Write {target.location} --steps {steps}.")
    goal = _open_destination(destination, target.storage)
    begun_at = time.monotonic()
    done: list[CopiedStep] = []
    with ending_on(signal.SIGTERM, signal.SIGHUP):
        try:
            for _ in range(MOST_LOOKS):
                catalog = target.run.look(closely=True)
                # Of a whole run: the newest generation may say which steps count, and have none yet.
                newest = catalog.generation if not (steps or target.step is not None or catalog.faults) else None
                for copied in copy_steps(target.run, goal, _choose(target, catalog, steps), newest):
                    done.append(copied)
                    _show_step(report, copied)
                    sys.stdout.flush()
                if target.step != LATEST or done[-1].outcome is not CopyOutcome.REMOVED:
                    break
        except (KeyboardInterrupt, SystemExit):
            report.note(("interrupted: ", NOTABLE), "the same command continues; no step in it is half there")
            raise
    outcomes = Counter(copied.outcome for copied in done)
    seconds, size_bytes = time.monotonic() - begun_at, sum(copied.size_bytes for copied in done)
    if outcomes[CopyOutcome.DAMAGED]:
        report.exit_code = ExitCode.DAMAGED
    elif not (outcomes[CopyOutcome.COPIED] or outcomes[CopyOutcome.THERE]):
        report.error = NoCheckpointError(
            f"{source}: it was removed before it could be copied", hint="A running job removes old steps. Try again."
        )
    counts = ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.items())
    speed = f"   {size_text(size_bytes)} in {time_text(seconds)}, {size_text(size_bytes / (seconds or 1))}/s"
    report.line(f"{counted(len(done), 'step')}: {counts}", (speed if report.is_page and size_bytes else "", FAINT))
    off_line = len(set(catalog.committed) - set(catalog.living))
    if off_line and not steps and target.step is None:
        report.note((f"not copied: {counted(off_line, 'step')} off the current lineage", FAINT))
        report.note(("  hint: ", FAINT), "`holdfast list --all` shows their directories, and --steps takes these.")
    report.fields = {
        "source": target.storage.url,
        "destination": goal.url,
        "copied_bytes": size_bytes,
        "seconds": seconds,
        "steps": [
            {
                **name_fields(copied.name),
                "directory": copied.name.directory,
                "outcome": copied.outcome.value,
                "copied_bytes": copied.size_bytes,
                "problem": problem_fields(copied.problem) if copied.problem else None,
            }
            for copied in done
        ],
    }


def _open_destination(destination: str, source: Storage) -> Storage:
    goal, location, step = split_place(destination)
    if step is not None:
        raise UsageError(f"{destination}: the destination is a run", hint=f"Write {location}, without @{step}.")
    entries = goal.list("")
    if any(not entry.is_directory and is_own_file(entry.name) for entry in entries):
        raise UsageError(f"{destination} is the directory of a single step", hint="Name that of a run, or a new one.")
    if entries and not any(map(belongs_to_run, entries)):
        raise UsageError(
            f"{destination} holds other files, and no run", hint=f"Name a new place in it: {location.rstrip('/')}/NAME."
        )
    places = [storage.url if storage.location is None else storage.location.resolve() for storage in (source, goal)]
    if places[0] == places[1]:
        raise UsageError(f"{destination} is what is to be copied", hint="Name another place.")
    return goal


def _choose(target: RunTarget, catalog: Catalog, steps: str) -> Sequence[StepName]:
    if target.step is not None:
        return [choose_step(catalog, target)]
    if not steps:
        if not catalog.living:
            raise no_living(catalog, target)
        return catalog.living
    names: dict[StepName, None] = {}
    for text in map(str.strip, steps.split(",")):
        if (named := parse_step_directory(text)) in catalog.committed:
            names[named] = None
            continue
        found = _RANGE.fullmatch(text)
        if found is None:
            raise UsageError(f"--steps {text!r} is not a step", hint="Write --steps 300,500 or --steps 300-500.")
        first, last = int(found[1]), int(found[2] or found[1])
        chosen = [name for name in catalog.living if first <= name.step <= last]
        if found[2] and not chosen:
            raise NoCheckpointError(
                f"{target.location} has no step from {first} to {last}", hint="`holdfast list` shows those that it has."
            )
        names |= dict.fromkeys(chosen or [catalog.find(first, target.location)])
    return list(names)


def _show_step(report: Report, copied: CopiedStep) -> None:
    symbol, style = _STYLES[copied.outcome]
    report.line(
        (f"{symbol if report.has_symbols else ''}{copied.outcome.value:<7}", style),
        f"  step {copied.name.step}  ",
        (copied.name.directory + (f"  {report.size(copied.size_bytes)}" if copied.size_bytes else ""), FAINT),
    )
    if copied.problem is not None:
        report.line("    ", copied.problem.message)
        if copied.problem.hint:
            report.note(("  hint: ", FAINT), copied.problem.hint)
