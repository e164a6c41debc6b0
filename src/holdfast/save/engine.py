"""The engine: one thread that makes the saves of a manager, from the copy to the commit.

It exists as long as the manager, and has a pool of helpers. No signal handler runs in it, so no exception interrupts
it; the training thread asks it for a save, and waits only for the copy.
"""

from __future__ import annotations

import inspect
import os
import queue
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from holdfast.catalog.deletion import FileRecycler
from holdfast.catalog.publish import Receipts
from holdfast.errors import ChangedError, HoldfastError, OutOfMemoryError, PeerError, SaveFailedError
from holdfast.events import (
    Committed,
    Event,
    Failed,
    Held,
    Sink,
    Skipped,
    Staged,
    Warned,
    Written,
)
from holdfast.format.names import StepName
from holdfast.format.records import Manifest, Worker
from holdfast.options import SaveOptions
from holdfast.process.pulse import PULSE
from holdfast.process.worker_pool import Round, WorkerPool
from holdfast.save.handle import LeftOutError, Origin, PendingFailures, SaveHandle, SaveRequest
from holdfast.save.image import CalledOffError, Stager, Staging
from holdfast.save.lineage import CallGuard
from holdfast.save.overlap import GIVING_UP, OptimizerStepBarrier
from holdfast.save.retention import Tidier
from holdfast.save.run_writer import CheckpointWriter, StepAttempt
from holdfast.state import Captured, capture_objects
from holdfast.tracebacks import is_near, print_elsewhere

_SMALL_BYTES: Final = 256 << 10
"""The average size of an array from which on writing and copying go on at a time."""

