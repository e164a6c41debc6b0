"""Drives saves: copies on the training thread, does everything else behind it, and tells how it went."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from holdfast.errors import ChangedError, HoldfastError, OutOfMemoryError, SaveFailedError
from holdfast.events import Committed, Event, Failed, GenerationOpened, Held, Sink, Skipped, Staged, Warned, Written
from holdfast.format.names import StepName
from holdfast.format.workers import ALONE
from holdfast.policies import RetentionPolicy
from holdfast.save.buffer import HostBuffer
from holdfast.save.cleaning import Cleaner
from holdfast.save.companies import join_line
from holdfast.save.handle import SaveHandle
from holdfast.save.handoffs import LeftOutError
from holdfast.save.line import Line
from holdfast.save.order import SaveOrder
from holdfast.save.overlap import GIVING_UP, StepHold, keep_steady
from holdfast.save.prepare import Preparation, try_prepare
from holdfast.save.reports import SaveReports
from holdfast.save.stage import Stager, Staging
from holdfast.state import Captured, Captures, capture_objects
from holdfast.state.fixed import FixedArrays
from holdfast.state.leaves import Transfer
from holdfast.storage import Storage
from holdfast.storage.crew import Crew

if TYPE_CHECKING:
    from holdfast.save.company import Company


class _Work(msgspec.Struct, frozen=True):
    """What is handed over to the background: one save whose state has been copied, or is held until it is.

    Where there was no memory to copy it into, that error comes in its place, and fails the save.
    """

    staging: Staging | OutOfMemoryError
    order: SaveOrder
    handle: SaveHandle
    crew: Crew
    blocked_seconds: float


_TEXT_OF_FIXED: Final = (
    "{names}: the very arrays that were there before are saved again, and they cannot change. What was trained since "
    "is in others, and is NOT saved: put those into the checkpoint at the end of each step, as in checkpoint.{name} = "
    "{name} (run.checkpoint, if run is resumable's). If nothing of it is trained, all is well"
)


class Saver:
    """Makes saves, one at a time.

    `begin` belongs to the training thread, everything behind it to the one save in flight. The two meet in the handle,
    the reports and the queue of events alone; the rest is handed over when a save begins, and back when it has ended.
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
        check_replicas: bool = False,
        company: Company | None = None,
    ) -> None:
        self._storage = storage
        # One spare is of no use to many workers, whose shared file systems grant no leases as a rule.
        line = Line(storage, keep, incremental=incremental, reuse_space=reuse_space and company is None)
        self._company = company
        if company is not None:
            company.peers.warn = lambda text: emit(Warned(text=text))
        self._joint = join_line(line, storage, company, emit, checks_replicas=check_replicas)
        self._line = self._joint or line
        self._own_line = line
        self._worker = ALONE if company is None else company.worker
        self._check_replicas = check_replicas
        self._emit = emit
        self._threads = threads
        self._buffer = HostBuffer()
        self._preparation: Preparation | None = None
        self._stager = Stager(self._buffer)
        self._captures = Captures()
        self._objects = objects
        self._fixed = FixedArrays()
        self._hold = StepHold(timeout_seconds, self._note_held) if overlap_copy else None
        self._held_seconds = 0.0
        self._reports = reports
        self._pending_events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._crew: Crew | None = None
        self._protected_since_at = time.monotonic()
        self._durable_seconds: float | None = None
        self._blocked_seconds: float | None = None
        self._newest: StepName | None = None
        self._cleaner = Cleaner(self._line, reports, emit)

    @property
    def generation(self) -> int | None:
        """The generation that this saver opened, or None before its first save."""
        return self._line.generation

    @property
    def newest(self) -> StepName | None:
        """The newest checkpoint that this saver has committed, or None."""
        return self._newest

    @property
    def costs(self) -> tuple[float | None, float | None]:
        """What the newest committed save cost: seconds of training held up, and seconds until it was durable."""
        return self._blocked_seconds, self._durable_seconds

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
        captured = capture_objects(objects, self._captures, hold, self._worker, self._check_replicas)
        return captured if self._hold is None else keep_steady(captured, self._hold)

    def begin(self, captured: Captured, order: SaveOrder, handle: SaveHandle) -> None:
        """**Blocks** while the state is copied, but for what is held. The save before must have ended.

        Whatever interrupts this call (Ctrl-C, say), afterwards the save either goes on or never will: `handle.begun`
        tells which.

        Raises:
            UsageError: If the state cannot be laid out as a file.
        """
        crew = Crew(self._threads, f"holdfast-save-{order.step}")
        inbox: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        work: _Work | None = None
        if same := self._fixed.look(self._objects, order.step):
            self.emit_soon(Warned(text=_TEXT_OF_FIXED.format(names=", ".join(same), name=same[0])))
        try:
            # All threads are started while there is nothing to lose yet.
            crew.start()
            is_handed_over = crew.try_hand_over(partial(self._serve, inbox))
            self._end_preparation()
            staging = self._try_stage(captured, order, handle, crew)
            self._crew = crew
            work = _Work(staging, order, handle, crew, time.monotonic() - order.asked_at)
            self._reports.mark_begun(handle)
            inbox.put(work)
            if not is_handed_over:
                # None can be had any more, as when the interpreter shuts down: the save is made here and now.
                self._serve(inbox)
        except BaseException:
            if work is None or handle.try_cancel():
                inbox.put(None)
                if self._hold is not None:
                    self._hold.forget()
                self._reports.mark_cancelled(handle)
                crew.close()
            raise

    def _try_stage(
        self, captured: Captured, order: SaveOrder, handle: SaveHandle, crew: Crew
    ) -> Staging | OutOfMemoryError:
        try:
            staging = self._stager.stage(captured, order.step)
        except OutOfMemoryError as error:
            return error
        staging.copy_now(crew)
        self._held_seconds = 0.0
        if not captured.has_held:
            handle.mark_staged()
        elif self._hold is not None:
            handle.sign = self._hold.begin(order.step, staging.check_unchanged)
        return staging

    def start_from(self, step: int) -> None:
        """Counts training time from now on, since what came before that step cannot be lost (a restore, say)."""
        self._protected_since_at = time.monotonic()
        self._fixed.begin(self._objects, step)

    def leave_line(self) -> None:
        """Makes the next save open a generation of its own, since the live objects now stand elsewhere."""
        self._line.leave()
        if self._company is not None:
            self._company.begin_epoch()

    def emit_soon(self, event: Event) -> None:
        """Tells of an event from the background of the save in flight, so that sinks do no work on this thread."""
        self._pending_events.put(event)

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits until the thread of a save that has ended is gone too, and lets go of buffer and disk."""
        if self._crew is not None:
            self._crew.join(timeout_seconds)
        try:
            self._own_line.close()
        except HoldfastError as error:
            self._emit(Warned(text=f"what was kept on the disk for the next save is still there: {error}"))
        self._end_preparation()
        if self._hold is not None:
            self._hold.end()
        self._flush_events()
        self._buffer.release()

    def abandon(self) -> None:
        """Nobody waits for the save in flight any more, nor for what else would be done at the end."""
        self._own_line.abandon()

    def _serve(self, inbox: queue.SimpleQueue[_Work | None]) -> None:
        """Does the one work that comes, unless it was called off before it could begin."""
        work = inbox.get()
        if work is None or not work.handle.try_begin():
            return
        begun_at = time.monotonic()
        try:
            if self._joint is not None and work.order.exchange is not None:
                self._joint.begin(work.order.exchange)
            if isinstance(work.staging, OutOfMemoryError):
                raise work.staging
            self._tell_staged(work, work.staging)
            try:
                self._copy_later(work, work.staging)
            finally:
                self._let_go([])
            name = self._save(work, work.staging, begun_at)
        except LeftOutError as left:
            self._leave_out(work, left.reason)
        except BaseException as error:  # noqa: BLE001  Whatever ended the save, its user must hear of it.
            self._fail(work, error, time.monotonic() - begun_at)
        else:
            if self._worker.is_leader:
                self._cleaner.clean(name, work.order.origin)
        finally:
            try:
                self._end_joint()
            finally:
                if self._hold is not None:
                    self._hold.forget()
                work.crew.close()
                self._flush_events()
                # Not before: from here on the program may end, or the next save begin.
                self._reports.mark_ended(work.handle)

    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.end()
            self._preparation = None

    def _tell_staged(self, work: _Work, staging: Staging) -> None:
        staged = Staged(
            step=work.order.step,
            generation=self._line.generation or 0,
            blocked_seconds=work.blocked_seconds,
            size_bytes=staging.snapshot.layout.size_bytes,
            reason=work.order.reason,
        )
        self._emit(staged)

    def _copy_later(self, work: _Work, staging: Staging) -> None:
        """Copies what is held, and lets go of it."""
        if self._hold is not None and staging.captured.has_held:
            self._hold.copy(partial(staging.copy_later, work.crew, self._let_go))
            work.handle.mark_staged()

    def _let_go(self, transfers: list[Transfer]) -> None:
        if self._hold is not None:
            self._hold.release(transfers)

    def _note_held(self, step: int, seconds: float) -> None:
        """Called on the training thread when a step has been held up."""
        self._held_seconds = seconds
        self.emit_soon(Held(step=step, blocked_seconds=seconds))

    def _save(self, work: _Work, staging: Staging, begun_at: float) -> StepName:
        order = work.order
        base = self._line.open(order.origin)
        if base is not None:
            self._emit(GenerationOpened(generation=base.generation, base_step=base.step))
        name = self._line.name(order.step)
        work.handle.mark_named(name)
        try:
            receipts = self._line.write(staging.snapshot, name, work.crew, order.metrics)
            self._emit(
                Written(
                    step=order.step,
                    generation=name.generation,
                    background_seconds=time.monotonic() - begun_at,
                    size_bytes=receipts.size_bytes,
                )
            )
            if self._hold is not None and staging.captured.has_held:
                self._hold.make_sure()
            self._line.commit(receipts, name, order.metrics, order.metadata)
        except BaseException:
            if self._joint is None:
                self._give_up(name)
            else:
                self._joint.note_debris(name)
            raise
        durable_seconds = time.monotonic() - begun_at
        training_saved_seconds = max(order.asked_at - self._protected_since_at, 0.0)
        self._newest = name
        self._durable_seconds = durable_seconds
        self._blocked_seconds = work.blocked_seconds - order.waited_seconds + self._held_seconds
        self._protected_since_at = order.asked_at
        self._reports.mark_committed()
        work.handle.mark_committed()
        self._emit(
            Committed(
                step=order.step,
                generation=name.generation,
                blocked_seconds=work.blocked_seconds,
                background_seconds=durable_seconds,
                size_bytes=receipts.size_bytes,
                referred_bytes=receipts.referred_bytes,
                training_saved_seconds=training_saved_seconds,
            )
        )
        return name

    def _end_joint(self) -> None:
        """Parts with the other workers, whatever has come of the save."""
        if self._joint is not None:
            for debris in self._joint.finish():
                self._give_up(debris)

    def _leave_out(self, work: _Work, reason: str) -> None:
        """A save that not all workers could take part in is no failure."""
        if self._company is not None and work.order.exchange is not None:
            self._company.note_left_out(work.order.exchange)
        work.handle.mark_left_out(reason)
        self._emit(Skipped(step=work.order.step, reason=reason))

    def _give_up(self, name: StepName) -> None:
        """Removes the debris of a failed attempt, if the place lets us; else the next save sweeps it away."""
        try:
            self._line.give_up(name)
        except HoldfastError as error:
            self._emit(Warned(text=f"what a failed save left in {name.directory} is still there: {error}"))

    def _fail(self, work: _Work, error: BaseException, seconds: float) -> None:
        step = work.order.step
        message = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HoldfastError) else ""
        failure = SaveFailedError(f"step {step} was not saved: {message}", step=step, hint=hint)
        failure.__cause__ = error
        try:
            if self._joint is not None:
                # Before anybody here hears of it, who may end the process at once.
                self._joint.tell(error)
        finally:
            self._reports.add(failure)
            work.handle.mark_failed(failure)
        self._emit(
            Failed(
                stage="save",
                error=message,
                step=step,
                generation=self._line.generation,
                save_lost=True,
                background_seconds=seconds,
            )
        )
        if isinstance(error, ChangedError):
            self._emit(Warned(text=GIVING_UP))

    def _flush_events(self) -> None:
        while not self._pending_events.empty():
            self._emit(self._pending_events.get())
