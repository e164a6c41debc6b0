"""`holdfast verify`: reads every byte of a checkpoint and checks it."""

from __future__ import annotations

import enum
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import click

from holdfast.catalog import Catalog, StoredRun, StoredStep
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.screen import (
    BAD,
    FAINT,
    GOOD,
    NOTABLE,
    Screen,
    Words,
    byte_progress,
    counted,
    write_json,
)
from holdfast.cli.survey import State, name_fields, problem_fields
from holdfast.cli.target import MOST_LOOKS, RunTarget, choose_step, find_target, no_living
from holdfast.errors import DamageError, HoldfastError, NotFoundError, StorageError, UsageError
from holdfast.events.kinds import size_text, time_text
from holdfast.format.names import COMMITTED_NAME, StepName
from holdfast.restore.verify import Checked, count_unread, open_step, spares_restore, verify_data
from holdfast.storage import Storage

_THREADS: Final = max(2, min(4, os.cpu_count() or 1))


class CheckOutcome(enum.StrEnum):
    """Outcome of reading a checkpoint."""

    WHOLE = "whole"
    """Every byte is as it was written."""
    RESTORABLE = "restorable"
    """Headers of data files are damaged, which other programs need and a restore does not; all else is whole."""
    DAMAGED = "damaged"
    """Something is not as it was written."""
    UNREADABLE = "unreadable"
    """An I/O error ended the reading; the rest of the checkpoint was not checked."""
    REMOVED = "removed"
    """It was removed while it was being read."""


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Result of reading one checkpoint.

    Attributes:
        directory: The name of its directory; empty where that itself was named.
        name: The checkpoint; None if the directory may have any name and its manifest is damaged.
        outcome: The outcome.
        problems: The damage, in the order of the files, and any I/O error.
        read_bytes: Number of bytes that were read.
        seconds: Duration of the reading.
    """

    directory: str
    name: StepName | None
    outcome: CheckOutcome
    problems: tuple[HoldfastError, ...]
    read_bytes: int
    seconds: float


def judge_step(
    storage: Storage,
    directory: str,
    name: StepName | None,
    label: str = "reading",
    *,
    beside: Storage | None = None,
    checked: Checked | None = None,
) -> CheckVerdict:
    """**Blocks.** Reads every byte of one checkpoint, with a bar on the error stream if that is a terminal.

    `beside` holds the steps that it refers to; their data that are in `checked` are not read again.

    Raises:
        StorageError: If the run's directory cannot be listed.
    """
    begun_at = time.monotonic()
    read_bytes = 0
    problems: list[HoldfastError] = []
    outcome = CheckOutcome.WHOLE
    checked = {} if checked is None else checked
    try:
        opened = open_step(storage, directory, name)
        name = opened.name
        with byte_progress(sys.stderr, label) as bar:
            if bar is not None:
                bar.expect(count_unread(opened, checked))

            def count(just_read_bytes: int) -> None:
                # Called from several threads; should two of them collide, a figure for people is a little too small.
                nonlocal read_bytes
                read_bytes += just_read_bytes
                if bar is not None:
                    bar.advance(just_read_bytes)

            problems.extend(
                verify_data(storage, opened, threads=_THREADS, progress=count, beside=beside, checked=checked)
            )
    except (DamageError, StorageError) as error:
        problems.append(error)
    if problems:
        is_failure = isinstance(problems[-1], StorageError)
        damaged = CheckOutcome.RESTORABLE if spares_restore(problems) else CheckOutcome.DAMAGED
        outcome = CheckOutcome.UNREADABLE if is_failure else damaged
        # A job that runs removes old steps, manifest first: what is missing then was not damaged.
        if directory and name not in StoredRun(storage).look(closely=True).committed:
            outcome = CheckOutcome.REMOVED
    return CheckVerdict(directory, name, outcome, tuple(problems), read_bytes, time.monotonic() - begun_at)


@click.command()
@click.argument("run", metavar="RUN[@STEP]", type=click.Path())
@click.option(
    "--all", "verify_all", is_flag=True, help="Read every checkpoint, also those that are not in the current lineage."
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(run: str, verify_all: bool, as_json: bool) -> None:
    """Read every byte of a checkpoint and check it.

    RUN is the directory that a job saves into. Its newest checkpoint is read unless you add a step, as in runs/gpt@500.
    RUN can also be the directory of a single step, or a copy of one.

    The exit code is 0 if everything that was read is whole, and 1 if there is damage.
    """
    target = find_target(run)
    if verify_all and (target.is_step or target.step is not None):
        raise UsageError("--all reads every checkpoint of a run", hint="Name the run alone, or leave out --all.")
    catalog, names = _choose(target, verify_all)
    report = VerifyReport(target, catalog, tuple(_find_damaged_records(target, catalog, verify_all)))
    screen = None if as_json else Screen(sys.stdout)
    if screen is not None:
        report.show_records(screen)
    for _ in range(MOST_LOOKS):
        is_removed = False
        for verdict in _judge(target, names):
            report.verdicts.append(verdict)
            is_removed = verdict.outcome is CheckOutcome.REMOVED
            if screen is not None:
                report.show_verdict(screen, verdict)
                sys.stdout.flush()
        if verify_all or target.step is not None or not is_removed:
            break
        report.catalog, names = _choose(target, verify_all)
    if screen is None:
        write_json(sys.stdout, "verify", report.document())
    else:
        report.show_sum(screen)
    raise click.exceptions.Exit(report.exit_code)


def _choose(target: RunTarget, verify_all: bool) -> tuple[Catalog | None, Sequence[StepName | None]]:
    if target.is_step:
        return None, [None]
    catalog = StoredRun(target.storage).look(closely=True)
    if not verify_all:
        return catalog, [choose_step(catalog, target)]
    if not catalog.committed:
        raise no_living(catalog, target)
    return catalog, catalog.committed


def _find_damaged_records(target: RunTarget, catalog: Catalog | None, verify_all: bool) -> Iterator[DamageError]:
    """Yields the damage of the run's own records, which give the order of its steps."""
    if catalog is None:
        return
    yield from catalog.faults
    for name in StoredRun(target.storage).find_lost(catalog):
        if catalog.newest is None or verify_all or name > catalog.newest:
            path = name.manifest_path
            yield DamageError(f"{path} is missing, but the step was committed", step=name.step, path=path)
    for generation in StoredRun(target.storage).list_generations() if verify_all else ():
        try:
            StoredRun(target.storage).opening(generation)
        except NotFoundError:
            continue
        except DamageError as damage:
            yield damage


