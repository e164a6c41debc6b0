"""How fast training goes, measured between the questions whether a save is due."""

from __future__ import annotations

import time
from typing import Final

from holdfast.policies import SaveMoment

_WEIGHT: Final = 0.1
"""How much one new measurement counts against all before: recent steps tell more about the next than old ones."""


class Pace:
    """Measures steps and the time since the last save. Not thread-safe: it belongs to the training thread."""

    def __init__(self) -> None:
        self._first_step = 0
        self._saved_step: int | None = None
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step: int | None = None
        self._step_seconds: float | None = None

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
            blocked_seconds: How long the newest save held training up, or None.
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
            save_blocked_seconds=blocked_seconds,
            save_durable_seconds=durable_seconds,
        )
