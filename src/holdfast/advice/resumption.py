"""Warnings of programs that train epochs without a backup, or count from 0 again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from holdfast.advice.oversights import EPOCHS_BEFORE_UNCHANGED, TrainingWatch

_MOST_IN_AN_EPOCH: Final = 10_000
"""The limit if no saved loader shows that an epoch has ended."""


class EpochWatch(TrainingWatch):
    """Detects a program that trains epochs and backs none of them up."""

    _lack = "no epoch was backed up"
    _remark = ". If your next backup is yet to come, ignore this"

    def __init__(self, objects: Mapping[str, object], warn: Callable[..., object]) -> None:
        """Starts watching; `warn` is called with each warning, with `is_error=True` if the training is lost."""
        super().__init__(objects, warn, "call back_up(epoch) after each epoch", warn)
        self._warn_at_end = warn

    def note_counted(self) -> None:
        """Called when a backup has begun, so the program does make them."""
        self._is_counted = True
        self._end_following()

    def finish(self, consequence: str, *, is_error: bool = False) -> None:
        """Stops watching, and reports what was trained and not backed up; may be repeated."""
        self.end()
        text, self._is_counted = self.describe(consequence), True
        if text:
            self._warn_at_end(text, is_error=is_error)

    def _is_long(self, number: int) -> bool:
        return number >= _MOST_IN_AN_EPOCH or self._count_batches()[1] - self._step_began[1] >= EPOCHS_BEFORE_UNCHANGED


def describe_resumption(step: int, asked: str, loop: str) -> str:
    """**Pure.** Returns the warning for a resumed program whose own loop counts a step without having asked for the
    step.

    Args:
        step: How many steps were complete.
        asked: The attribute with the step.
        loop: The loop that resumes by itself.
    """
    return (
        f"resumed at step {step}, but this loop seems to start from 0: it has not read {asked}. A loop over range(n) "
        f"trains n more: begin at {asked}, or loop over {loop}, or over the epochs(n) of a saved ResumableDataLoader. "
        "If your loop resumes there by other means, ignore this"
    )
