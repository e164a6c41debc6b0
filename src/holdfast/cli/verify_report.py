"""What a person, or a program, is told of checkpoints that were read."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from holdfast.catalog import Catalog
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, Screen, Styled, Words
from holdfast.cli.survey import State, name_fields, problem_fields
from holdfast.cli.target import Target
from holdfast.cli.verdicts import Outcome, Verdict
from holdfast.cli.wording import counted, duration_text, size_text
from holdfast.errors import DamageError
from holdfast.format.names import StepName

_SHOWN_PROBLEMS: Final = 20
_STYLES: Final = {
    Outcome.WHOLE: ("✓ ", GOOD),
    Outcome.RESTORABLE: ("! ", NOTABLE),
    Outcome.DAMAGED: ("✗ ", BAD),
    Outcome.UNREADABLE: ("✗ ", BAD),
    Outcome.REMOVED: ("- ", FAINT),
}


class VerifyReport:
    """Gathers verdicts; shows each as it comes, and the sum of them at the end."""

    def __init__(self, target: Target, catalog: Catalog | None, records: tuple[DamageError, ...]) -> None:
        """Begins without verdicts.

        Args:
            target: What was named on the command line.
            catalog: The run; None where the directory of a single step was named.
            records: Records of the run that are damaged.
        """
        self._target = target
        self._catalog = catalog
        self._records = records
        self._verdicts: list[Verdict] = []

    def look_again(self, catalog: Catalog | None) -> None:
        """Goes by what the run is now."""
        self._catalog = catalog

    def add(self, verdict: Verdict) -> None:
        """Takes in a verdict."""
        self._verdicts.append(verdict)

    @property
    def exit_code(self) -> ExitCode:
        """What the verb ends with."""
        outcomes = self._count()
        if self._records or outcomes[Outcome.DAMAGED] or outcomes[Outcome.RESTORABLE]:
            return ExitCode.DAMAGED
        if outcomes[Outcome.UNREADABLE]:
            return ExitCode.FAILED
        return ExitCode.OK if outcomes[Outcome.WHOLE] else ExitCode.NOTHING_THERE

    @property
    def newest_whole(self) -> StepName | None:
        """The newest checkpoint of the living line that was found whole, or None."""
        return self._find_newest(Outcome.WHOLE)

    def _find_newest(self, *outcomes: Outcome) -> StepName | None:
        if self._catalog is None:
            return None
        names = {verdict.name for verdict in self._verdicts if verdict.outcome in outcomes}
        return next((name for name in reversed(self._catalog.living) if name in names), None)

    def show_records(self, screen: Screen) -> None:
        """Names the damaged records of the run."""
        for damage in self._records:
            screen.say(Styled("damaged   ", BAD), damage.message)

    def show_verdict(self, screen: Screen, verdict: Verdict) -> None:
        """One checkpoint: a line, and one more for each place that is damaged."""
        symbol, style = _STYLES[verdict.outcome]
        step = f"step {verdict.name.step}" if verdict.name else "step ?"
        size = size_text(verdict.read_bytes) if screen.is_terminal else f"{verdict.read_bytes} bytes"
        screen.say(
            Styled(f"{symbol if screen.has_symbols else ''}{verdict.outcome.value:<8}", style),
            f"  {step}  ",
            Styled(f"{verdict.directory or self._target.location}  {size} read", FAINT),
        )
        if verdict.outcome is Outcome.REMOVED:
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
        taken = self._find_newest(Outcome.WHOLE, Outcome.RESTORABLE)
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

    def _count(self) -> Counter[Outcome]:
        return Counter(verdict.outcome for verdict in self._verdicts)
