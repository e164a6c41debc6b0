"""`CheckpointManager`: saves and restores the checkpoints of one run."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self

from msgspec.structs import replace as replace_fields

from holdfast.advice.hyperparameters import Keeping, list_kept, note_script
from holdfast.catalog import StoredRun
from holdfast.checkpoint import (
    Checkpoint,
    check_order,
    objects_of,
)
from holdfast.cluster import Cluster
from holdfast.cluster.discover import describe_lone_task
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS, LIVENESS_SECONDS
from holdfast.errors import ClosedError, UsageError
from holdfast.events import Sink, Skipped, Sums, Totals, Warned
from holdfast.format.encoding import escape
from holdfast.format.records import ALONE
from holdfast.options import (
    SaveOptions,
    check_like,
    check_metrics,
    check_notes,
    check_place,
    check_step,
    check_wait,
    look_into,
)
from holdfast.policies import All, RetentionPolicy, SavePolicy
from holdfast.process.terminal import inform
from holdfast.restore.candidates import Selection, make_selection
from holdfast.restore.engine import make_agreement, restore_objects
from holdfast.restore.records import Restoration
from holdfast.save.failures import PendingFailures, raise_newest
from holdfast.save.handle import SaveHandle, SaveProgress, SaveRequest, find_wait_seconds, wait_served
from holdfast.save.joint.setup import explaining, open_participant, try_plan_save
from holdfast.save.mark import Mark, trace_arrays
from holdfast.save.prepare import make_readiness_check, open_event_sinks
from holdfast.save.records import Origin
from holdfast.save.saver import Saver, StepTimer
from holdfast.state import Captured, check_objects, list_shared
from holdfast.storage import Storage, open_storage
from holdfast.tracebacks import short_traceback
from holdfast.witness.ring import remove_rings
from holdfast.witness.watch import Witness

_PARTING_SECONDS: Final = 2.0


@short_traceback
class CheckpointManager:
    """Saves the state of live objects as checkpoints of a run, in the background, and restores it.

    Use it from one thread, the training thread, and never inside of `save`. Leaving a `with` block waits for the save
    in progress and closes the manager.

    Attributes:
        begin_anew: True if the manager starts from the beginning, regardless of existing checkpoints.
        save_every: When `save_if_due` saves; None for never.
        timeout_seconds: The deadline of every wait that sets none of its own.
        restored: The newest complete restore; None before one.
        worker, participant: This worker's rank among all, and its part in the job; None if it is alone.
        emit: Sends an event to the log, the sinks and the run's journal, from any thread.
        find_steps: Returns the step at which the run that this belongs to was entered, and the number of complete
            steps; None if this belongs to no run.
        wait_until_free: Waits a while if another process of this machine has the run open; called before a restore.
        check_ready: Checks, once, that the objects and the directory can be saved; called before training begins.
        url: The URL of the run.
        witness: Records what each step takes and gives, if a loop counts the steps, and compares it after a restart.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        checkpoint: Checkpoint,
        *,
        save_every: SavePolicy | None = None,
        keep: RetentionPolicy | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        failures_allowed: int = 0,
        begin_anew: bool = False,
        start_from: int | None = None,
        incremental: bool = False,
        reuse_space: bool = True,
        sinks: Iterable[Sink] = (),
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        threads: int = 6,
        overlap_copy: bool = False,
        reserve_bytes: int | Literal["auto"] | None = None,
        cluster: Cluster | Literal["auto", "alone"] = "auto",
        liveness_seconds: float = LIVENESS_SECONDS,
        check_replicas: bool | Literal["first"] = "first",
        on_resize: Literal["allow", "refuse"] = "allow",
    ) -> None:
        """Reads the directory; creates nothing there until the first save.

        In a job of several workers (under torchrun, for example) every worker creates its managers with the same
        arguments and in the same order; this waits for the others. All call `restore` and `save` at the same steps.

        Args:
            directory: The run's directory, a URL, or an open storage.
            checkpoint: The objects to save and restore; more may be added later.
            save_every: When `save_if_due` saves; None for never.
            keep: Which checkpoints to keep after each commit; None for all.
            when_busy: What to do with a save if the previous one is still in progress: wait for it, or skip this one.
            failures_allowed: How many saves in a row may fail before an error is raised; that of a job's last save is
                always raised.
            begin_anew: True to start from the beginning; existing checkpoints stay until they are pruned, but no longer
                belong to the current lineage.
            start_from: A step to go back to, once: the first `restore` restores it, and saves continue from it. If the
                current lineage has gone back to it already, the newest step is restored, so it may stay in the script.
            incremental: True to write only arrays that have changed; steps that hold the others stay, regardless of
                `keep`.
            reuse_space: True to write each save over the data file of a checkpoint that `keep` gave up, if the file
                system supports it; until the manager is closed, the run uses one data file more. Pass False if other
                machines read files of removed checkpoints through NFSv3. Several workers always write new files.
            sinks: Functions that are called with each event.
            timeout_seconds: The deadline of every wait that sets none of its own.
            threads: The number of threads that write, and read during a restore. They mostly wait for the disk.
            overlap_copy: True to copy parameters and optimizer state while training continues; each optimizer's
                `step()` waits for the copy. Use it only if nothing but `step()` changes them. Another change that
                autograd detects fails the save and turns this off; changes through `.data`, NumPy, collectives or
                hand-written fused kernels are not detected.
            reserve_bytes: Host memory for the first save. None to make it ready slowly while training runs, from the
                first `save_if_due` that is not due, or without `save_every` from the first steps of a saved torch
                optimizer; "auto" to compute its size and allocate it now, or a number to allocate that much now, in the
                background; 0 to leave it to the first save.
            cluster: The workers of the job: "auto" to find them as `holdfast.cluster.open_cluster` does, "alone" for a
                worker that saves on its own although there are others, or a cluster, which the caller closes.
            liveness_seconds: A worker that gives no sign of life for this long is taken for dead, and its saves fail.
            check_replicas: "first" to compare replicated state between workers at the first save, and at the first save
                after a restore: a difference fails the save. True to compare at every save and report differences as
                events; False to never compare.
            on_resize: "refuse" to restore only checkpoints of the same number of workers; "allow" for any number.

        Raises:
            UsageError: If an argument is wrong.
            UnsupportedValueError: If an object is a wrapper that cannot be saved, such as one of FSDP1.
            StorageError: If the directory cannot be read, or differs from that of the other workers.
            AbsentError: If other workers of the job do not join.
            ClusterError: If the job's store does not respond.
        """
        check_order("CheckpointManager", directory, checkpoint)
        self._options = options = SaveOptions.pick(locals(), keep=All())
        check_objects(checkpoint.objects)
        note_script(checkpoint.objects, objects_of(checkpoint).own)
        self.checkpoint, self._storage = checkpoint, open_storage(directory)
        self.url = self._storage.url
        self.save_every, self.timeout_seconds, self._totals = save_every, timeout_seconds, Totals()
        deadlines = {"liveness_seconds": liveness_seconds, "timeout_seconds": timeout_seconds}
        catalog, self.participant = open_participant(cluster, partial(look_into, self._storage), **deadlines)
        living = () if begin_anew else catalog.living
        self.worker = ALONE if self.participant is None else self.participant.worker
        self._wait_seconds = find_wait_seconds(timeout_seconds, self.worker)
        with explaining(self.participant):
            if self.participant is not None:
                self.participant.start(self._storage, list_shared(checkpoint.objects), is_new=not living)
            self.emit = open_event_sinks(self._storage, [self._totals, *options.sinks], is_leader=self.worker.is_leader)
            if cluster == "auto" and self.participant is None and (text := describe_lone_task(os.environ)):
                self.emit(Warned(text=text))
            self._failures = PendingFailures(failures_allowed)
            take_unread = objects_of(checkpoint).take_unread
            self._saver = saver = Saver(
                self._storage, options, self.emit, self._failures, checkpoint.objects, take_unread, self.participant
            )
            # If this is dropped without `close`, its threads go on to know the lock.
            weakref.finalize(self, saver.lock.release).atexit = False
            went_back = None if begin_anew else catalog.start_from
            self._origin = Origin(living[-1] if living else None, catalog.generation, start_from=went_back)
            self._living, self.newest_asked = {name.step for name in living}, -1
            self._process, self._pace = os.getpid(), StepTimer()
            self._in_flight: SaveRequest | None = None
            # Called when this is closed, unless by an error: saves that a loop has still to make.
            self.closing: list[Callable[[], object]] = []
            self._settling = (
                threading.RLock()
            )  # Held to clear that: another thread may wait while this one begins a save.
            self.check_ready: Callable[[], None] = make_readiness_check(
                self._storage,
                saver.lock,
                lambda: saver.check_capture(objects_of(checkpoint).all()),
                make_agreement(None if self.participant is None else self.participant.peers, self.url).run,
                is_leader=self.worker.is_leader,
                failures_allowed=failures_allowed,
                emit=self.emit,
            )
            if reserve_bytes is not None or save_every is None:
                self._saver.prepare(reserve_bytes)
            self.begin_anew, self._closed = begin_anew, False
            self.find_steps: Callable[[], tuple[int, int]] | None = None
            self.witness = Witness(self._storage, self.worker, self.emit)
            self.restored: Restoration | None = None
            self.wait_until_free: Callable[[], None] = (
                partial(saver.lock.take, inform) if self.worker.is_leader else lambda: None
            )

    @property
    def totals(self) -> Sums:
        """The time that saving and restoring have taken in this process so far."""
        return self._totals.sums

    @property
    def save_seconds(self) -> float | None:
        """The duration of the newest committed save until it was durable, without waits before it; None before one."""
        blocked, durable = self._saver.costs
        return None if blocked is None or durable is None else blocked + durable

    def mark(self, metrics: Mapping[str, float] | None = None) -> Mark:
        """**Blocks** while it checks all arrays. Notes the current state, to be saved later.

        Raises:
            UnsupportedValueError: If an object has state that cannot be stored.
        """
        state, figures = self._saver.capture(objects_of(self.checkpoint).all()), dict(metrics or {})
        save = lambda step, taken, replace: self._save(step, figures, None, replace=replace, captured=taken)  # noqa: E731
        return Mark(state, trace_arrays(state), save)

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> SaveHandle:
        """Copies the state and returns; the checkpoint is written and committed in the background.

        The checkpoint holds the values at the time of this call, regardless of later changes. If the previous save is
        still in progress, this call waits for it, unless the manager was created with `when_busy="skip"`.

        Args:
            step: The number of complete steps; it must be larger than that of every checkpoint of the current lineage.
            metrics: Metrics to store with the checkpoint, for `Best` and for people.
            metadata: Any other JSON value to store with the checkpoint.
            replace: True to save a step again that is already committed. The old checkpoint is removed once the new one
                is committed; if the old one belongs to an earlier generation, it leaves the current lineage, until it
                is pruned.

        Returns:
            The save, to wait for if needed.

        Raises:
            StepExistsError: If the step is already committed.
            UsageError: If the step is older than the newest, or an argument is wrong.
            UnsupportedValueError: If an object has state that cannot be stored.
            SaveFailedError: If an earlier save failed and that was not raised yet. `error.next_save` continues.
            DeadlineError: If the previous save does not end in time.
        """
        return self._save(step, metrics, metadata, replace=replace)

    def save_if_due(
        self, step: int, *, metrics: Mapping[str, float] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle | None:
        """Saves like `save`, if the manager's policy says so; call it after each step.

        Returns:
            The save, or None if none was due.

        Raises:
            SaveFailedError: As in `save`; never if none is due, so that the save that reports a failure still saves.
        """
        self._saver.note_call()
        step, metrics = check_step(step), check_metrics(metrics)
        if self.save_every is None:
            return None
        reason = try_plan_save(self.save_every, self._pace.moment(step, *self._saver.costs), self.participant)
        if reason is None or step in self._living:
            self._saver.look_ahead(objects_of(self.checkpoint).all())
            return None
        return self._save(step, metrics, metadata, reason=reason)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores more metrics with the step that was saved or restored last, in the background; `close` waits for it.

        Of several workers, those of rank 0 are stored.

        Raises:
            UsageError: If it is another step, or a metric is not a number.
        """
        self._check_usable()
        step, (figures, _) = check_step(step), check_notes(metrics, None)
        known = (self._in_flight, self._saver.engine.newest, None if self.restored is None else self.restored.name)
        found = next((one for one in known if one is not None and one.step == step == self.newest_asked), None)
        if found is None:
            raise UsageError(f"step {step} is not the one that was saved or restored last")
        if figures:
            self._saver.engine.add_metrics(found, figures, self._origin.seen_generation)

    def restore(
        self,
        step: int | None = None,
        *,
        only: str | Iterable[str] | None = None,
        strict: bool = True,
        keep_current: str | Iterable[str] = (),
        like: Mapping[str, Any] | None = None,
    ) -> Restoration | None:
        """**Blocks.** Loads a checkpoint into the live objects; every byte that is read is checked.

        Later saves continue from this checkpoint: newer steps no longer belong to the current lineage.

        Args:
            step: The step to restore, which is then kept, regardless of `keep`, until the manager restores another one
                or is closed; None for the newest whole step of the current lineage (with `begin_anew`: since then; at
                first that of `start_from`).
            only: Names of objects (`"model"`) or patterns of leaves (`"model/layers.0.*"`); the rest is left unchanged.
            strict: False to restore everything that fits, and report the rest in the result.
            keep_current: What stays as the program set it: hyperparameters such as `"optimizer.lr"`, which a schedule
                then continues from in proportion, or names of whole objects, such as `"schedule"`.
            like: For objects by name, trees that describe what to create: arrays, or `jax.ShapeDtypeStruct`s with
                shardings. They are left unchanged; the created trees are in `checkpoint` under those names. Objects
                with state, such as modules, are filled.

        Returns:
            A description of the restore, or None if the run has no checkpoint yet.

        Raises:
            MismatchError: If checkpoint and objects differ, or the number of workers differs and that is refused. The
                error lists the differences, and nothing is changed.
            UsageError: If an argument is wrong, an entry of `keep_current` cannot be kept, or this is inside of the
                block of a run: only a part may be restored there, and once a step was trained, only of the current
                step. Nothing is changed.
            NoCheckpointError: If the step does not exist.
            NoWholeCheckpointError: If there are checkpoints, but all are damaged or have lost their manifests.
            StorageError: If the storage fails.
        """
        self._check_usable()
        if self.find_steps is not None and only is None:
            raise _make_block_error("manager.restore", step)
        self._settle(None)
        if self.find_steps is not None:
            self._check_partial(step, make_selection(only), *self.find_steps())
        check_objects(self.checkpoint.objects)
        self._saver.advisor.begin()
        is_first = step is None and self.restored is None and self.newest_asked < 0
        start_from = self._options.start_from if is_first else None
        script = note_script(self.checkpoint.objects, objects_of(self.checkpoint).own)
        made_anew = check_like(like)
        restoration = restore_objects(
            self._storage,
            {**objects_of(self.checkpoint).all(), **made_anew},
            made_anew=made_anew.keys(),
            step=None if step is None else check_step(step),
            begins_anew=self.begin_anew and only is None and not self._living,
            start_from=start_from,
            on_resize=self._options.on_resize,
            select=make_selection(only),
            strict=strict,
            threads=self._options.threads,
            emit=self.emit,
            keeping=Keeping(script, self.checkpoint.objects, list_kept(keep_current)),
            worker=self.worker,
            named=frozenset() if self.participant is None else frozenset().union(*self.participant.named),
            agreement=make_agreement(None if self.participant is None else self.participant.peers, self.url),
        )
        if restoration is None:
            self._saver.start_from(0)
            return None
        objects_of(self.checkpoint).put_restored(restoration.replaced)
        if only is None:
            self.restored = restoration
            # A job that has begun since then is detected by the next save.
            sources = () if step is None else (restoration.name,)
            if restoration.step == start_from:
                remove_rings(self._storage)  # What lies beyond is not repeated.
            went_back = self._origin.start_from if start_from is None else start_from
            self._origin = Origin(restoration.name, restoration.seen_generation, sources, went_back)
            self._saver.begin_generation()
            self._living = {known for known in self._living if known <= restoration.step} | {restoration.step}
            self.newest_asked = restoration.step
            self._saver.start_from(restoration.step)
            self._pace.begin(restoration.step)
        else:
            self._origin = replace_fields(self._origin, sources=(*self._origin.sources, restoration.name))
        return restoration

    def _check_partial(self, step: int | None, select: Selection | None, entered_at: int, done: int) -> None:
        """Checks that objects that are trained do not go back to another step than that of their run."""
        step = self.latest_step() if step is None else step
        is_whole = select is not None and all(select(escape(name)) for name in self.checkpoint.objects)
        if step is not None and step != done and (is_whole or done > entered_at):
            raise _make_block_error(f"manager.restore of step {step}, in step {done},", step)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until no save is in progress.

        Raises:
            SaveFailedError: If a save failed and the failure has not been raised yet.
            DeadlineError: If it takes longer; the save continues.
        """
        self._saver.check_reentry()
        self._settle(timeout_seconds)
        raise_newest(self._failures.take(last=False), None)

    def steps(self) -> tuple[int, ...]:
        """**Blocks.** Returns the committed steps of the current lineage, oldest first."""
        self._saver.note_call()
        return tuple(name.step for name in StoredRun(self._storage).look().living)

    def latest_step(self) -> int | None:
        """**Blocks.** Returns the newest committed step of the current lineage, or None."""
        return max(self.steps(), default=None)

    def close(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits for the save in progress, ends all threads and frees the memory; may be repeated.

        Raises:
            SaveFailedError: If a save failed and the failure has not been raised yet, or the last save failed.
            DeadlineError: If the save does not end in time; it continues, and another `close` may wait for it.
        """
        self._close(timeout_seconds)

    def _close(self, timeout_seconds: float | None, *, has_ended_well: bool = False) -> None:
        if self._closed or os.getpid() != self._process:
            return  # A forked child has neither the threads nor the task: what is in flight is its parent's.
        self._saver.check_reentry()
        self.witness.end()
        while self.closing:
            self.closing.pop()()
        self._settle(timeout_seconds, self._failures.wait_closed)
        self._closed = True
        if has_ended_well:
            self._saver.engine.tidy()
        self._saver.close(self.timeout_seconds if timeout_seconds is None else timeout_seconds)
        if self.participant is not None:
            self.participant.close()
        raise_newest(self._failures.take(last=True), None)

    def abandon(self) -> None:
        """Closes without waiting: a save in progress is abandoned, and the program's exit does not wait for it."""
        self._closed, self._in_flight = True, None
        self._saver.abandon()
        self._failures.abandon()
        if self.participant is not None:
            self.participant.leave()

    def __repr__(self) -> str:
        own, busy = self._saver.engine.newest, self._in_flight
        steps = [*tuple(self._living), *([] if own is None else [own.step])]
        notes = [f"newest step {max(steps)}" if steps else "nothing saved yet"]
        if busy is not None and busy.step not in steps:
            notes.append(f"step {busy.step} {busy.progress}")
        notes += ["closed"] if self._closed else []
        return f"<CheckpointManager of {self.url}: {', '.join(notes)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.closing.clear()  # The state may be that of half a step.
        else:
            is_first, has_saved = self.restored is None and len(self._living) > 1, self._saver.engine.newest is not None
            assigned = objects_of(self.checkpoint).assigned
            for text in self._saver.advisor.find_at_end(assigned, is_first=is_first, has_saved=has_saved):
                self.emit(Warned(text=text))
        self._failures.close_behind(error, partial(self._close, None, has_ended_well=error is None))

    def _save(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        metadata: Mapping[str, Any] | None,
        *,
        replace: bool = False,
        reason: str = "",
        captured: Captured | None = None,
    ) -> SaveHandle:
        asked_at = time.monotonic()
        self._check_usable()
        self._saver.caller = threading.get_ident()
        try:
            clean_metrics, clean_metadata = check_notes(metrics, metadata)
            step, progress = check_step(step), SaveProgress()
            protocol = try_cancel = None
            if self.participant is not None:
                protocol = self.participant.begin(step)
                try_cancel = partial(self.participant.try_cancel, protocol)
            handle = SaveHandle(
                step,
                self.url,
                progress,
                self._wait_seconds,
                self._failures.mark_raised,
                replaces=replace,
                barrier=self._saver.barrier,
                try_cancel=try_cancel,
            )
            request = SaveRequest(
                step, clean_metrics, clean_metadata, self._origin, asked_at, handle, progress, reason, protocol
            )
            try:
                return self._begin(request, captured)
            except BaseException as error:
                if self.participant is not None and protocol is not None and not request.goes_on:
                    self.participant.tell(protocol, error)
                    # The others take this step for tried; what is due next must be the same here.
                    self._pace.note_begun_save(step)
                raise
        finally:
            self._saver.caller = None

    def _begin(self, request: SaveRequest, captured: Captured | None) -> SaveHandle:
        step, handle, busy = request.step, request.handle, self._in_flight
        if self._options.when_busy == "skip" and busy is not None:
            self._saver.note_call()
            if busy.goes_on and not busy.progress.served.is_open:
                self._skip(request, f"the save of step {busy.step} is still in progress")
                return handle
        self._settle(None, wait_served)
        before = self._in_flight
        request.waited_seconds = time.monotonic() - request.asked_at
        check_place(step, self.url, self._living, self.newest_asked, replace=handle.replaces)
        captured = captured or self._saver.capture(objects_of(self.checkpoint).all())
        untold = self._failures.take(last=False)
        try:
            self._in_flight = request
            self._saver.save(request, captured)
            self.newest_asked = max(step, self.newest_asked)
            self._pace.note_begun_save(step)
        except BaseException:
            # Also Ctrl-C ends up here: a confirmed save continues, and pending events are not lost.
            request.drop()
            self._failures.put_back(untold)
            # The storage may hold up what was written of it; the next save waits for that.
            if not request.goes_on and request.progress.ended.wait(_PARTING_SECONDS):
                self._in_flight = before
            raise
        raise_newest(untold, handle)
        return handle

    def _skip(self, request: SaveRequest, reason: str) -> None:
        """Skips the save, because the previous one is still in progress."""
        step = request.step
        request.progress.leave_out(step, reason)
        request.progress.ended.open()
        self._saver.engine.emit_soon(Skipped(step=step, reason=reason))
        if self.participant is not None and request.protocol is not None:
            self.participant.leave_out(request.protocol, reason)
            self._pace.note_begun_save(step)

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError(f"the manager of {self.url} is closed", hint="Create a new manager.")
        if os.getpid() != self._process:
            raise UsageError(
                f"the manager of {self.url} belongs to process {self._process}, and this is a child process",
                hint="Save in the process that created the manager, or create another manager in the child.",
            )
        self._saver.check_reentry()

    def _settle(
        self,
        timeout_seconds: float | None,
        wait: Callable[[SaveHandle, float | None], None] = SaveHandle.wait_ended,
    ) -> None:
        """Waits for the save in progress, and records its result."""
        if timeout_seconds is not None:
            check_wait(timeout_seconds)
        if (request := self._in_flight) is None:
            return
        request.drop_if_left()
        wait(request.handle, timeout_seconds)
        with self._settling:
            if self._in_flight is request:  # A signal handler may have waited, and saved, since.
                if request.progress.is_committed:
                    self._living.add(request.step)
                if request.progress.ended.is_open:
                    self._in_flight = None


def _make_block_error(what: str, step: int | None) -> UsageError:
    return UsageError(
        f"{what} inside the block of a run would change its objects, but not the number of its step",
        hint="To go back, leave the block, and start the run with hf.resumable(..., start_from="
        f"{40 if step is None else step!r}). A part can be loaded with only=..., before the first step or from the "
        "current one. To evaluate another step, leave the block, and use a new CheckpointManager.",
    )
