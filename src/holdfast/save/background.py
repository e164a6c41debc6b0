"""What goes on behind training: writes what was copied, commits it, and tells how it went."""

from __future__ import annotations

import queue
import time
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import ChangedError, HoldfastError, OutOfMemoryError, SaveFailedError
from holdfast.events import Committed, Event, Failed, GenerationOpened, Held, Sink, Skipped, Staged, Warned, Written
from holdfast.format.names import StepName
from holdfast.save.cleaning import Cleaner
from holdfast.save.handle import SaveHandle
from holdfast.save.handoffs import LeftOutError
from holdfast.save.line import Line
from holdfast.save.order import Origin, SaveOrder
from holdfast.save.overlap import GIVING_UP, StepHold
from holdfast.save.progress import RESUMED
from holdfast.save.reports import SaveReports
from holdfast.save.stage import Staging
from holdfast.save.watermark import CalledOffError
from holdfast.state.leaves import Transfer
from holdfast.storage.crew import Crew

if TYPE_CHECKING:
    from holdfast.save.company import Company
    from holdfast.save.joint import JointLine


class Work(msgspec.Struct):
    """What is handed over to the background: one save.

    Attributes:
        staging: What has been copied, or is being copied; or the error, where there was no memory to copy it into.
        is_ahead: Whether it is handed over while the training thread still copies, so that writing begins meanwhile.
        begun_at: From when on it is in the background alone.
        opened: That it has opened a generation, to be told behind the copy; or None.
    """

    staging: Staging | OutOfMemoryError
    order: SaveOrder
    handle: SaveHandle
    crew: Crew
    is_ahead: bool
    begun_at: float = 0.0
    opened: GenerationOpened | None = None

    @property
    def blocked_seconds(self) -> float:
        """How long training was held up, once all is copied that it waits for."""
        assert isinstance(self.staging, Staging)
        return self.staging.snapshot.copied.completed_at - self.order.asked_at

    def call_off_copy(self) -> None:
        """Nothing more is copied; harmless where all is."""
        if isinstance(self.staging, Staging):
            self.staging.snapshot.copied.call_off()

    def forget(self) -> None:
        """Lets go of the arrays, and of what is to be done when all is copied: that keeps all of this alive."""
        if isinstance(self.staging, Staging):
            self.staging.snapshot.copied.set_duty(None)
            self.staging.forget()


