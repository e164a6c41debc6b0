"""The progress and speed of a loop, what was saved of it, and the state of a paused one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.errors import HoldfastError, SaveFailedError, StepExistsError, UsageError
from holdfast.preemption.grace import MARGIN_SECONDS, Outlook, ReceivedNotice, StopOrder, find_lateness
from holdfast.preemption.sources.protocol import Demand
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark

ATTEMPTS: Final = 2
"""How often the last save is attempted: a first failure may have been a temporary one of the storage."""

_RECENT_STEPS: Final = 16


class StandingOrder:
    """The order to all workers, for the next step at which all can stop.

    Attributes:
        pending: The order; None for none.
        obey: Carries it out in the training thread, all of whose steps are complete; returns the step from which
            training continues.
    """

    def __init__(self) -> None:
        self.pending: StopOrder | None = None
        self.obey: Callable[[StopOrder, int], int] = _refuse


def _refuse(order: StopOrder, step: int) -> int:
    raise UsageError(f"{order.cause}: only a run that is entered can go back")


class LoopProgress:
    """The progress of the training thread, which owns it; another thread may read it.

    Attributes:
        step: How many steps were complete at the last measurement.
        passed_at: The time of that, by the monotonic clock, less the time of saves; None before.
        early: The save that was begun after a notice, in the grace period.
        early_step: Its step.
        is_left_out: True if a save at this step was skipped, because another was in progress.
        safe_step: The last step at which nothing could be lost.
    """

    def __init__(self) -> None:
        self.step = self.safe_step = 0
        self.passed_at: float | None = None
        self.early: SaveHandle | None = None
        self.early_step: int | None = None
        self.is_left_out = self._is_late_reported = False
        self._early_demand: Demand | None = None
        self._early_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def measure(self, step: int) -> None:
        """Called between two steps, when that many are complete."""
        now = time.monotonic()
        if self.passed_at is not None and step > self.step:
            self._step_seconds.append((now - self.passed_at) / (step - self.step))
        self.passed_at, self.step, self.is_left_out = now, step, False

    def rewind(self, step: int) -> None:
        """Called when training has gone back to a step, which is saved."""
        self.step = self.safe_step = step
        self.early, self.early_step, self.passed_at = None, None, None

    def note_early(self, step: int | None, demand: Demand, saved: SaveHandle | None) -> None:
        """Records a save that was begun for that demand, to train on; None if it cannot be waited for."""
        self.early_step, self._early_demand, self.early = step, demand, saved
        self._early_at = time.monotonic()

    def forget_early(self) -> None:
        """Called when the notice has been handled."""
        self.early = self._early_demand = None
        self._is_late_reported = False

    def make_outlook(
        self, demand: Demand, left_seconds: float | None, save_seconds: float | None, *, is_paused: bool
    ) -> Outlook:
        """Returns what is known now.

        Args:
            demand: The demand of the notices.
            left_seconds: The remaining time; None if it is not known.
            save_seconds: How long the newest save took; None if none was measured.
            is_paused: True if no step comes before the next action.
        """
        early = self.early
        is_under_way = early is not None and not early.ended
        return Outlook(
            demand=demand,
            left_seconds=left_seconds,
            step_seconds=0.0 if is_paused else max(self._step_seconds, default=None),
            save_seconds=save_seconds,
            saving_seconds=time.monotonic() - self._early_at if is_under_way else None,
            is_saved=self._early_demand is not None and self._early_demand >= demand,
            has_failed=early is not None and early.failed,
            copy_seconds=None if early is None else early.copy_seconds,
        )

    def find_lateness(self, received: Sequence[ReceivedNotice], left_seconds: float | None) -> str:
        """Returns the warning, once, about a step that does not end after a notice; empty as long as there is none."""
        text = find_lateness(received, left_seconds, self.passed_at or 0.0, time.monotonic())
        is_reported, self._is_late_reported = self._is_late_reported, self._is_late_reported or bool(text)
        return "" if is_reported else text


def end_at_of(outlook: Outlook) -> float | None:
    """Returns when the last save must be done, by the monotonic clock; None if the job's end is not known."""
    left = outlook.left_seconds
    return None if left is None else time.monotonic() + left - MARGIN_SECONDS / 2


class PausedState(msgspec.Struct):
    """A pause between steps: evaluation, a wait for data, and the time before and after the loop.

    Attributes:
        step: How many steps are complete; None before that is known.
        begun: How many steps the training thread had begun before it paused, or may have.
        mark: Their state, to be saved if needed; None if all is saved, or nothing was trained.
        saved: The save of that step, if one is in progress or done.
        changed: Why the state cannot be saved: the objects that have changed.
        is_anew: True if the step is to be saved again: its save may be incomplete.
        has_saved: True if it was saved in this pause.
    """

    step: int | None
    begun: int
    mark: Mark | None = None
    saved: SaveHandle | None = None
    changed: str = ""
    is_anew: bool = False
    has_saved: bool = False

    def renew(self, provisional: int | None) -> None:
        """Marks the state to be saved again if there is a save of that step that does not count."""
        self.is_anew |= self.saved is not None and self.step == provisional

    def save(self) -> str:
        """**Blocks** while the state is copied, unless it is saved already.

        Returns the error; an empty string if there is none.
        """
        is_safe = self.saved is not None and not self.saved.failed and not self.is_anew
        if self.mark is None or self.step is None or is_safe:
            return ""
        try:
            if changed := self.mark.changed:
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                self.changed = f"{', '.join(changed[:3])}{more} changed since the step ended"
            if self.changed:
                return self.changed
            self.saved = self.mark.save(self.step, replace=self.saved is not None and self.saved.must_be_replaced)
        except StepExistsError:
            return ""  # The user has saved it, and it is committed.
        except SaveFailedError as failure:
            # Of an earlier step; that was an event. This one goes on.
            if failure.next_save is None:
                return failure.message
            self.saved = failure.next_save
        except HoldfastError as failure:
            return failure.message
        self.is_anew, self.has_saved = False, True
        return ""

    def save_surely(self, wait: Callable[[SaveHandle, float | None], None], end_at: float | None) -> str:
        """**Blocks.** Saves, and waits with `wait` until that is committed. Returns the error, as `save` does.

        The process must be gone at `end_at`, by the monotonic clock.
        """
        error = ""
        for _ in range(ATTEMPTS):
            try:
                if self.is_anew and self.saved is not None:
                    with suppress(SaveFailedError):
                        # The next one waits for it, and knows no moment until when.
                        wait(self.saved, end_at)
                error = self.save()
                if not error and self.saved is not None:
                    wait(self.saved, end_at)
            except HoldfastError as failure:
                error = failure.message
            if not error:
                break
        return error
