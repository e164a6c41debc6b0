"""What the run under fire has cost: from its journal of events, and from what its processes told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from demo.reports import StepDone
from demo.verdict import Outcome
from holdfast.events import Staged, Sums, read_events
from holdfast.events.sinks import JOURNAL_NAME, add_event


@dataclass(frozen=True, slots=True)
class Figures:
    """What a person wants to know.

    Attributes:
        kills: How many processes were killed.
        kills_in_write: How many of them in the middle of writing a checkpoint.
        steps: How many steps the run has.
        steps_repeated: How many were lost with a process and done again.
        training_seconds: How long the processes trained, from the end of each one's first step.
        sums: What saving has cost, by the journal.
        saves_cut_off: How many saves had begun and were never heard of again, even if a kill came just after a commit.
        restores: How often the job was brought back from a checkpoint.
        fresh_starts: How often it began from nothing, since none had been committed yet.
        restore_seconds: How long that took, all together.
        restored_bytes: What was read and checked for it.
        back_seconds: From each kill to the end of the first step after it.
        step_seconds: What a step took, by the median: untouched, and under fire.
    """

    kills: int
    kills_in_write: int
    steps: int
    steps_repeated: int
    training_seconds: float
    sums: Sums
    saves_cut_off: int
    restores: int
    fresh_starts: int
    restore_seconds: float
    restored_bytes: int
    back_seconds: tuple[float, ...]
    step_seconds: tuple[float, float]

    @property
    def blocked_share(self) -> float:
        """How much of the training time saves have taken."""
        return self.sums.blocked_seconds / self.training_seconds if self.training_seconds else 0.0


def read_figures(outcome: Outcome) -> Figures:
    """**Blocks.** Adds up what happened."""
    sums, staged = Sums(), 0
    for event in read_events(outcome.directory / JOURNAL_NAME):
        sums = add_event(sums, event)
        staged += isinstance(event, Staged)
    lives = outcome.lives
    # From the processes, not from the journal: one that was killed before its first save never wrote there.
    restored = [life.restored for life in lives if life.restored is not None]
    lengths = [seconds for life in lives for seconds in _lengths(life.steps)]
    return Figures(
        kills=sum(life.killed_at_seconds is not None for life in lives),
        kills_in_write=sum(bool(life.writing) for life in lives),
        steps=len(outcome.untouched),
        steps_repeated=sum(before.ended_with - after.began_with for before, after in pairwise(lives)),
        training_seconds=sum(lengths),
        sums=sums,
        saves_cut_off=staged - sums.saves_committed - sums.saves_failed,
        restores=len(restored),
        fresh_starts=len(lives) - 1 - len(restored),
        restore_seconds=sum(event.blocked_seconds for event in restored),
        restored_bytes=sum(event.size_bytes for event in restored),
        back_seconds=tuple(life.back_seconds for life in lives[1:]),
        step_seconds=(median(_lengths(outcome.untouched) or [0.0]), median(lengths or [0.0])),
    )


def _lengths(steps: list[StepDone]) -> list[float]:
    return [after.at_seconds - before.at_seconds for before, after in pairwise(steps)]
