"""The engine: one thread that makes the saves of a manager, from the copy to the removals after the commit.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from holdfast.catalog import describe_lost
from holdfast.catalog.publish import Receipts
from holdfast.errors import (
    ChangedError,
    FencedError,
    HoldfastError,
    NotFoundError,
    OutOfMemoryError,
    SaveFailedError,
    StorageFullError,
)
from holdfast.events import (
    Committed,
    Event,
    Failed,
    GenerationOpened,
    Held,
    Retained,
    Sink,
    Skipped,
    Staged,
    Warned,
    Written,
)
from holdfast.format.names import StepName
from holdfast.format.records import Manifest, Worker
from holdfast.options import SaveOptions
from holdfast.process.worker_pool import Round, WorkerPool
from holdfast.save.failures import PendingFailures
from holdfast.save.handle import SaveRequest
from holdfast.save.image import Staging
from holdfast.save.overlap import GIVING_UP, OptimizerStepBarrier
from holdfast.save.records import CalledOffError, LeftOutError, Origin
from holdfast.save.run_writer import CheckpointWriter, StepFiles, make_debris_warning

_MOST_KEPT_TOLD: Final = 100
"""So many kept steps are named in the event of retention."""

_Made = TypeVar("_Made")

_RESUMED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Code flags of generators and coroutines."""


