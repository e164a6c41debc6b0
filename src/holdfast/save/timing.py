"""How fast training goes, measured between the questions whether a save is due."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from holdfast.policies import SaveMoment

_WEIGHT: Final = 0.1
"""How much one new measurement counts against all before: recent steps tell more about the next than old ones."""

_STALLS: Final = 5
"""How many saves tell what the next will cost: one slow one among them changes little."""


class StepTimer:
    """Measures steps and the time since the last save. Not thread-safe: it belongs to the training thread."""

    def __init__(self) -> None:
        self._first_step = 0
        self._saved_step: int | None = None
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step: int | None = None
        self._step_seconds: float | None = None
        self._stalls_seconds: tuple[float, ...] = ()
        self._usual_stall_seconds: float | None = None

    def begin(self, step: int) -> None:
        """Training begins, or begins again, at a step that need not be saved."""
        self._first_step = step
        self._saved_step = step
        self._saved_at = time.monotonic()
        self._seen_step = None

    def saved(self, step: int) -> None:
        """A save of this step has begun; the time it held training up is not counted as a step's."""
        self._saved_step = step
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step = step

    def moment(self, step: int, blocked_seconds: float | None, durable_seconds: float | None) -> SaveMoment:
        """What a policy has to know after a step.

        Args:
            step: How many steps are complete.
            blocked_seconds: How long the newest save that is durable held training up, or None. Of several in a row,
                the policy is told what is usual.
            durable_seconds: How long it took to be durable, or None.
        """
        now = time.monotonic()
        if self._seen_step is not None and step > self._seen_step:
            measured = (now - self._seen_at) / (step - self._seen_step)
            known = self._step_seconds
            self._step_seconds = measured if known is None else known + _WEIGHT * (measured - known)
        self._seen_step, self._seen_at = step, now
        return SaveMoment(
            step=step,
            last_saved_step=self._saved_step,
            first_step=self._first_step,
            seconds_since_last_save=now - self._saved_at,
            step_seconds=self._step_seconds,
            save_blocked_seconds=self._note_stall(blocked_seconds),
            save_durable_seconds=durable_seconds,
        )

    def _note_stall(self, newest_seconds: float | None) -> float | None:
        """Takes in what the newest save has cost, if that is new, and says what one usually costs."""
        known = self._stalls_seconds
        # The same save is reported after every step until the next one is durable.
        if newest_seconds is not None and (not known or newest_seconds != known[-1]):
            # The first one stays at its place, so that it is known from the others.
            self._stalls_seconds = (*known[:1], *known[1:][1 - _STALLS :], newest_seconds)
            self._usual_stall_seconds = usual_stall_seconds(self._stalls_seconds)
        return self._usual_stall_seconds


def usual_stall_seconds(stalls_seconds: Sequence[float]) -> float:
    """**Pure.** How long a save usually holds training up: the median of the last few, the lower of two in the middle.

    The first save touches fresh memory, which no later one does, and counts only until two others are known: one is not
    enough, as that may be the slow one.

    Args:
        stalls_seconds: How long each save has held it up: the very first one, and then the last few; at least one.
    """
    later = stalls_seconds[1:]
    counted = sorted(later[-_STALLS:] if len(later) > 1 else stalls_seconds)
    return counted[(len(counted) - 1) // 2]