class Background:
    """Ends what a training thread has begun, one save at a time.

    Attributes:
        hold: Holds up the steps of optimizers, or None.
        newest: The newest checkpoint that was committed here, or None.
        durable_seconds: How long that took in the background, or None.
        blocked_seconds: For how long it held training up, or None.
        held_seconds: For how long the save in flight has held up a step of the optimizer.
        protected_since_at: From when on training is lost if the save in flight is.
    """

    def __init__(
        self,
        line: Line,
        joint: JointLine | None,
        company: Company | None,
        url: str,
        reports: SaveReports,
        emit: Sink,
        hold_seconds: float | None,
    ) -> None:
        """Does nothing yet.

        Args:
            line: Where checkpoints are written.
            joint: The same as all workers write it, or None.
            company: The other workers, or None.
            url: Where the run lies.
            reports: Keeps the failures.
            emit: Told of what happens.
            hold_seconds: How long a step of an optimizer may be held up; None if none ever is.
        """
        self._line = joint or line
        self._joint = joint
        self._company = company
        self._url = url
        self._reports = reports
        self._emit = emit
        self._cleaner = Cleaner(self._line, reports, emit)
        self._pending_events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.hold = None if hold_seconds is None else StepHold(hold_seconds, self._note_held)
        self.newest: StepName | None = None
        # Where the run went on from when that was saved.
        self._origin = Origin()
        self.durable_seconds: float | None = None
        self.blocked_seconds: float | None = None
        self.held_seconds = 0.0
        self.protected_since_at = time.monotonic()

    def emit_soon(self, event: Event) -> None:
        """Tells of an event from the background of the save in flight, so that sinks do no work on this thread."""
        self._pending_events.put(event)

    def flush_events(self) -> None:
        """Tells of what has not been told yet."""
        while not self._pending_events.empty():
            self._emit(self._pending_events.get())

    def tidy(self) -> None:
        """**Blocks.** The run has ended well: the step that it went on from need not stay any more."""
        is_leader = self._company is None or self._company.worker.is_leader
        if self.newest is not None and is_leader and self._origin.base not in (None, *self._origin.sources):
            self._cleaner.clean(self.newest, self._origin, at_end=True)

    def serve(self, inbox: queue.SimpleQueue[Work | None]) -> None:
        """Does the one work that comes, unless it was called off before it could begin."""
        work = inbox.get()
        if work is None or not work.handle.try_begin(ahead=work.is_ahead):
            return
        work.begun_at = time.monotonic()
        try:
            if self._joint is not None and work.order.exchange is not None:
                self._joint.begin(work.order.exchange)
            if isinstance(work.staging, OutOfMemoryError):
                raise work.staging
            if not work.is_ahead:
                self._tell_staged(work, work.staging)
            try:
                self._copy_later(work, work.staging)
            finally:
                self._let_go([])
            name = self._save(work, work.staging)
        except LeftOutError as left:
            self._leave_out(work, left.reason)
        except CalledOffError:
            self._tell_opened(work)  # Who called it off knows all else.
        except BaseException as error:  # noqa: BLE001  Whatever ended the save, its user must hear of it.
            if self._is_on(work):
                self._fail(work, error, time.monotonic() - work.begun_at)
        else:
            if self._company is None or self._company.worker.is_leader:
                self._cleaner.clean(name, work.order.origin)
        finally:
            try:
                self._end_joint()
            finally:
                if self.hold is not None:
                    self.hold.forget()
                work.crew.close()
                # Tensors that go when the program has begun to end abort it: torch takes the interpreter's lock for
                # that, which this thread does not get any more.
                work.forget()
                self.flush_events()
                handle = work.handle
                del work  # An error keeps what is named here.
                # Not before: from here on the program may end, or the next save begin.
                self._reports.mark_ended(handle)

    def enter(self, work: Work) -> None:
        """All is copied: from here on the save goes on, unless it was called off.

        Raises:
            CalledOffError: If so.
        """
        if not work.handle.try_begin():
            raise CalledOffError
        assert isinstance(work.staging, Staging)
        work.begun_at = work.staging.snapshot.copied.completed_at
        # Also where the call that copied is interrupted behind its last copy.
        work.handle.mark_staged()
        self._tell_staged(work, work.staging)
        self._tell_opened(work)

    def _note_held(self, step: int, seconds: float) -> None:
        """Called on the training thread when a step has been held up."""
        self.held_seconds = seconds
        self.emit_soon(Held(step=step, blocked_seconds=seconds))

    def _is_on(self, work: Work) -> bool:
        """**Blocks** until it is known whether a save goes on that something has ended; False if it was called off."""
        try:
            if isinstance(work.staging, Staging):
                work.staging.snapshot.copied.wait_complete()
        except CalledOffError:
            self._tell_opened(work)
            return False
        return not work.handle.called_off

    def _tell_staged(self, work: Work, staging: Staging) -> None:
        staged = Staged(
            step=work.order.step,
            generation=self._line.generation or 0,
            blocked_seconds=work.blocked_seconds,
            size_bytes=staging.snapshot.layout.size_bytes,
            reason=work.order.reason,
        )
        self._emit(staged)

    def _tell_opened(self, work: Work) -> None:
        """Tells of the generation that was opened, if it has not been told."""
        opened, work.opened = work.opened, None
        if opened is not None:
            self._emit(opened)

    def _copy_later(self, work: Work, staging: Staging) -> None:
        """Copies what is held, and lets go of it."""
        if self.hold is not None and staging.captured.has_held:
            self.hold.copy(partial(staging.copy_later, work.crew, self._let_go))
            work.handle.mark_staged()

    def _let_go(self, transfers: list[Transfer]) -> None:
        if self.hold is not None:
            self.hold.release(transfers)

    def _save(self, work: Work, staging: Staging) -> StepName:
        order = work.order
        base = self._line.open(order.origin)
        if base is not None:
            work.opened = GenerationOpened(generation=base.generation, base_step=base.step)
            if not work.is_ahead:
                self._tell_opened(work)
        name = self._line.name(order.step)
        work.handle.mark_named(name)
        try:
            receipts = self._line.write(staging.snapshot, name, work.crew, order.metrics)
            staging.snapshot.copied.wait_complete()
            self._emit(
                Written(
                    step=order.step,
                    generation=name.generation,
                    background_seconds=time.monotonic() - work.begun_at,
                    size_bytes=receipts.size_bytes,
                )
            )
            if self.hold is not None and staging.captured.has_held:
                self.hold.make_sure()
            self._line.commit(receipts, name, order.metrics, order.metadata)
        except BaseException:
            if self._joint is None:
                self._give_up(name)
            else:
                self._joint.note_debris(name)
            raise
        durable_seconds = time.monotonic() - work.begun_at
        training_saved_seconds = max(order.asked_at - self.protected_since_at, 0.0)
        self.newest, self._origin = name, order.origin
        self.durable_seconds = durable_seconds
        self.blocked_seconds = work.blocked_seconds - order.waited_seconds + self.held_seconds
        self.protected_since_at = order.asked_at
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

    def _leave_out(self, work: Work, reason: str) -> None:
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
            self._emit(Warned(text=f"what an unfinished save left in {name.directory} is still there: {error}"))

    def _fail(self, work: Work, error: BaseException, seconds: float) -> None:
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
                rank=None if self._company is None else getattr(error, "rank", self._company.worker.rank),
                path="" if self._company is None else self._url,
            )
        )
        if isinstance(error, ChangedError):
            self._emit(Warned(text=GIVING_UP))
        _empty_frames(error)


def _empty_frames(error: BaseException) -> None:
    """Lets go of what the functions that have failed were about, which is large, and the error may be kept for long.

    Where they failed stays to be seen.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & RESUMED:  # Clearing one that may go on ends it.
                with suppress(RuntimeError):  # It has not ended.
                    frame.clear()
        one = one.__cause__ or one.__context__
