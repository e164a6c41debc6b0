"""A run as its manager knows it between saves: what may be called, what is committed, and how fast it trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from holdfast.catalog import Catalog
from holdfast.catalog.starts import PastStarts
from holdfast.errors import ClosedError, StepExistsError, UsageError
from holdfast.options import check_wait
from holdfast.policies import SaveMoment
from holdfast.process.pulse import PULSE
from holdfast.save.handle import Origin, SaveHandle, SaveRequest
from holdfast.storage import Storage
from holdfast.supervise.board import COMMIT, NONE


class CallGuard:
    """Decides which calls of one manager are allowed now. All but `serving` belongs to the training thread.

    Attributes:
        is_closed: True once the manager is closed.
        caller: The thread that is in the call that makes a save, if one is.
        serving: The threads that make a save or clean up after one, and call sinks, while they do.
        newest: The newest save that was begun, or None.
    """

    def __init__(self, url: str) -> None:
        self._url, self._process = url, os.getpid()
        self.is_closed = False
        self.caller: int | None = None
        self.serving: set[int] = set()
        self.newest: SaveRequest | None = None

    @property
    def is_over(self) -> bool:
        """True once the manager is closed, or in a forked child, which has neither its threads nor its task."""
        return self.is_closed or os.getpid() != self._process

    def check_usable(self) -> None:
        """Raises `ClosedError` or `UsageError` unless the manager may be used now."""
        if self.is_closed:
            raise ClosedError(f"the manager of {self._url} is closed", hint="Create a new manager.")
        if os.getpid() != self._process:
            raise UsageError(
                f"the manager of {self._url} belongs to process {self._process}, and this is a child process",
                hint="Save in the process that created the manager, or create another manager in the child.",
            )
        self.check_reentry()

    def check_reentry(self) -> None:
        """Raises `UsageError` if this thread is in the call that makes a save, as a signal handler may be.

        A save that was neither confirmed nor dropped, because a second exception cut that off, is dropped here.
        """
        if self.caller == threading.get_ident():
            # Two saves would share one memory, a restore would change what is being captured, a wait would hold up what
            # it waits for, and a manager that is closed does not hold up the step for a copy.
            raise UsageError(
                f"a save into {self._url} has just begun, and this call was made from inside it",
                hint="In a signal handler, only set a flag, and do the rest after the step.",
            )
        if threading.get_ident() in self.serving:
            raise UsageError(
                f"an event sink called the manager of {self._url}, whose save waits for the sink",
                hint="In a sink, only record the event; do the rest in the training thread.",
            )
        if self.newest is not None:
            self.newest.drop_if_left()


class Lineage:
    """The current lineage of one manager. It belongs to the training thread, but for `settle`.

    Attributes:
        origin: Where the next generation begins.
        steps: The committed steps.
        newest: The newest of them; -1 for none.
        pace: Measures the steps of training.
        newest_asked: The newest step that was restored, or saved or attempted to be; -1 for none.
        in_flight: The save whose result is not known here yet, or None.
        find_steps: Returns the step at which the run that this belongs to was entered, and the number of complete
            steps; None if this belongs to no run.
        restored_by: What the program calls for a restore, for hints.
        storage: Where the run is.
        count_epochs: Returns how many epochs a restored framework has complete; None if this belongs to no framework.
    """

    def __init__(self, catalog: Catalog, storage: Storage, *, begins_anew: bool) -> None:
        living = () if begins_anew else catalog.living
        went_back = None if begins_anew else catalog.start_from
        self.origin = Origin(living[-1] if living else None, catalog.generation, start_from=went_back)
        self.pace = StepTimer()
        self.steps, self.newest_asked = {name.step for name in living}, -1
        # Of tens of thousands of steps the newest is not looked for at each save.
        self.newest = max(self.steps, default=-1)
        self.in_flight: SaveHandle | None = None
        self.find_steps: Callable[[], tuple[int, int]] | None = None
        self.restored_by, self.storage = "manager.restore(...)", storage
        self.count_epochs: Callable[[], int] | None = None
        # Held to clear `in_flight`: another thread may wait while the training thread begins a save.
        self._settling = threading.RLock()

    def check_step(self, step: int, *, replace: bool) -> None:
        """Raises `StepExistsError` or `UsageError` if a step may not be saved now, or replaced."""
        if step < self.newest_asked and not replace:
            # That save may have failed and its checkpoint be there all the same, if only the reply was lost.
            raise UsageError(
                f"step {step} is older than step {self.newest_asked}, which was already saved or attempted"
            )
        if step > self.newest or (replace and step in self.steps):
            return
        if step in self.steps:
            raise StepExistsError(
                f"step {step} of {self.storage.url} is already committed",
                hint="Save with replace=True to replace it, call restore() to continue from it, or use "
                "begin_anew=True.",
            )
        raise UsageError(
            f"step {step} is older than step {self.newest}, which {self.storage.url} already has",
            hint="Call restore() first to continue from a checkpoint, or create the manager with begin_anew=True.",
        )

    def note_restored(self, origin: Origin, step: int) -> None:
        """Called when everything was restored from a step: later saves continue from there.

        A job that has begun since then is detected by the next save.
        """
        self.origin = origin
        self.steps = {known for known in self.steps if known <= step} | {step}
        self.newest = self.newest_asked = step

    def check_restore(self, step: int | None, *, is_whole: bool, is_part: bool) -> None:
        """Raises `UsageError` if a restore would take trained objects to another step than that of their run.

        Args:
            step: The step to restore.
            is_whole: Whether it takes all objects.
            is_part: Whether the program named what to take.
        """
        if self.find_steps is None:
            return
        entered_at, done = self.find_steps()
        if not is_part:
            what = "manager.restore"
        elif step is not None and step != done and (is_whole or done > entered_at):
            what = f"manager.restore of step {step}, in step {done},"
        else:
            return
        raise UsageError(
            f"{what} inside the block of a run would change its objects, but not the number of its step",
            hint="To go back, leave the block, and start the run with holdfast.resumable(..., start_from="
            f"{40 if step is None else step!r}). A part can be loaded with only=..., before the first step or from the "
            "current one. To evaluate another step, leave the block, and use a new CheckpointManager.",
        )

    def settle(
        self,
        timeout_seconds: float | None = None,
        wait: Callable[[SaveHandle, float | None], object] = SaveHandle.wait_ended,
    ) -> None:
        """**Blocks.** Waits for the save in progress, if there is one, and records its result."""
        if timeout_seconds is not None:
            check_wait(timeout_seconds)
        if (handle := self.in_flight) is None:
            return
        handle.request.drop_if_left()
        before = PULSE.enter(COMMIT) if PULSE.is_on else NONE
        try:
            wait(handle, timeout_seconds)
        finally:
            if before != NONE:
                PULSE.enter(before)
        with self._settling:
            if self.in_flight is handle:  # A signal handler may have waited, and saved, since.
                if handle.request.is_committed:
                    self.steps.add(handle.step)
                    self.newest = max(self.newest, handle.step)
                if handle.request.ended.is_open:
                    self.in_flight = None


_WEIGHT: Final = 0.1
"""The weight of a new measurement against all before: recent steps predict the next better than old ones."""

_STALLS: Final = 5
"""How many saves predict the cost of the next: one slow save among them changes little."""


class StepTimer:
    """Measures steps and the time since the last save. Not thread-safe: it belongs to the training thread.

    Attributes:
        find_epochs: Returns how many epochs are complete, or None if it is not known; None if no policy needs it.
        past: The earlier starts of the run.
    """

    def __init__(self) -> None:
        self.find_epochs: Callable[[], int | None] | None = None
        self.past = PastStarts()
        self._saved_epochs = 0
        self._first_step = 0
        self._begun_at = time.monotonic()
        self._saved_step: int | None = None
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step: int | None = None
        self._step_seconds: float | None = None
        self._stalls_seconds: tuple[float, ...] = ()
        self._usual_stall_seconds: float | None = None

    def begin(self, step: int) -> None:
        """Called when training begins, or begins again, at a step that need not be saved."""
        self._first_step = step
        self._saved_step = step
        self._saved_at = time.monotonic()
        self._seen_step = None
        self._note_epochs()

    def follow_epochs(self, find: Callable[[], int | None]) -> None:
        """Sets `find_epochs`: epochs that are complete now need no save."""
        self.find_epochs = find
        self._note_epochs()

    def _note_epochs(self) -> None:
        if self.find_epochs is not None:
            self._saved_epochs = self.find_epochs() or 0

    def note_begun_save(self, step: int) -> None:
        """Called when a save of this step has begun; the time that it blocked training does not count as a step's."""
        self._saved_step = step
        self._saved_at = self._seen_at = time.monotonic()
        self._seen_step = step
        if self.find_epochs is not None:
            self._note_epochs()

    def moment(self, step: int, blocked_seconds: float | None, durable_seconds: float | None) -> SaveMoment:
        """Returns the facts for a policy after a step; the costs are those of the newest durable save, if any."""
        now = time.monotonic()
        if self._seen_step is not None and step > self._seen_step:
            measured = (now - self._seen_at) / (step - self._seen_step)
            known = self._step_seconds
            self._step_seconds = measured if known is None else known + _WEIGHT * (measured - known)
        self._seen_step, self._seen_at = step, now
        # The same save is reported after every step until the next one is durable.
        known_stalls = self._stalls_seconds
        if blocked_seconds is not None and (not known_stalls or blocked_seconds != known_stalls[-1]):
            # The first one stays at its place, so that it is known from the others.
            self._stalls_seconds = (*known_stalls[:1], *known_stalls[1:][1 - _STALLS :], blocked_seconds)
            self._usual_stall_seconds = usual_stall_seconds(self._stalls_seconds)
        return SaveMoment(
            step=step,
            last_saved_step=self._saved_step,
            first_step=self._first_step,
            seconds_since_last_save=now - self._saved_at,
            step_seconds=self._step_seconds,
            save_blocked_seconds=self._usual_stall_seconds,
            save_durable_seconds=durable_seconds,
            epochs=None if self.find_epochs is None else self.find_epochs(),
            last_saved_epochs=self._saved_epochs,
            failures=self.past.failures,
            observed_seconds=self.past.observed_seconds + now - self._begun_at,
        )


def usual_stall_seconds(stalls_seconds: Sequence[float]) -> float:
    """**Pure.** Returns how long a save usually blocks training: the median of the last few (the lower one).

    The first save touches fresh memory, which no later one does, and counts only until two others are known: one is not
    enough, because that may be the slow one.
    """
    later = stalls_seconds[1:]
    counted = sorted(later[-_STALLS:] if len(later) > 1 else stalls_seconds)
    return counted[(len(counted) - 1) // 2]