def _judge(target: RunTarget, names: Sequence[StepName | None]) -> Iterator[CheckVerdict]:
    checked: Checked = {}
    for number, name in enumerate(names, start=1):
        label = f"step {name.step}" if name else "reading"
        label += f" ({number} of {len(names)})" if len(names) > 1 else ""
        directory = name.directory if name else ""
        yield judge_step(target.storage, directory, name, label, beside=target.beside, checked=checked)


_SHOWN_PROBLEMS: Final = 20
_STYLES: Final = {
    CheckOutcome.WHOLE: ("✓ ", GOOD),
    CheckOutcome.RESTORABLE: ("! ", NOTABLE),
    CheckOutcome.DAMAGED: ("✗ ", BAD),
    CheckOutcome.UNREADABLE: ("✗ ", BAD),
    CheckOutcome.REMOVED: ("- ", FAINT),
}


@dataclass
class VerifyReport:
    """Collects the verdicts; shows each one at once, and a summary at the end."""

    target: RunTarget
    catalog: Catalog | None
    records: tuple[DamageError, ...]
    verdicts: list[CheckVerdict] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the verb."""
        outcomes = self._count()
        if self.records or outcomes[CheckOutcome.DAMAGED] or outcomes[CheckOutcome.RESTORABLE]:
            return ExitCode.DAMAGED
        if outcomes[CheckOutcome.UNREADABLE]:
            return ExitCode.FAILED
        return ExitCode.OK if outcomes[CheckOutcome.WHOLE] else ExitCode.NOTHING_THERE

    def _find_newest(self, *outcomes: CheckOutcome) -> StepName | None:
        """Returns the newest checkpoint of the current lineage with one of these outcomes, or None."""
        if self.catalog is None:
            return None
        names = {verdict.name for verdict in self.verdicts if verdict.outcome in outcomes}
        return next((name for name in reversed(self.catalog.living) if name in names), None)

    def show_records(self, screen: Screen) -> None:
        """Writes the damaged records of the run."""
        for damage in self.records:
            screen.say(("damaged   ", BAD), damage.message)

    def show_verdict(self, screen: Screen, verdict: CheckVerdict) -> None:
        """Writes one line for a checkpoint, and one more for each damaged place."""
        symbol, style = _STYLES[verdict.outcome]
        step = f"step {verdict.name.step}" if verdict.name else "step ?"
        screen.say(
            (f"{symbol if screen.has_symbols else ''}{verdict.outcome.value:<8}", style),
            f"  {step}  ",
            (f"{verdict.directory or self.target.location}  {screen.size(verdict.read_bytes)} read", FAINT),
        )
        if verdict.outcome is CheckOutcome.REMOVED:
            return
        if not self._has_copy(verdict):
            copy = f"{COMMITTED_NAME}, the copy of its manifest, is missing or damaged"
            screen.say("    ", f"{copy}; no restore needs it, and the next start of the job writes it")
        for problem in verdict.problems[:_SHOWN_PROBLEMS]:
            screen.say("    ", problem.message)
        if len(verdict.problems) > _SHOWN_PROBLEMS:
            screen.say(f"    and {len(verdict.problems) - _SHOWN_PROBLEMS} more places (--json names them all)")

    def _has_copy(self, verdict: CheckVerdict) -> bool:
        is_whole = verdict.outcome in (CheckOutcome.WHOLE, CheckOutcome.RESTORABLE)
        return not is_whole or StoredStep(self.target.storage, verdict.directory).has_copy()

    def show_sum(self, screen: Screen) -> None:
        """Writes a summary, and what it means for a restore."""
        outcomes = self._count()
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.items())
        words: list[Words] = [f"{counted(len(self.verdicts), 'checkpoint')} read: {counts}"]
        read_bytes = sum(verdict.read_bytes for verdict in self.verdicts)
        seconds = sum(verdict.seconds for verdict in self.verdicts)
        if screen.is_terminal and seconds > 0:
            speed = size_text(read_bytes / seconds)
            words.append((f"   {size_text(read_bytes)} in {time_text(seconds)}, {speed}/s", FAINT))
        screen.say(*words)
        newest = self.catalog.newest if self.catalog else None
        is_read = newest in {verdict.name for verdict in self.verdicts}
        if newest is None or not is_read or newest == self._find_newest(CheckOutcome.WHOLE):
            return
        taken = self._find_newest(CheckOutcome.WHOLE, CheckOutcome.RESTORABLE)
        if taken == newest:
            text = f"A restore can use step {taken.step}; programs that read its data file without holdfast may fail."
            screen.say((text, NOTABLE))
        elif taken is not None:
            screen.say((f"A restore skips what is damaged and uses step {taken.step}.", NOTABLE))
        elif len(self.verdicts) == 1 and len(self.catalog.living if self.catalog else ()) > 1:
            screen.say(("A restore skips it and uses an older step; --all shows which are whole.", NOTABLE))
        else:
            screen.say(("No checkpoint of the current lineage is whole.", BAD))

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        living = self.catalog.living if self.catalog else ()
        newest_whole = self._find_newest(CheckOutcome.WHOLE)
        return {
            "place": self.target.storage.url,
            "is_whole": self.exit_code is ExitCode.OK,
            "newest_whole_step": newest_whole.step if newest_whole else None,
            "read_bytes": sum(verdict.read_bytes for verdict in self.verdicts),
            "seconds": sum(verdict.seconds for verdict in self.verdicts),
            "steps": [
                {
                    **name_fields(verdict.name),
                    "directory": verdict.directory or None,
                    "state": None
                    if self.catalog is None
                    else (State.LIVING if verdict.name in living else State.OFF_LINE).value,
                    "outcome": verdict.outcome.value,
                    "read_bytes": verdict.read_bytes,
                    "seconds": verdict.seconds,
                    "problems": [problem_fields(problem) for problem in verdict.problems],
                    "has_copy": self._has_copy(verdict),
                }
                for verdict in self.verdicts
            ],
            "damaged_records": [problem_fields(damage) for damage in self.records],
        }

    def _count(self) -> Counter[CheckOutcome]:
        return Counter(verdict.outcome for verdict in self.verdicts)