_RESUMED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Code flags of generators and coroutines."""


class NewestSave(NamedTuple):
    """The newest save that was committed here.

    Attributes:
        name: The checkpoint.
        origin: Where the run had continued from by then.
        blocked_seconds: How long it blocked training.
        durable_seconds: How long it took to be durable after its copy had ended.
    """

    name: StepName
    origin: Origin
    blocked_seconds: float
    durable_seconds: float


class Engine:
    """Makes saves, one at a time. The first save starts the engine's thread.

    The public methods and `_note_held` run in the training thread, except `emit_soon`, which runs in any. While a save
    is in progress, only the engine's thread writes the attributes, of which others may read the public ones, and
    `_note_held` writes `_held_seconds`. Otherwise the training thread may.

    Attributes:
        barrier: Holds up the steps of optimizers, or None.
        newest: The newest save that was committed here, or None.
        protected_since_at: The time from which training is lost if the save in progress is.
        tidier: Cleans up after commits.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        recycler: FileRecycler,
        stager: Stager,
        worker: Worker,
        options: SaveOptions,
        failures: PendingFailures,
        emit: Sink,
        calls: CallGuard,
    ) -> None:
        self._writer, self._stager, self._worker = writer, stager, worker
        self._failures, self._emit, self._calls = failures, emit, calls
        self._thread = WorkerPool(1, "holdfast-engine")
        self._pool = WorkerPool(options.threads, "holdfast-worker")
        self.tidier = Tidier(writer, recycler, failures, emit, calls)
        self._pending_events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.barrier: OptimizerStepBarrier | None = None
        if options.overlap_copy:
            self.barrier = OptimizerStepBarrier(options.timeout_seconds, self._note_held, calls.check_reentry)
        self.newest: NewestSave | None = None
        self.protected_since_at = time.monotonic()
        # Of the save in progress: the copies that the pool makes, and for how long it has held up a step.
        self._copying: Round | None = None
        self._held_seconds = 0.0

    def capture(self, objects: Mapping[str, object]) -> Captured:
        """Captures the state of the live objects, without the arrays' values; see `capture_objects`."""
        hold = None if self.barrier is None or self.barrier.gives_up else self.barrier.try_hold
        stager = self._stager
        return capture_objects(objects, stager.captures, hold, self._worker, self._writer.compares, stager.holders)

    def save(self, handle: SaveHandle, captured: Captured) -> None:
        """**Blocks** while the state is copied, except for overlapped copies. The previous save must have ended.

        If no thread can be started any more, because the interpreter shuts down, it makes the whole save. If it raises
        (the copy's error, or Ctrl-C), it may not have confirmed yet: then the request is to be dropped.
        """
        request, staging = handle.request, None
        self._calls.newest = request
        try:
            # Laid out here, where the streams of a device and the device in use are those of training.
            request.staging = staging = self._stager.stage(captured, request.step)
            request.copied = staging.snapshot.copied
        except OutOfMemoryError as error:
            request.staging = error
        work = partial(self._serve, handle)
        if self._thread.start():
            # In one go: no signal handler comes between the two, so nothing else is called between them.
            request.is_submitted = True
            self._thread.put(work)
        else:
            request.confirm()
            request.is_submitted = True
            work()
        request.copied.copy_ended.wait(threading.TIMEOUT_MAX)
        if request.copied.error is not None:
            raise request.copied.error
        request.confirm()
        if staging is not None and not captured.held:
            # All is copied. Memory that is held JAX gives to no other array, so that a step which donates its arguments
            # would have to take new memory.
            staging.forget()

    def emit_soon(self, event: Event) -> None:
        """**Thread-safe.** Lets the engine's thread emit an event, when training no longer waits for it."""
        self._pending_events.put(event)

    def note_call(self) -> None:
        """Called when the program calls the manager: then training changes nothing."""
        if self.barrier is not None:
            self.barrier.note_call()

    def leave_generation(self) -> None:
        """Makes the next save open a generation of its own, because the live objects now have another state."""
        self._writer.leave_generation()

    def tidy(self) -> None:
        """**Blocks.** The run has succeeded: the step that it resumed from need not be kept any more."""
        newest = self.newest
        if newest is not None and newest.origin.base not in (None, *newest.origin.sources):
            self.tidier.retain(newest.name, newest.origin, None)

    def close(self, timeout_seconds: float) -> None:
        """**Blocks.** Ends the threads; no save is in progress."""
        for threads in (self._thread, self.tidier, self._pool):
            threads.end()
        for threads in (self._thread, self.tidier, self._pool):
            threads.join(timeout_seconds)
        if self.barrier is not None:
            self.barrier.close()
        self._flush_events()
        self._stager.forget()

    def _serve(self, handle: SaveHandle) -> None:
        """Makes one save, with any result; raises only what a user's sink may raise."""
        request = handle.request
        self._failures.note_begun(handle)
        request.server = threading.get_ident()
        self._calls.serving.add(request.server)
        attempt = StepAttempt(self._writer, request, self.tidier, self.emit_soon)
        manifest: Manifest | None = None
        try:
            try:
                manifest = self._save(request, attempt)
            except BaseException as error:
                # This may raise another error in place of the first.
                attempt.give_up(error)
                raise
        except CalledOffError:
            pass  # The thread that asked for it knows.
        except LeftOutError as left:
            # A save that not all workers could take part in is not a failure.
            self._writer.fail(left)
            request.skip(left.reason)
            self._emit(Skipped(step=request.step, reason=left.reason))
        except BaseException as error:  # noqa: BLE001  The user must be notified of any error that ended the save.
            self._fail(handle, error)
        finally:
            del attempt  # It has the image, which the next save may change.
            try:
                self._end(handle, manifest)
            finally:
                self._calls.serving.discard(threading.get_ident())

    def _save(self, request: SaveRequest, attempt: StepAttempt) -> Manifest | None:
        """Makes a save: copy, write, wait for the confirmation, commit; returns the manifest if it is this worker's."""
        staging = request.staging
        assert staging is not None, "it is set before"
        if isinstance(staging, OutOfMemoryError):
            # No memory: nothing is copied; fail once training has confirmed.
            request.copied.begin()
            self._wait_for_training(request)
            if request.protocol is not None:
                self._writer.begin(request.protocol)
            raise staging
        barrier = self.barrier if staging.captured.held else None
        try:
            if self._begin_copies(request, staging, barrier):
                attempt.write_behind_copy(staging, self._pool)
        finally:
            # Also a failure so far is reported when training has its copy, and not before.
            self._wait_for_training(request)
            self._note_staged(request, staging)
        # From here on the other workers are spoken to, if there are any.
        if request.protocol is not None:
            self._writer.begin(request.protocol)
        if barrier is not None:
            try:
                barrier.copy(partial(staging.copy_later, self._pool, barrier.release))
            finally:
                barrier.release([])
            request.is_copied = True
            request.staged.open()
        try:
            receipts = attempt.write(staging, self._pool)
        finally:
            self._flush_events()
        name = request.name
        assert name is not None, "it was opened"
        copied_at = request.copied.completed_at
        blocked_seconds, background_seconds = copied_at - request.asked_at, time.monotonic() - copied_at
        self._emit(
            Written(
                step=name.step,
                generation=name.generation,
                background_seconds=background_seconds,
                size_bytes=receipts.size_bytes,
            )
        )
        if request.protocol is not None:
            receipts = replace(receipts, blocked_seconds=blocked_seconds, background_seconds=background_seconds)
        if barrier is not None:
            barrier.wait_settled()
        manifest = attempt.commit(receipts)
        self._note_committed(request, name, receipts)
        return manifest

    def _begin_copies(self, request: SaveRequest, staging: Staging, barrier: OptimizerStepBarrier | None) -> bool:
        """**Blocks** while the copies are made that training waits for, unless the pool can make them by itself.

        Returns:
            True if the pool does, so that this thread can write what is copied already.
        """
        self._held_seconds = 0.0
        # Some systems have no such call.
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        try:
            has_helpers = self._pool.start()
            if staging.captured.compared:
                staging.take_digests(self._writer.digest(staging, self._pool))
            if barrier is not None:
                barrier.begin(request.step, request.thread, staging.check_unchanged)
            copies = staging.copies_now()
            # To write and copy many small arrays at a time is to wait for the interpreter's lock, over and over.
            layout = staging.snapshot.layout
            is_coarse = layout.size_bytes >= len(layout.places) * _SMALL_BYTES
            if has_helpers and is_coarse and barrier is None and self._writer.writes_early:
                self._copying = self._pool.begin(copies, processors)
                return True
            self._pool.run(copies, processors - 1)
        except BaseException as error:
            request.copied.fail(error)
            raise
        return False

    def _wait_for_training(self, request: SaveRequest) -> None:
        """**Blocks** until the copy has ended, and the training thread has confirmed the save.

        Meanwhile the interpreter's lock is left to training: a save of many small arrays does not delay the next step.
        Raises `CalledOffError` if that thread was interrupted instead, or the copy has failed, as that thread knows.
        """
        request.copied.copy_ended.wait(threading.TIMEOUT_MAX)
        request.decided.wait(threading.TIMEOUT_MAX)
        if not request.confirmed or request.copied.error is not None:
            raise CalledOffError

    def _note_staged(self, request: SaveRequest, staging: Staging) -> None:
        if not staging.captured.held:
            request.is_copied = True
            request.staged.open()
        self._emit(
            Staged(
                step=request.step,
                generation=self._writer.generation or 0,
                blocked_seconds=request.copied.completed_at - request.asked_at,
                size_bytes=staging.snapshot.layout.size_bytes,
                reason=request.reason,
            )
        )
        self._flush_events()

    def _note_held(self, step: int, seconds: float) -> None:
        """Called by the barrier in the training thread when a step has been held up."""
        self._held_seconds = seconds
        self.emit_soon(Held(step=step, blocked_seconds=seconds))

    def _note_committed(self, request: SaveRequest, name: StepName, receipts: Receipts) -> None:
        copied_at = request.copied.completed_at
        blocked_seconds, durable_seconds = copied_at - request.asked_at, time.monotonic() - copied_at
        training_saved_seconds = max(request.asked_at - self.protected_since_at, 0.0)
        cost_seconds = blocked_seconds - request.waited_seconds + self._held_seconds
        self.newest = NewestSave(name, request.origin, cost_seconds, durable_seconds)
        self.protected_since_at = request.asked_at
        self._failures.forgive()
        if PULSE.board is not None:
            PULSE.board.note_committed(name.step)
        if self.tidier.copier is not None:
            self.tidier.copier.note_committed(name)
        request.is_committed = True
        request.settled.open()
        self._emit(
            Committed(
                step=request.step,
                generation=name.generation,
                blocked_seconds=blocked_seconds,
                background_seconds=durable_seconds,
                size_bytes=receipts.size_bytes,
                referred_bytes=receipts.referred_bytes,
                training_saved_seconds=training_saved_seconds,
            )
        )

    def _fail(self, handle: SaveHandle, error: BaseException) -> None:
        request, step = handle.request, handle.step
        message = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HoldfastError) else ""
        failure = SaveFailedError(f"step {step} was not saved: {message}", step=step, hint=hint)
        failure.__cause__, is_further = error, False
        if isinstance(error, PeerError) and error.rank != self._worker.rank and is_near(error):
            print_elsewhere(failure, f"rank {error.rank}")
        try:
            # Before anybody here hears of it, who may end the process at once.
            self._writer.fail(error)
        finally:
            is_further = self._failures.add(failure)
            request.fail(failure)
        self._emit(
            Failed(
                stage="save",
                error=message,
                step=step,
                generation=self._writer.generation,
                save_lost=True,
                background_seconds=time.monotonic() - request.copied.completed_at,
                rank=None if self._worker.is_alone else getattr(error, "rank", self._worker.rank),
                path="" if self._worker.is_alone else handle.url,
                is_raised=is_further,
            )
        )
        if isinstance(error, ChangedError):
            self._emit(Warned(text=GIVING_UP))
        _empty_frames(error)

    def _end(self, handle: SaveHandle, manifest: Manifest | None) -> None:
        """**Blocks.** The last actions of every save: with a manifest, all but the clean-up."""
        request = handle.request
        try:
            if request.protocol is not None:
                self._writer.finish()
        finally:
            if self._copying is not None:
                with suppress(BaseException):  # It has been raised where it was waited for.
                    self._copying.wait()
            self._copying = None
            if self.barrier is not None:
                self.barrier.forget()
            # Tensors that go when the program has begun to end abort it: torch takes the interpreter's lock for that,
            # which this thread does not get any more.
            staging, request.staging = request.staging, None
            if isinstance(staging, Staging):
                staging.forget()
            self._flush_events()
            # One at a time: what is to be removed never piles up. The next save may begin only then, as it would wait
            # for this thread, and a removal that hangs is to end at that save's deadline.
            self.tidier.wait()
            if manifest is None:
                request.served.open()
                # And from here on the program may end.
                self._failures.note_ended(handle)
            else:
                self.tidier.follow(handle, manifest)
                request.served.open()

    def _flush_events(self) -> None:
        while not self._pending_events.empty():
            self._emit(self._pending_events.get())


def _empty_frames(error: BaseException) -> None:
    """Drops the local variables of failed functions, which are large; the traceback stays."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & _RESUMED:  # Clearing one that may go on ends it.
                with suppress(RuntimeError):  # It has not ended.
                    frame.clear()
        one = one.__cause__ or one.__context__
