"""What happened to both runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from demo.reports import StepDone
from demo.verdict import Comparison
from holdfast.events import Restored


@dataclass(slots=True)
class Life:
    """One process of the run under fire, from its start to its end.

    Attributes:
        number: Which process it was, from 1 on.
        restored: What it was brought back from; None if it began from nothing.
        steps: The steps that it did.
        killed: Whether it was killed.
        writing: The checkpoint's directory in the midst of whose writing it was killed, or an empty string.
        staged_step: The step of its last save, or None.
        write_seconds: How long it took to write the last checkpoint that it wrote to the end; 0 before that.
    """

    number: int
    restored: Restored | None = None
    steps: list[StepDone] = field(default_factory=list)
    killed: bool = False
    writing: str = ""
    staged_step: int | None = None
    write_seconds: float = 0.0

    @property
    def began_with(self) -> int:
        """How many steps were complete when it began."""
        return self.restored.step if self.restored is not None else 0

    @property
    def ended_with(self) -> int:
        """How many steps were complete when it ended."""
        return self.steps[-1].step if self.steps else self.began_with


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of both runs.

    Attributes:
        untouched: The steps of the run that nobody touched.
        lives: The processes of the run under fire, in order.
        comparisons: What was held against each other.
        directory: The directory of the run under fire.
    """

    untouched: list[StepDone]
    lives: list[Life]
    comparisons: list[Comparison]
    directory: Path

    @property
    def objections(self) -> list[str]:
        """Why the verdict is no; empty if it is yes."""
        objections = [str(comparison) for comparison in self.comparisons if not comparison.identical]
        if not any(life.writing for life in self.lives):
            objections.append("no kill was in the middle of a write")
        return objections
