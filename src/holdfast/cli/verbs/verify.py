"""`holdfast verify`: whether every byte is what was written."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from holdfast.catalog import Catalog, find_lost, read_catalog, read_generations, read_opening
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, Screen, Styled, Words, write_json
from holdfast.cli.survey import State, name_fields, problem_fields
from holdfast.cli.target import MOST_LOOKS, RunTarget, choose_step, find_target, no_living
from holdfast.cli.verdicts import CheckOutcome, CheckVerdict, judge_step
from holdfast.cli.wording import counted, duration_text, size_text
from holdfast.errors import DamageError, NotFoundError, UsageError
from holdfast.format.names import StepName
from holdfast.restore.verify import Checked


@click.command()
@click.argument("run", metavar="RUN[@STEP]", type=click.Path())
@click.option("--all", "verify_all", is_flag=True, help="Read every checkpoint, also those off the living line.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(run: str, verify_all: bool, as_json: bool) -> None:
    """Read every byte and say whether it is what was written.

    RUN is the directory that a job saves into, and its newest checkpoint is read unless a step is given, as in
    runs/gpt@500; if a job removes that one meanwhile, the newest that is there then. RUN may also be the directory of a
    single step, wherever that was copied to.

    The exit code is 0 if all that was read is whole, and 1 if there is damage.
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
            report.add(verdict)
            is_removed = verdict.outcome is CheckOutcome.REMOVED
            if screen is not None:
                report.show_verdict(screen, verdict)
                sys.stdout.flush()
        if verify_all or target.step is not None or not is_removed:
            break
        catalog, names = _choose(target, verify_all)
        report.look_again(catalog)
    if screen is None:
        write_json(sys.stdout, "verify", report.document())
    else:
        report.show_sum(screen)
    raise click.exceptions.Exit(report.exit_code)


def _choose(target: RunTarget, verify_all: bool) -> tuple[Catalog | None, Sequence[StepName | None]]:
    """The run, and what of it to read."""
    if target.is_step:
        return None, [None]
    catalog = read_catalog(target.storage)
    if not verify_all:
        return catalog, [choose_step(catalog, target)]
    if not catalog.committed:
        raise no_living(catalog, target)
    return catalog, catalog.committed


def _find_damaged_records(target: RunTarget, catalog: Catalog | None, verify_all: bool) -> Iterator[DamageError]:
    """The run's own records that are damaged: they say which step follows which."""
    if catalog is None:
        return
    yield from catalog.faults
    for name in find_lost(target.storage, catalog):
        if catalog.newest is None or verify_all or name > catalog.newest:
            path = name.manifest_path
            yield DamageError(f"{path} is missing, and the step was committed", step=name.step, path=path)
    for generation in read_generations(target.storage) if verify_all else ():
        try:
            read_opening(target.storage, generation)
        except NotFoundError:
            continue
        except DamageError as damage:
            yield damage


def _judge(target: RunTarget, names: Sequence[StepName | None]) -> Iterator[CheckVerdict]:

    checked = Checked()
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


