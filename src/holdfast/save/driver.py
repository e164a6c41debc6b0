"""Drives saves: copies on the training thread, and hands over to the background what does not need it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from holdfast.errors import HoldfastError, OutOfMemoryError
from holdfast.events import Event, Sink, Warned
from holdfast.format.names import StepName
from holdfast.format.workers import ALONE
from holdfast.policies import RetentionPolicy
from holdfast.save.background import Background, Work
from holdfast.save.buffer import HostBuffer
from holdfast.save.companies import join_line
from holdfast.save.handle import SaveHandle
from holdfast.save.line import Line
from holdfast.save.order import SaveOrder
from holdfast.save.overlap import keep_steady
from holdfast.save.prepare import Preparation, try_prepare
from holdfast.save.reports import SaveReports
from holdfast.save.stage import Stager, Staging
from holdfast.save.within import is_within
from holdfast.state import CaptureCache, Captured, capture_objects, check_capture
from holdfast.state.immutable_arrays import ImmutableArrays
from holdfast.state.oversights import LossWatch, find_oversights
from holdfast.storage import Storage
from holdfast.storage.crew import Crew
from holdfast.storage.digesting import find_native

if TYPE_CHECKING:
    from holdfast.save.company import Company


_PARTING_SECONDS: Final = 2.0


class Saver:
    """Makes saves, one at a time.

    `begin` belongs to the training thread, everything behind it to the one save in flight. The two meet in the handle,
    the reports, the watermark of the copy and the queue of events alone; the rest is handed over when a save begins,
    and back when it has ended.
    """

    def __init__(
        self,
        storage: Storage,
        keep: RetentionPolicy,
        emit: Sink,
        reports: SaveReports,
        objects: Mapping[str, object],
        *,
        threads: int,
        overlap_copy: bool,
        timeout_seconds: float,
        incremental: bool,
        reuse_space: bool,
        check_replicas: bool | Literal["first"] = "first",
        company: Company | None = None,
    ) -> None:
        # One spare is of no use to many workers, whose shared file systems grant no leases as a rule.
        line = Line(storage, keep, incremental=incremental, reuse_space=reuse_space and company is None)
        self._company = company
        if company is not None:
            company.peers.warn = lambda text: emit(Warned(text=text))
        joint = self._joint = join_line(line, storage, company, emit, check_replicas=check_replicas)
        self._background = Background(
            line, joint, company, storage.url, reports, emit, timeout_seconds if overlap_copy else None
        )
        self._hold = self._background.hold
        self._line = joint or line
        self._own_line = line
        self._worker = ALONE if company is None else company.worker
        self._check_replicas = check_replicas
        self._emit = emit
        self._threads = threads
        self._buffer = HostBuffer()
        self._preparation: Preparation | None = None
        self._stager = Stager(self._buffer)
        self._captures = CaptureCache()
        self._objects = objects
        self._fixed = ImmutableArrays()
        self._loss_watch = LossWatch()
        self._is_looked_over = False
        self._reports = reports
        self._crew: Crew | None = None
        self._inbox: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._work: Work | None = None
        # Now, since saves take no more memory than they say, and may be made when nothing can be imported any more.
        find_native()

    @property
    def generation(self) -> int | None:
        """The generation that this saver opened, or None before its first save."""
        return self._line.generation

    @property
    def newest(self) -> StepName | None:
        """The newest checkpoint that this saver has committed, or None."""
        return self._background.newest

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """What the newest committed save cost: seconds of training held up, and seconds until it was durable."""
        return self._background.blocked_seconds, self._background.durable_seconds

    def prepare(self, size_bytes: int | Literal["auto"]) -> None:
        """Makes memory for a state of that size ready, behind the calling thread, if it can."""
        self._preparation = try_prepare(self._buffer, size_bytes, self._objects, self._emit)

    def give_sign(self) -> None:
        """Called when the program asks something of the manager: no save need wait for it to leave another call."""
        if self._hold is not None:
            self._hold.give_sign()

    def capture(self, objects: Mapping[str, object]) -> Captured:
        """Takes the state of the live objects, all but the arrays' values; see `capture_objects`.

        Raises:
            UnsupportedValueError: If something cannot be stored.
        """
        hold = None if self._hold is None else self._hold.try_hold
        is_first = self._joint is not None and not self._joint.has_compared
        check_replicas = is_first if self._check_replicas == "first" else self._check_replicas
        captured = capture_objects(objects, self._captures, hold, self._worker, check_replicas, self._holders)
        return captured if self._hold is None else keep_steady(captured, self._hold)

    def check_capture(self, objects: Mapping[str, object]) -> None:
        """Makes sure, without a change to them, that the state of the live objects can be taken.

        Raises:
            UnsupportedValueError: If something cannot be stored.
        """
        check_capture(objects, self._captures, self._worker, self._holders)

    @property
    def _holders(self) -> Mapping[str, Sequence[int]]:
        return {} if self._company is None else self._company.holders

    def begin(self, captured: Captured, order: SaveOrder, handle: SaveHandle) -> None:
        """**Blocks** while the state is copied, but for what is held. The save before must have ended.

        Whatever interrupts this call (Ctrl-C, say), afterwards the save either goes on or never will: `handle.begun`
        tells which.

        Raises:
            UsageError: If the state cannot be laid out as a file.
        """
        self._dismiss()
        self._work = None
        crew = self._crew = Crew(self._threads, f"holdfast-save-{order.step}")
        inbox = self._inbox = queue.SimpleQueue()
        warnings = [self._fixed.look(self._objects, order.step), self._loss_watch.look(self._objects)]
        warnings += [] if self._is_looked_over else find_oversights(self._objects)
        self._is_looked_over = True
        for text in filter(None, warnings):
            self.emit_soon(Warned(text=text))
        try:
            # All threads are started while there is nothing to lose yet.
            crew.start()
            is_handed_over = crew.try_hand_over(partial(self._background.serve, inbox))
            self._end_preparation()
            if self._joint is not None:
                captured = self._joint.digest(captured, crew)
            staging = self._try_stage(captured, order)
            # Where steps wait for a part of the copy, or other workers for this one, all goes in its turn.
            is_alone = self._company is None and not captured.has_held
            is_ahead = is_handed_over and is_alone and isinstance(staging, Staging) and staging.is_coarse
            self._work = work = Work(staging, order, handle, crew, is_ahead)
            self._reports.mark_begun(handle)
            self._copy(work, partial(_hand_over, work, inbox))
            if not is_handed_over:
                # None can be had any more, as when the interpreter shuts down: the save is made here and now.
                self._background.serve(inbox)
            handle.end_if_left = self._work = None
        except BaseException:
            self._call_off(handle)
            raise

    def end_if_left(self, handle: SaveHandle, call: object) -> None:
        """**Blocks**, but not for long. Ends a save whose `begin` was interrupted, and what should end it then as well.

        Args:
            handle: The save.
            call: The method that was called with that handle, in this thread, and has called `begin`. While it goes on,
                nothing was interrupted: who asks was called from within.
        """
        if not is_within(call, handle=handle):
            self._call_off(handle)

    def _call_off(self, handle: SaveHandle) -> None:
        """**Blocks**, but not for long. Ends a save that was interrupted, unless it goes on all the same.

        It may be interrupted as well; then it is done again from the beginning.
        """
        work = self._work
        if work is not None:
            work.call_off_copy()
        if handle.try_cancel():
            self._dismiss()
            if self._hold is not None:
                self._hold.forget()
            self._reports.mark_cancelled(handle)
            if self._crew is not None:
                # Who still writes may be held up by the storage; the next save waits for that.
                self._crew.join(_PARTING_SECONDS)
        handle.end_if_left = self._work = None

    def _try_stage(self, captured: Captured, order: SaveOrder) -> Staging | OutOfMemoryError:
        try:
            return self._stager.stage(captured, order.step)
        except OutOfMemoryError as error:
            return error

    def _copy(self, work: Work, hand_over: Callable[[], None]) -> None:
        """Copies what training waits for, and hands the save over to the background, ahead of it or behind."""
        staging = work.staging
        if isinstance(staging, OutOfMemoryError):
            hand_over()
            return
        if work.is_ahead:
            staging.snapshot.copied.set_duty(partial(self._background.enter, work))
        self._background.held_seconds = 0.0
        staging.copy_now(work.crew, hand_over if work.is_ahead else None)
        if not staging.captured.has_held:
            work.handle.mark_staged()
        elif self._hold is not None:
            ask = partial(_is_beginning, work.handle)
            work.handle.sign = self._hold.begin(work.order.step, staging.check_unchanged, ask)
        if not work.is_ahead:
            hand_over()

    def start_from(self, step: int) -> None:
        """Counts training time from now on, since what came before that step cannot be lost (a restore, say)."""
        self._background.protected_since_at = time.monotonic()
        self._fixed.begin(self._objects, step)
        self._loss_watch.begin(self._objects)

    def leave_line(self) -> None:
        """Makes the next save open a generation of its own, since the live objects now stand elsewhere."""
        self._line.leave()
        if self._company is not None:
            self._company.begin_epoch()

    def emit_soon(self, event: Event) -> None:
        """Tells of an event from the background of the save in flight, so that sinks do no work on this thread."""
        self._background.emit_soon(event)

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits until the thread of a save that has ended is gone too, and lets go of buffer and disk."""
        self._dismiss()
        if self._crew is not None:
            self._crew.join(timeout_seconds)
        try:
            self._own_line.close()
        except HoldfastError as error:
            self._emit(Warned(text=f"what was kept on the disk for the next save is still there: {error}"))
        self._end_preparation()
        if self._hold is not None:
            self._hold.end()
        self._background.flush_events()
        self._buffer.release()

    def tidy(self) -> None:
        """**Blocks.** The run has ended well, and no save is in flight: the policy is applied once more."""
        self._background.tidy()

    def abandon(self) -> None:
        """Nobody waits for the save in flight any more, nor for what else would be done at the end."""
        self._own_line.abandon()

    def _dismiss(self) -> None:
        """Ends the threads of a save that has ended: what should have done so may have been interrupted itself."""
        self._inbox.put(None)
        if self._crew is not None:
            self._crew.end()

    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.end()
            self._preparation = None


def _is_beginning(handle: SaveHandle) -> bool:
    """Asks after a save, which ends it if an interrupt has cut off what should: True if `begin` goes on with it."""
    return not handle.ended and handle.is_beginning


def _hand_over(work: Work, inbox: queue.SimpleQueue[Work | None]) -> None:
    # In this order: who is interrupted in between calls it off.
    work.handle.is_handed = True
    inbox.put(work)