class Engine:
    """Makes saves, one at a time.

    The first save starts the engine's thread, and the tidier, a thread that cleans up after a commit. At most one save
    is cleaned up after, while at most one other is made.

    The public methods and `_note_held` run in the training thread, except `emit_soon`, which runs in any, and `_tidy`
    in the tidier. While a save is in progress, only the engine's thread writes the attributes, of which others may read
    the public ones, and `_note_held` writes `_held_seconds`. Otherwise the training thread may.

    Attributes:
        barrier: Holds up the steps of optimizers, or None.
        newest: The newest checkpoint that was committed here, or None.
        serving: The threads that make a save or clean up after one, and call sinks, while they do.
        durable_seconds: How long `newest` took to be durable after its copy had ended, or None.
        blocked_seconds: How long the save of `newest` blocked training, or None.
        protected_since_at: The time from which training is lost if the save in progress is.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        worker: Worker,
        url: str,
        options: SaveOptions,
        failures: PendingFailures,
        emit: Sink,
        check_caller: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._worker = worker
        self._url = url
        self._failures = failures
        self._emit = emit
        self._thread = WorkerPool(1, "holdfast-engine")
        self._tidier = WorkerPool(1, "holdfast-tidier")
        self._pool = WorkerPool(options.threads, "holdfast-worker")
        self._pending_events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.barrier: OptimizerStepBarrier | None = None
        if options.overlap_copy:
            self.barrier = OptimizerStepBarrier(options.timeout_seconds, self._note_held, check_caller)
        self.newest: StepName | None = None
        self.serving: set[int] = set()
        # Where the run had gone on from when `newest` was saved.
        self._origin = Origin()
        self.durable_seconds: float | None = None
        self.blocked_seconds: float | None = None
        self.protected_since_at = time.monotonic()
        # Of the save in flight: the copies that the pool makes, its files, and for how long it has held up a step of
        # the optimizer.
        self._copying: Round | None = None
        self._files: StepFiles | None = None
        self._held_seconds = 0.0
        # The save before, while the tidier may be at work for it.
        self._before: SaveRequest | None = None
        # What retention has told of: it meets with the same again after each save.
        self._told: set[str] = set()

    def submit(self, request: SaveRequest) -> None:
        """Submits a save. It **blocks** if no thread can be started any more, because the interpreter shuts down."""
        work = partial(self._serve, request)
        if self._thread.start():
            # In one go: no signal handler comes between the two.
            request.is_submitted = True
            self._thread.put(work)
        else:
            request.confirm()
            request.is_submitted = True
            work()

    def emit_soon(self, event: Event) -> None:
        """**Thread-safe.** Lets the engine's thread emit an event, when training no longer waits for it."""
        self._pending_events.put(event)

    def tidy(self) -> None:
        """**Blocks.** The run has succeeded: the step that it resumed from need not be kept any more."""
        if self.newest is not None and self._origin.base not in (None, *self._origin.sources):
            self._retain(self.newest, self._origin, None)

    def close(self, timeout_seconds: float) -> None:
        """**Blocks.** Ends the threads; no save is in progress."""
        for threads in (self._thread, self._tidier, self._pool):
            threads.end()
        for threads in (self._thread, self._tidier, self._pool):
            threads.join(timeout_seconds)
        if self.barrier is not None:
            self.barrier.close()
        self._flush_events()

    def _serve(self, request: SaveRequest) -> None:
        """Makes one save, with any result; raises only what a user's sink may raise."""
        self._failures.note_begun(request)
        request.progress.thread = threading.get_ident()
        self.serving.add(request.progress.thread)
        manifest: Manifest | None = None
        try:
            try:
                manifest = self._save(request)
            except BaseException as error:
                # This may raise another error in place of the first.
                self._give_up(request, error)
                raise
        except CalledOffError:
            pass  # The thread that asked for it knows.
        except LeftOutError as left:
            # A save that not all workers could take part in is not a failure.
            self._writer.fail(left)
            request.progress.leave_out(request.step, left.reason)
            self._emit(Skipped(step=request.step, reason=left.reason))
        except BaseException as error:  # noqa: BLE001  The user must be notified of any error that ended the save.
            self._fail(request, error)
        finally:
            try:
                self._end(request, manifest)
            finally:
                self.serving.discard(threading.get_ident())

    def _save(self, request: SaveRequest) -> Manifest | None:
        """Makes a save: copy, write, wait for the confirmation, commit; returns the manifest if it is this worker's."""
        staging = request.staging
        assert staging is not None, "it is set before"
        if isinstance(staging, OutOfMemoryError):
            # No memory: nothing is copied; fail once training has confirmed.
            request.copied.begin()
            self._wait_for_training(request)
            self._writer.begin(request.protocol)
            raise staging
        barrier = self.barrier if staging.captured.held else None
        try:
            is_pool_copying = self._copy(request, staging, barrier)
            if is_pool_copying:
                try:
                    self._open(request, staging).write_behind_copy(self._pool)
                except StorageFullError as error:
                    if self._before is None:
                        raise
                    self._give_up(request, error)  # It begins again where it may wait for room.
        finally:
            # Also a failure so far is reported when training has its copy, and not before.
            self._wait_for_training(request)
            self._note_staged(request, staging)
        # From here on the other workers are spoken to, if there are any.
        self._writer.begin(request.protocol)
        if barrier is not None:
            try:
                barrier.copy(partial(staging.copy_later, self._pool, barrier.release))
            finally:
                barrier.release([])
            request.progress.is_copied = True
            request.progress.staged.open()
        try:
            receipts = self._with_room(partial(self._finish_files, request, staging), partial(self._give_up, request))
        finally:
            self._flush_events()
        name = request.progress.name
        assert name is not None, "it was opened"
        self._emit(
            Written(
                step=name.step,
                generation=name.generation,
                background_seconds=time.monotonic() - request.copied.completed_at,
                size_bytes=receipts.size_bytes,
            )
        )
        if barrier is not None:
            barrier.wait_settled()
        commit = partial(self._writer.commit, receipts, name, request.metrics, request.metadata)
        manifest = self._with_room(commit)
        self._note_committed(request, name, receipts)
        return manifest

    def _copy(self, request: SaveRequest, staging: Staging, barrier: OptimizerStepBarrier | None) -> bool:
        """**Blocks** while the copies are made that training waits for, unless the pool can make them by itself.

        The rest is returned: then this thread can write what is copied already.
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
            is_pool_copying = has_helpers and staging.is_coarse and barrier is None and self._writer.writes_early
            if is_pool_copying:
                self._copying = self._pool.begin(copies, processors)
            else:
                self._pool.run(copies, processors - 1)
        except BaseException as error:
            request.copied.fail(error)
            raise
        return is_pool_copying

    def _open(self, request: SaveRequest, staging: Staging) -> StepFiles:
        if not self._writer.writes_early:
            self._await_tidied()
        if (name := request.progress.name) is None:
            name, base = self._writer.open(request.origin, request.step)
            if base is not None:
                self.emit_soon(GenerationOpened(generation=base.generation, base_step=base.step))
            request.progress.name = name
            request.progress.named.open()
        self._files = self._writer.open_files(staging.snapshot, name, request.metrics)
        return self._files

    def _finish_files(self, request: SaveRequest, staging: Staging) -> Receipts:
        """**Blocks.** Writes what is left to write."""
        return (self._files or self._open(request, staging)).finish(self._pool)

    def _with_room(self, act: Callable[[], _Made], undo: Callable[[StorageFullError], object] | None = None) -> _Made:
        """**Blocks.** Writes something; if the disk is full, once more after the clean-up after the save before.

        `undo` is called before that.
        """
        try:
            return act()
        except StorageFullError as error:
            if not self._await_tidied():
                raise
            if undo is not None:
                undo(error)
            return act()

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
            request.progress.is_copied = True
            request.progress.staged.open()
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
        training_saved_seconds = max(request.asked_at - self.protected_since_at, 0.0)
        self.newest, self._origin = name, request.origin
        self.durable_seconds = time.monotonic() - copied_at
        self.blocked_seconds = copied_at - request.asked_at - request.waited_seconds + self._held_seconds
        self.protected_since_at = request.asked_at
        self._failures.forgive()
        request.progress.is_committed = True
        request.progress.settled.open()
        self._emit(
            Committed(
                step=request.step,
                generation=name.generation,
                blocked_seconds=copied_at - request.asked_at,
                background_seconds=self.durable_seconds,
                size_bytes=receipts.size_bytes,
                referred_bytes=receipts.referred_bytes,
                training_saved_seconds=training_saved_seconds,
            )
        )

    def _give_up(self, request: SaveRequest, error: BaseException) -> None:
        """**Blocks.** Removes what a save has written that failed with `error`. If this raises, that error replaces it.

        If a file was missing, another job may have removed it, or the others abandoned the save: the error says so.
        """
        files, self._files = self._files, None
        try:
            if files is not None:
                files.abandon()
            if isinstance(error, NotFoundError):
                self._writer.check_standing()
        finally:
            if (name := request.progress.name) is not None:
                try:
                    self._writer.give_up(name)
                except HoldfastError as left:
                    self._emit(make_debris_warning(name, left))

    def _fail(self, request: SaveRequest, error: BaseException) -> None:
        step = request.step
        message = error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HoldfastError) else ""
        failure = SaveFailedError(f"step {step} was not saved: {message}", step=step, hint=hint)
        failure.__cause__ = error
        try:
            # Before anybody here hears of it, who may end the process at once.
            self._writer.fail(error)
        finally:
            self._failures.add(failure)
            request.progress.fail(failure)
        self._emit(
            Failed(
                stage="save",
                error=message,
                step=step,
                generation=self._writer.generation,
                save_lost=True,
                background_seconds=time.monotonic() - request.copied.completed_at,
                rank=None if self._worker.is_alone else getattr(error, "rank", self._worker.rank),
                path="" if self._worker.is_alone else self._url,
            )
        )
        if isinstance(error, ChangedError):
            self._emit(Warned(text=GIVING_UP))
        _empty_frames(error)

    def _tidy(self, request: SaveRequest, manifest: Manifest) -> None:
        """**Blocks.** Cleans up after a commit, and ends the save. Meanwhile the engine may make the next one."""
        request.progress.thread = threading.get_ident()
        self.serving.add(request.progress.thread)
        try:
            self._retain(manifest.name, request.origin, manifest)
        finally:
            self.serving.discard(threading.get_ident())
            self._failures.note_ended(request)

    def add_metrics(
        self, checkpoint: StepName | SaveRequest, metrics: Mapping[str, float], seen_generation: int
    ) -> None:
        """Stores metrics with a committed checkpoint, or that of a save once it is, in the background."""

        def add() -> None:
            name = checkpoint if isinstance(checkpoint, StepName) else checkpoint.wait_name()
            if name is not None:
                try:
                    self._writer.add_metrics(name, metrics, seen_generation)
                except FencedError:
                    pass  # As in `_retain`.
                except BaseException as error:  # noqa: BLE001  The checkpoint is committed.
                    self._tell_problem(error, name)

        if self._tidier.start():
            self._tidier.put(add)
        else:
            add()

    def _await_tidied(self) -> bool:
        """**Blocks** until the save before has been cleaned up after; returns False if that had ended before."""
        before, self._before = self._before, None
        return before is not None and before.progress.ended.wait(threading.TIMEOUT_MAX)

    def _retain(self, name: StepName, origin: Origin, manifest: Manifest | None) -> None:
        """**Blocks.** Removes checkpoints that are not kept after a commit. A failure is only reported.

        Without the manifest of the commit, the run has succeeded, and the step that it resumed from is no longer
        protected.
        """
        begun_at = time.monotonic()
        protected = dict.fromkeys(origin.sources, "this program restored from it")
        if origin.base is not None and manifest is not None:
            protected[origin.base] = "the run resumed from it"
        protected[name] = "just committed"
        try:
            cleaning = self._writer.clean(name, protected, manifest)
        except FencedError:
            return  # The newer job cleans; the next save here says that this one is fenced.
        except BaseException as error:  # noqa: BLE001  The checkpoint is committed, even if something fails afterwards.
            self._tell_problem(error, name)
            return
        if cleaning is None:
            return
        # A job that validates for the first time after some saves has done nothing wrong.
        warnings = [
            f"Best({metric!r}) keeps nothing: no checkpoint has that metric. "
            f"Reported so far: {', '.join(cleaning.reported)}."
            for metric in cleaning.absent
            if cleaning.reported
        ]
        if cleaning.lost:
            warnings.append(f"{describe_lost(cleaning.lost)}, and are kept until `holdfast prune --lost`")
        if cleaning.hindrance:
            warnings.append(cleaning.hindrance)
        for text in warnings:
            if text not in self._told:
                self._told.add(text)
                self._emit(Warned(text=text))
        # Of thousands, the journal would hold nothing else.
        told = sorted(cleaning.kept)[-_MOST_KEPT_TOLD:]
        self._emit(
            Retained(
                kept={kept.step: cleaning.kept[kept] for kept in told},
                removed=tuple(removed.step for removed in cleaning.removed),
                background_seconds=time.monotonic() - begun_at,
                more_kept=len(cleaning.kept) - len(told),
            )
        )
        if cleaning.problems:
            self._tell_problem(cleaning.problems[0], name)

    def _tell_problem(self, problem: BaseException, name: StepName) -> None:
        reason = getattr(problem, "message", repr(problem))
        # It is tried again after each save, and no step is lost: a warning, once for each reason.
        if reason not in self._told:
            self._told.add(reason)
            self._emit(Failed(stage="retain", error=reason, step=name.step, generation=name.generation))

    def _end(self, request: SaveRequest, manifest: Manifest | None) -> None:
        """**Blocks.** The last actions of every save: with a manifest, all but the clean-up."""
        try:
            self._writer.finish()
        finally:
            if self._copying is not None:
                with suppress(BaseException):  # It has been raised where it was waited for.
                    self._copying.wait()
            self._copying = self._files = None
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
            self._await_tidied()
            if manifest is None:
                request.progress.served.open()
                # And from here on the program may end.
                self._failures.note_ended(request)
            else:
                self._before = request
                work = partial(self._tidy, request, manifest)
                if self._tidier.start():
                    self._tidier.put(work)
                else:
                    work()
                request.progress.served.open()

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
