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
from holdfast.advice.rules import Advisor
from holdfast.advice.watch import follow_epochs
from holdfast.catalog import StoredRun
from holdfast.catalog.starts import read_starts
from holdfast.checkpoint import Checkpoint, check_order, objects_of
from holdfast.cluster import Cluster
from holdfast.cluster.discover import describe_lone_task
from holdfast.deadlines import DEFAULT_TIMEOUT_SECONDS, LIVENESS_SECONDS
from holdfast.errors import UsageError
from holdfast.events import Sink, Skipped, Sums, Warned
from holdfast.events.sinks import describe_cost
from holdfast.format.encoding import escape
from holdfast.format.records import ALONE, Manifest, Worker
from holdfast.options import SaveOptions, check_like, check_metrics, check_notes, check_step, look_into
from holdfast.policies import All, RetentionPolicy, SavePolicy, counts_epochs, learns_failures
from holdfast.process.pulse import PULSE
from holdfast.restore.candidates import make_selection
from holdfast.restore.engine import make_agreement, restore_objects
from holdfast.restore.records import Restoration
from holdfast.save.engine import Engine
from holdfast.save.handle import Origin, PendingFailures, SaveHandle, SaveRequest, find_wait_seconds, raise_newest
from holdfast.save.host_memory import HostBuffer
from holdfast.save.image import Stager
from holdfast.save.joint.setup import explaining, make_writer, open_participant, try_plan_save
from holdfast.save.lineage import CallGuard, Lineage
from holdfast.save.mark import Mark, trace_arrays
from holdfast.save.prepare import Preparation, RunEvents
from holdfast.state import Captured, check_objects, list_shared
from holdfast.storage import Storage, open_storage
from holdfast.storage.open import nearest_of
from holdfast.supervise.board import COPY, NONE
from holdfast.tiering import open_tiers
from holdfast.tracebacks import short_traceback
from holdfast.witness.ring import remove_rings
from holdfast.witness.watch import Witness

_PARTING_SECONDS: Final = 2.0
_MOMENT_SECONDS: Final = 0.3


