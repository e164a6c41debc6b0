"""What happened to both runs, and whether they are bit-identical, item by item."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from demo.reports import Evidence, StepDone
from holdfast.events import Restored
from holdfast.format.names import parse_step_directory

EVERY_STEP: Final = "every step on the way"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One item of two runs.

    Attributes:
        item: What was compared.
        untouched: The SHA-256 of the item in the run that nobody touched.
        killed: The SHA-256 of the item in the run that was killed.
        differing: The names of the parts that differ, or that one of the two does not have.
        parts: How many parts there are.
    """

    item: str
    untouched: str
    killed: str
    differing: tuple[str, ...]
    parts: int

    @property
    def identical(self) -> bool:
        """Whether the item is the same in both, and there is something to it."""
        return self.untouched == self.killed and not self.differing and self.parts > 0

    def __str__(self) -> str:
        if self.identical:
            return f"{self.item}: identical"
        if not self.parts:
            return f"{self.item}: empty"
        more = "" if len(self.differing) == 1 else " first"
        return f"{self.item}: {len(self.differing)} of {self.parts} differ,{more} {self.differing[0]}"


def compare_evidence(untouched: Evidence, killed: Evidence) -> list[Comparison]:
    """**Pure.** Holds what two runs ended with against each other."""
    return [
        _compare(item, untouched.get(item, {}), killed.get(item, {})) for item in dict.fromkeys([*untouched, *killed])
    ]


def compare_steps(untouched: Iterable[StepDone], killed: Iterable[StepDone]) -> Comparison:
    """**Pure.** Holds every step that any process of the killed run has done against the same step of the other.

    Steps that were lost with a process and done again are among them, so they count each time.
    """
    expected = {done.step: _told(done) for done in untouched}
    found = [(done.step, _told(done)) for done in killed]
    missing = expected.keys() - {step for step, _ in found}
    wrong = [step for step, told in found if expected.get(step) != told]
    return Comparison(
        EVERY_STEP,
        _digest([expected.get(step, "") for step, _ in found]),
        _digest([told for _, told in found]),
        tuple(f"step {step}" for step in sorted({*wrong, *missing})),
        len(expected),
    )


def _compare(item: str, untouched: Mapping[str, str], killed: Mapping[str, str]) -> Comparison:
    names = list(dict.fromkeys([*untouched, *killed]))
    differing = tuple(name for name in names if untouched.get(name) != killed.get(name))
    return Comparison(item, _digest(untouched), _digest(killed), differing, len(names))


def _told(done: StepDone) -> str:
    return f"{done.loss} {done.samples}"


def _digest(value: Mapping[str, str] | list[str]) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


@dataclass(slots=True)
class Life:
    """One process of the run under fire, from its start to its end.

    Attributes:
        number: Which process it was, from 1 on.
        process: The process's own number.
        known: The directories of steps that were there when it began.
        restored: What it was brought back from; None if it began from nothing.
        steps: The steps that it did.
        killed_at_seconds: When it was killed, by the monotonic clock; None if it was not.
        unfinished: The directories of steps that it has left without a manifest.
        back_seconds: From the death of the one before to the end of its first step; 0 for the first one.
        staged_step: The step of its last save, or None.
        write_seconds: How long it took to write the last checkpoint that it wrote to the end; 0 before that.
    """

    number: int
    process: int
    known: frozenset[str] = frozenset()
    restored: Restored | None = None
    steps: list[StepDone] = field(default_factory=list)
    killed_at_seconds: float | None = None
    unfinished: tuple[str, ...] = ()
    back_seconds: float = 0.0
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

    @property
    def writing(self) -> str:
        """The checkpoint's directory in the midst of whose writing it was killed, or an empty string.

        A directory of another step without a manifest is an old one that was being removed.
        """
        for name in self.unfinished:
            parsed = parse_step_directory(name)
            if parsed is not None and parsed.step == self.staged_step and name not in self.known:
                return name
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of both runs.

    Attributes:
        untouched: The steps of the untouched run.
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