class VerifyReport:
    """Gathers verdicts; shows each as it comes, and the sum of them at the end."""

    def __init__(self, target: RunTarget, catalog: Catalog | None, records: tuple[DamageError, ...]) -> None:
        """Begins without verdicts.

        Args:
            target: What was named on the command line.
            catalog: The run; None where the directory of a single step was named.
            records: Records of the run that are damaged.
        """
        self._target = target
        self._catalog = catalog
        self._records = records
        self._verdicts: list[CheckVerdict] = []

    def look_again(self, catalog: Catalog | None) -> None:
        """Goes by what the run is now."""
        self._catalog = catalog

    def add(self, verdict: CheckVerdict) -> None:
        """Takes in a verdict."""
        self._verdicts.append(verdict)

    @property
    def exit_code(self) -> ExitCode:
        """What the verb ends with."""
        outcomes = self._count()
        if self._records or outcomes[CheckOutcome.DAMAGED] or outcomes[CheckOutcome.RESTORABLE]:
            return ExitCode.DAMAGED
        if outcomes[CheckOutcome.UNREADABLE]:
            return ExitCode.FAILED
        return ExitCode.OK if outcomes[CheckOutcome.WHOLE] else ExitCode.NOTHING_THERE

    @property
    def newest_whole(self) -> StepName | None:
        """The newest checkpoint of the living line that was found whole, or None."""
        return self._find_newest(CheckOutcome.WHOLE)

    def _find_newest(self, *outcomes: CheckOutcome) -> StepName | None:
        if self._catalog is None:
            return None
        names = {verdict.name for verdict in self._verdicts if verdict.outcome in outcomes}
        return next((name for name in reversed(self._catalog.living) if name in names), None)

    def show_records(self, screen: Screen) -> None:
        """Names the damaged records of the run."""
        for damage in self._records:
            screen.say(Styled("damaged   ", BAD), damage.message)

    def show_verdict(self, screen: Screen, verdict: CheckVerdict) -> None:
        """One checkpoint: a line, and one more for each place that is damaged."""
        symbol, style = _STYLES[verdict.outcome]
        step = f"step {verdict.name.step}" if verdict.name else "step ?"
        size = size_text(verdict.read_bytes) if screen.is_terminal else f"{verdict.read_bytes} bytes"
        screen.say(
            Styled(f"{symbol if screen.has_symbols else ''}{verdict.outcome.value:<8}", style),
            f"  {step}  ",
            Styled(f"{verdict.directory or self._target.location}  {size} read", FAINT),
        )
        if verdict.outcome is CheckOutcome.REMOVED:
            return
        for problem in verdict.problems[:_SHOWN_PROBLEMS]:
            screen.say("    ", problem.message)
        if len(verdict.problems) > _SHOWN_PROBLEMS:
            screen.say(f"    and {len(verdict.problems) - _SHOWN_PROBLEMS} more places (--json names them all)")

    def show_sum(self, screen: Screen) -> None:
        """All in a sentence, and what it means for a restore."""
        outcomes = self._count()
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in outcomes.items())
        words: list[Words] = [f"{counted(len(self._verdicts), 'checkpoint')} read: {counts}"]
        read_bytes = sum(verdict.read_bytes for verdict in self._verdicts)
        seconds = sum(verdict.seconds for verdict in self._verdicts)
        if screen.is_terminal and seconds > 0:
            speed = size_text(read_bytes / seconds)
            words.append(Styled(f"   {size_text(read_bytes)} in {duration_text(seconds)}, {speed}/s", FAINT))
        screen.say(*words)
        newest = self._catalog.newest if self._catalog else None
        if newest is None or newest == self.newest_whole or newest not in {verdict.name for verdict in self._verdicts}:
            return
        taken = self._find_newest(CheckOutcome.WHOLE, CheckOutcome.RESTORABLE)
        if taken == newest:
            text = f"A restore takes step {taken.step}; programs that read its data file without holdfast may fail."
            screen.say(Styled(text, NOTABLE))
        elif taken is not None:
            screen.say(Styled(f"A restore passes over what is damaged and takes step {taken.step}.", NOTABLE))
        elif len(self._verdicts) == 1 and len(self._catalog.living if self._catalog else ()) > 1:
            screen.say(Styled("A restore passes over it and takes an older step; --all says which are whole.", NOTABLE))
        else:
            screen.say(Styled("No checkpoint of the living line is whole.", BAD))

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        living = self._catalog.living if self._catalog else ()
        return {
            "place": self._target.storage.url,
            "is_whole": self.exit_code is ExitCode.OK,
            "newest_whole_step": self.newest_whole.step if self.newest_whole else None,
            "read_bytes": sum(verdict.read_bytes for verdict in self._verdicts),
            "seconds": sum(verdict.seconds for verdict in self._verdicts),
            "steps": [
                {
                    **name_fields(verdict.name),
                    "directory": verdict.directory or None,
                    "state": None
                    if self._catalog is None
                    else (State.LIVING if verdict.name in living else State.OFF_LINE).value,
                    "outcome": verdict.outcome.value,
                    "read_bytes": verdict.read_bytes,
                    "seconds": verdict.seconds,
                    "problems": [problem_fields(problem) for problem in verdict.problems],
                }
                for verdict in self._verdicts
            ],
            "damaged_records": [problem_fields(damage) for damage in self._records],
        }

    def _count(self) -> Counter[CheckOutcome]:
        return Counter(verdict.outcome for verdict in self._verdicts)