@short_traceback
class CheckpointManager:
    """Saves the state of live objects as checkpoints of a run, in the background, and restores it.

    Use it from one thread, the training thread, and never inside of `save`. Leaving a `with` block waits for the save
    in progress and closes the manager.

    Attributes:
        restored: The newest complete restore; None before one.
    """

    # For other parts of holdfast. `options` has all but the directory, which `storage` is. `participant` is this
    # worker's part in the job; None if it is alone. `emit` sends an event to the log, the sinks and the journal, from
    # any thread. `lineage` has the steps of the run. `witness` records what each counted step takes and gives, and
    # compares it after a restart.

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        checkpoint: Checkpoint,
        *,
        save_every: SavePolicy | int | str | None = None,
        keep: RetentionPolicy | int | str | None = None,
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
            save_every: When `save_if_due` saves: a policy, a number of steps such as 500, or text such as "10min" or
                "1 epoch"; None for never.
            keep: Which checkpoints to keep after each commit: a policy, or how many of the newest; None for all.
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
        self.options = options = SaveOptions.pick(locals(), keep=All())
        check_objects(checkpoint.objects)
        named = objects_of(checkpoint)
        note_script(checkpoint.objects, named.own)
        self.checkpoint, self.storage = checkpoint, open_storage(directory)
        deadlines = {"liveness_seconds": liveness_seconds, "timeout_seconds": timeout_seconds}
        catalog, self.participant = open_participant(cluster, partial(look_into, self.storage), **deadlines)
        worker = self.worker
        with explaining(self.participant):
            self.emit = RunEvents(self.storage, options.sinks, worker)
            catalog, copier = open_tiers(self.storage, catalog, options, self.participant, self.emit)
            near = nearest_of(self.storage)
            self.lineage = Lineage(catalog, near, begins_anew=begin_anew)
            if self.participant is not None:
                is_new = not self.lineage.steps
                self.participant.start(self.storage, list_shared(checkpoint.objects), is_new=is_new)
            if cluster == "auto" and self.participant is None and (text := describe_lone_task(os.environ)):
                self.emit(Warned(text=text))
            self._failures, self._calls = PendingFailures(failures_allowed), CallGuard(self.url)
            holders = {} if self.participant is None else self.participant.holders
            stager = Stager(HostBuffer() if copier is None else copier.make_buffer(), worker, holders, named.all)
            writer, recycler = make_writer(self.storage, options, self.participant, self.emit, copier)
            self._engine = Engine(writer, recycler, stager, worker, options, self._failures, self.emit, self._calls)
            self._make_handle = partial(
                SaveHandle,
                url=self.url,
                timeout_seconds=find_wait_seconds(timeout_seconds, worker),
                mark_raised=self._failures.mark_raised,
                barrier=self._engine.barrier,
                copier=copier,
            )
            # If this is dropped without `close`, its threads go on to know the lock.
            weakref.finalize(self, recycler.lock.release).atexit = False
            self._advisor = Advisor(checkpoint.objects, named.take_unread)
            # Called when this is closed, unless by an error: saves that a loop has still to make.
            self.closing: list[Callable[[], object]] = []
            self._preparation = Preparation(
                near, recycler.lock, stager, named.all, options, self.emit, worker.is_leader
            )
            self.witness = Witness(self.storage, worker, self.emit)
            self.restored: Restoration | None = None
        if learns_failures(options.save_every) and worker.is_leader and self.storage.location is not None:
            self.lineage.pace.past = read_starts(self.storage.location)
        self.follow_epochs(follow_epochs(checkpoint.objects))

    @property
    def url(self) -> str:
        """The URL of the run."""
        return self.storage.url

    @property
    def worker(self) -> Worker:
        """This worker's rank among all."""
        return ALONE if self.participant is None else self.participant.worker

    @property
    def save_every(self) -> SavePolicy | None:
        """When `save_if_due` saves; None for never."""
        return self.options.save_every

    @property
    def timeout_seconds(self) -> float:
        """The deadline of every wait that sets none of its own."""
        return self.options.timeout_seconds

    @property
    def begin_anew(self) -> bool:
        """True if the manager starts from the beginning, regardless of existing checkpoints."""
        return self.options.begin_anew

    @property
    def totals(self) -> Sums:
        """The time that saving and restoring have taken in this process so far."""
        return self.emit.totals.sums

    def describe_cost(self, *, keeps: bool = True) -> str:
        """**Blocks** for a moment at most, for the clean-up after the newest save. Describes what saving has cost.

        Without the checkpoints if it `keeps` none. Empty if nothing was saved since a run was entered, on all workers
        but the leader, and if the run is quiet.
        """
        if self.emit.entered_at is None:
            return ""
        if (newest := self.lineage.in_flight) is not None:
            newest.request.ended.wait(_MOMENT_SECONDS)
        sums = self.totals if keeps else replace_fields(self.totals, steps_kept=0)
        return describe_cost(sums, time.monotonic() - self.emit.entered_at)

    @property
    def save_seconds(self) -> float | None:
        """The duration of the newest committed save until it was durable, without waits before it; None before one."""
        newest = self._engine.newest
        return None if newest is None else newest.blocked_seconds + newest.durable_seconds

    def follow_nonfinite(self, call: Callable[[Manifest], bool]) -> None:
        """Called, on the leader, with what hears of steps that are not finite; see `Tidier`."""
        self._engine.tidier.on_nonfinite = call

    def follow_epochs(self, find: Callable[[], int | None]) -> None:
        """Called with what counts the complete epochs, once all is restored, by a loop whose loader is not saved."""
        if counts_epochs(self.save_every):
            self.lineage.pace.follow_epochs(find)

    def wait_until_free(self) -> None:
        """**Blocks.** Waits a while if another process of this machine has the run open; called before a restore."""
        self._preparation.wait_until_free()

    def check_ready(self) -> None:
        """**Collective.** **Blocks.** Checks, once, that the objects and the directory can be saved; see
        `Preparation.check_once`. It is called before training begins."""
        peers = None if self.participant is None else self.participant.peers
        self._preparation.check_once(make_agreement(peers, self.url).run)

    def mark(self, metrics: Mapping[str, float] | None = None) -> Mark:
        """**Blocks** while it checks all arrays. Notes the current state, to be saved later.

        Raises:
            UnsupportedValueError: If an object has state that cannot be stored.
        """
        state, figures = self._engine.capture(objects_of(self.checkpoint).all()), dict(metrics or {})
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
        self._engine.note_call()
        step, metrics = check_step(step), check_metrics(metrics)
        if self.save_every is None:
            return None
        newest = self._engine.newest
        costs = (None, None) if newest is None else (newest.blocked_seconds, newest.durable_seconds)
        reason = try_plan_save(self.save_every, self.lineage.pace.moment(step, *costs), self.participant)
        if reason is None or step in self.lineage.steps:
            self._preparation.look_ahead()
            return None
        return self._save(step, metrics, metadata, reason=reason)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Stores more metrics with the step that was saved or restored last, in the background; `close` waits for it.

        Of several workers, those of rank 0 are stored.

        Raises:
            UsageError: If it is another step, or a metric is not a number.
        """
        self._calls.check_usable()
        step, (figures, _) = check_step(step), check_notes(metrics, None)
        newest, handle = self._engine.newest, self.lineage.in_flight
        known = (handle, None if newest is None else newest.name, None if self.restored is None else self.restored.name)
        found = next((one for one in known if one is not None and one.step == step == self.lineage.newest_asked), None)
        if found is None:
            raise UsageError(f"step {step} is not the one that was saved or restored last")
        if figures:
            self._engine.tidier.add_metrics(found, figures, self.lineage.origin.seen_generation)

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
        self._calls.check_usable()
        lineage, select = self.lineage, make_selection(only)
        if only is None:
            lineage.check_restore(step, is_whole=True, is_part=False)
        lineage.settle()
        if lineage.find_steps is not None:
            is_whole = select is not None and all(select(escape(name)) for name in self.checkpoint.objects)
            lineage.check_restore(self.latest_step() if step is None else step, is_whole=is_whole, is_part=True)
        check_objects(self.checkpoint.objects)
        self._advisor.begin()
        is_first = step is None and self.restored is None and lineage.newest_asked < 0
        start_from = self.options.start_from if is_first else None
        script = note_script(self.checkpoint.objects, objects_of(self.checkpoint).own)
        made_anew = check_like(like)
        restoration = restore_objects(
            self.storage,
            {**objects_of(self.checkpoint).all(), **made_anew},
            made_anew=made_anew.keys(),
            step=None if step is None else check_step(step),
            begins_anew=self.begin_anew and only is None and not lineage.steps,
            start_from=start_from,
            on_resize=self.options.on_resize,
            select=select,
            strict=strict,
            threads=self.options.threads,
            emit=self.emit,
            keeping=Keeping(script, self.checkpoint.objects, list_kept(keep_current)),
            worker=self.worker,
            named=frozenset() if self.participant is None else frozenset().union(*self.participant.named),
            agreement=make_agreement(None if self.participant is None else self.participant.peers, self.url),
            shows_progress=self.worker.is_leader,
            call=lineage.restored_by,
        )
        if restoration is None:
            self._begin_from(0)
            return None
        objects_of(self.checkpoint).put_restored(restoration.replaced)
        if only is not None:
            lineage.origin = replace_fields(lineage.origin, sources=(*lineage.origin.sources, restoration.name))
            return restoration
        self.restored = restoration
        if restoration.step == start_from:
            remove_rings(self.storage)  # What lies beyond is not repeated.
        went_back = lineage.origin.start_from if start_from is None else start_from
        sources = () if step is None else (restoration.name,)
        origin = Origin(restoration.name, restoration.seen_generation, sources, went_back, restoration.manifest.exempt)
        self._engine.leave_generation()
        lineage.note_restored(origin, restoration.step)
        self._begin_from(restoration.step)
        self.lineage.pace.begin(restoration.step)
        return restoration

    def _begin_from(self, step: int) -> None:
        """Counts training time from now on, because earlier training cannot be lost."""
        self._engine.protected_since_at = time.monotonic()
        self._advisor.enter(step)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """**Blocks.** Waits until no save is in progress.

        Raises:
            SaveFailedError: If a save failed and the failure has not been raised yet.
            DeadlineError: If it takes longer; the save continues.
        """
        self._calls.check_reentry()
        self.lineage.settle(timeout_seconds)
        if failures := self._failures.take(last=False):
            raise_newest(failures)

    def wait_copied(self, is_asked: Callable[[], bool]) -> bool:
        """**Blocks.** See `StepCopier`; True at once for a run without tiers."""
        return self._engine.tidier.wait_copied(self.timeout_seconds, is_asked)

    def steps(self) -> tuple[int, ...]:
        """**Blocks.** Returns the committed steps of the current lineage, oldest first."""
        self._engine.note_call()
        return tuple(name.step for name in StoredRun(self.storage).look().living)

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
        if self._calls.is_over:
            return
        self._calls.check_reentry()
        self.witness.end()
        while self.closing:
            self.closing.pop()()
        self.lineage.settle(timeout_seconds, self._failures.wait_closed)
        self._calls.is_closed = True
        if has_ended_well:
            self._engine.tidy()
        limit_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        self._preparation.close(limit_seconds)
        self._engine.close(limit_seconds)
        if self.participant is not None:
            self.participant.close()
        self.emit.close()
        if failures := self._failures.take(last=True):
            raise_newest(failures)

    def abandon(self) -> None:
        """Closes without waiting: a save in progress is abandoned, and the program's exit does not wait for it."""
        self._calls.is_closed, self.lineage.in_flight = True, None
        self._engine.tidier.abandon()
        self._failures.abandon()
        if self.participant is not None:
            self.participant.leave()

    def __repr__(self) -> str:
        own, busy = self._engine.newest, self.lineage.in_flight
        newest = max(self.lineage.newest, -1 if own is None else own.name.step)
        notes = ["nothing saved yet" if newest < 0 else f"newest step {newest}"]
        if busy is not None and busy.step != newest and busy.step not in self.lineage.steps:
            notes.append(f"step {busy.step} {busy.request.state}")
        notes += ["closed"] if self._calls.is_closed else []
        return f"<CheckpointManager of {self.url}: {', '.join(notes)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.closing.clear()  # The state may be that of half a step.
            self._engine.tidier.leave_copies()
        else:
            is_first, has_saved = self.restored is None and len(self.lineage.steps) > 1, self._engine.newest is not None
            assigned = objects_of(self.checkpoint).assigned
            for text in self._advisor.find_at_end(assigned, is_first=is_first, has_saved=has_saved):
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
        self._calls.check_usable()
        self._calls.caller, before = threading.get_ident(), PULSE.enter(COPY) if PULSE.is_on else NONE
        try:
            clean_metrics, clean_metadata = check_notes(metrics, metadata)
            step = check_step(step)
            protocol = None if self.participant is None else self.participant.begin(step)
            origin = self.lineage.origin
            request = SaveRequest(
                step, clean_metrics, clean_metadata, origin, asked_at, replace, reason=reason, protocol=protocol
            )
            handle = self._make_handle(request)
            try:
                self._begin(handle, captured)
            except BaseException as error:
                if self.participant is not None and protocol is not None and not request.must_end:
                    self.participant.report_failure(protocol, error)
                    # The others take this step for tried; what is due next must be the same here.
                    self.lineage.pace.note_begun_save(step)
                raise
            return handle
        finally:
            self._calls.caller = None
            if before != NONE:
                PULSE.enter(before)
            if PULSE.on_first_step is not None:
                PULSE.note_first()

    def _begin(self, handle: SaveHandle, captured: Captured | None) -> None:
        step, request, lineage = handle.step, handle.request, self.lineage
        if self.options.when_busy == "skip" and (busy := lineage.in_flight) is not None:
            self._engine.note_call()
            if busy.request.must_end and not busy.request.served.is_open:
                self._skip(request, f"the save of step {busy.step} is still in progress")
                return
        lineage.settle(None, lambda busy, _: busy.wait_served())
        before = lineage.in_flight
        request.waited_seconds = time.monotonic() - request.asked_at
        lineage.check_step(step, replace=request.replaces)
        captured = captured or self._engine.capture(objects_of(self.checkpoint).all())
        failures = self._failures.take(last=False)
        try:
            lineage.in_flight = handle
            for text in self._advisor.find_at_save(step):
                self._engine.emit_soon(Warned(text=text, by_each=True))
            if not self._preparation.has_begun:
                self._preparation.end()
            self._engine.save(handle, captured)
            lineage.newest_asked = max(step, lineage.newest_asked)
            self.lineage.pace.note_begun_save(step)
        except BaseException:
            # Also Ctrl-C ends up here: a confirmed save continues, and pending events are not lost.
            request.drop()
            self._failures.put_back(failures)
            # The storage may hold up what was written of it; the next save waits for that.
            if not request.must_end and request.ended.wait(_PARTING_SECONDS):
                lineage.in_flight = before
            raise
        if failures:
            raise_newest(failures, handle)

    def _skip(self, request: SaveRequest, reason: str) -> None:
        """Skips the save, because the previous one is still in progress."""
        request.skip(reason)
        request.ended.open()
        self._engine.emit_soon(Skipped(step=request.step, reason=reason))
        if self.participant is not None and request.protocol is not None:
            self.participant.report_left_out(request.protocol, reason)
            self.lineage.pace.note_begun_save(request.step)
