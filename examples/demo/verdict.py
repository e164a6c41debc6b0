"""Whether two runs are bit-identical, item by item. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from demo.reports import Evidence, StepDone

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
