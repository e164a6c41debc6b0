"""Writes the checkpoints of one manager: its generation, its base, and what it has committed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.catalog import Catalog, StoredRun
from holdfast.catalog.deletion import FileRecycler, sweep
from holdfast.catalog.publish import Receipts, commit
from holdfast.catalog.summary import FEW, Summarizer
from holdfast.errors import FencedError, HoldfastError, NotFoundError, StorageError
from holdfast.events import Warned
from holdfast.format.digests import seal
from holdfast.format.names import MAX_ATTEMPT, MAX_STEP, StepName, metrics_name, parse_step_directory
from holdfast.format.records import MAX_LATE_METRICS, Base, LateMetrics, Manifest, make_base
from holdfast.policies import KeptCandidate, RetentionPolicy, absent_metrics, plan_retention
from holdfast.process.terminal import inform
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.image import Staging
from holdfast.save.incremental import Incremental, IncrementalStepFiles
from holdfast.save.records import Origin, Snapshot
from holdfast.save.writer import WholeStepFiles
from holdfast.storage.protocol import Storage

if TYPE_CHECKING:
    from holdfast.save.joint.protocol import CommitProtocol


class Cleaning(msgspec.Struct, frozen=True):
    """The outcome of the cleanup after a commit.

    Attributes:
        kept: For each step that was kept, the reason.
        removed: The committed steps that were removed.
        swept: The directories of unfinished saves that were removed.
        problems: The files that could not be removed, and why.
        absent: Metrics that the policy needs and none of several checkpoints has.
        reported: The metrics that the checkpoints have.
        lost: Committed steps that have lost their manifests. Their data is kept.
        hindrance: What makes saves slower than they could be; see `Traits`.
    """

    kept: dict[StepName, str]
    removed: tuple[StepName, ...]
    swept: tuple[str, ...]
    problems: tuple[HoldfastError, ...]
    absent: tuple[str, ...]
    reported: tuple[str, ...]
    lost: tuple[StepName, ...] = ()
    hindrance: str = ""


class StepFiles(Protocol):
    """One worker's files of one step in progress. Not thread-safe."""

    def write_behind_copy(self, pool: WorkerPool) -> None:
        """**Blocks.** Writes what has been copied, until all is; nothing if that is not possible."""
        ...

    def finish(self, pool: WorkerPool) -> Receipts:
        """**Blocks.** Writes the rest, and makes all of it durable."""
        ...

    def abandon(self) -> None:
        """Closes what is open; may be repeated, and follow `finish`."""
        ...


class CheckpointWriter(Protocol):
    """Writes the checkpoints of a run: by one worker alone, or by several together. Not thread-safe.

    A save calls `digest` before training continues, and then the others in this order; `give_up` and `fail` after an
    error, and `finish` in any case. `clean` comes after a commit, in another thread, and may go on during the next
    save. Each method may raise errors of the storage and of the other workers.

    Attributes:
        writes_early: True if files may be opened before the save is confirmed, while the state is still being copied,
            and while `clean` has not returned yet.
        compares: True if the next save compares replicated state.
        generation: The generation that is written, or None before the first save.
    """

    writes_early: bool
    compares: bool
    generation: int | None

    def digest(self, staging: Staging, pool: WorkerPool) -> tuple[str, ...]:
        """**Blocks.** Returns digests of the values that are to be compared with those of other workers."""
        return ()

    def begin(self, protocol: CommitProtocol | None) -> None:
        """Called when training has confirmed the save; `protocol` is the workers' communication about it."""
        return

    def open(self, origin: Origin, step: int) -> tuple[StepName, Base | None]:
        """**Blocks.** Returns the name of the next attempt at a step, and the base of the generation if this opened
        it."""
        ...

    def open_files(self, snapshot: Snapshot, name: StepName, metrics: Mapping[str, float]) -> StepFiles:
        """**Blocks.** Creates the files that this worker writes of a step."""
        ...

    def commit(
        self, receipts: Receipts, name: StepName, metrics: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> Manifest | None:
        """**Blocks.** Commits what was written; returns None if another worker does, which also calls `clean`."""
        ...

    def clean(
        self, newest: StepName, protected: Mapping[StepName, str], manifest: Manifest | None = None
    ) -> Cleaning | None:
        """**Blocks.** Removes checkpoints that are not kept; None if another worker does that.

        `manifest` is that of the newest one if it has just been committed.
        """
        ...

    def add_metrics(self, name: StepName, metrics: Mapping[str, float], seen_generation: int) -> None:
        """**Blocks.** Stores metrics of a committed step, in the thread of `clean`; of a `seen_generation` if none was
        opened here."""
        ...

    def check_standing(self) -> None:
        """**Blocks.** Raises if another job has taken over, or the other workers have ended the save."""
        ...

    def give_up(self, name: StepName) -> None:
        """**Blocks.** Called when an attempt has failed: removes its files, as soon as no worker writes to them."""
        ...

    def fail(self, error: BaseException) -> None:
        """**Blocks.** Called when the save has failed here, or is skipped."""
        return

    def finish(self) -> None:
        """**Blocks.** Ends every save."""
        return

    def leave_generation(self) -> None:
        """Called when training continues from another state: the next save opens a generation of its own."""
        ...


class RunWriter(CheckpointWriter):
    """Writes checkpoints of one generation, one after the other: a `CheckpointWriter` for one worker alone.

    Not thread-safe, except that `clean` and a save may go on at the same time, as `CheckpointWriter` says.

    Attributes:
        base: The base of the generation that was opened here, or None.
        recycler: Recycles the data file of a removed checkpoint; the owner of this closes it.
    """

    compares = False

    def __init__(
        self, storage: Storage, keep: RetentionPolicy, *, incremental: bool = False, reuse_space: bool = True
    ) -> None:
        self._storage = storage
        self._keep = keep
        self.generation: int | None = None
        self.base: Base | None = None
        # By this it knows an opening of its own that has failed half-way.
        self._token = os.urandom(16).hex()
        self._run = StoredRun(storage)
        self._summarizer = Summarizer(self._run, self._token)
        # The newest attempt that was named here, if any: it may be written while the save before is cleaned up after.
        self._attempts: tuple[StepName, ...] = ()
        # No later step than this was named in this generation.
        self._named_step = -1
        # Whether what older generations had left has been removed, as far as it was there when this one began.
        self._has_swept = False
        self.recycler = FileRecycler(storage, reuse=reuse_space)
        self._incremental = Incremental(self._run) if incremental else None
        # What refers to earlier steps has to know which of them stay, and all that has changed.
        self.writes_early = not incremental

    def leave_generation(self) -> None:
        """See `CheckpointWriter`."""
        self.generation = None

    def open(
        self, origin: Origin, step: int, busy: Collection[StepName] = (), least_attempt: int = 1
    ) -> tuple[StepName, Base | None]:
        """**Blocks.** Opens a generation if there is none yet, checks that it is the newest, and names an attempt.

        A crash between the opening and its base leaves a generation that saved nothing, and does not change the
        lineage. Once the base is recorded, the remains of unfinished saves of older generations are removed, unless
        they are `busy`: a job that dies repeatedly in its first save would fill the disk with them.

        Raises:
            FencedError: If another job has opened a newer one since; or one since this job restored, which would be
                left out if this job continued from its state.
            StorageError: If the storage fails, or the run was moved or removed since.
            UsageError: If another process of this machine has the run open, and does not leave it soon.
        """
        base = None
        if self.generation is None:
            self.recycler.lock.take(inform)
            self._run.check_unpassed(origin.seen_generation, self._token)
            before = self._keep_lost()
            generation = self._run.open_generation(self._token, seen_generation=origin.seen_generation)
            if self._run.history.summary is not None:
                self._summarizer.carry_over(generation)
            base = make_base(generation, origin.base, origin.start_from)
            self._run.record_base(base)
            self.generation, self.base, self._has_swept, self._named_step = generation, base, False, -1
            self.recycler.begin(generation)
            self.recycler.lock.take(inform)  # A new run has its directory now.
            if self._incremental is not None:
                self._incremental.begin(origin.base)
        self.check_standing()
        if base is not None and (before.unfinished or before.trash):
            self._make_room(busy)
        return self._name_attempt(step, self.generation, least_attempt), base

    def _keep_lost(self) -> Catalog:
        """Marks steps of older runs that have lost their manifests: later saves would take them for unfinished."""
        catalog = self._run.look()
        for name in self._run.find_lost(catalog):
            if name not in catalog.lost:
                self._storage.write(name.committed_path, b"")
                self._storage.sync_directory(name.directory)
        return catalog

    def _make_room(self, busy: Collection[StepName]) -> None:
        """Removes the remains of unfinished saves of older generations. They are fenced, so no job can commit them any
        more.

        A failure here does not fail the save: the sweep after its commit tries again, and reports it.
        """
        with suppress(HoldfastError):
            # Looked at again: an older job may have committed a step while this generation was opened.
            catalog = self._run.look()
            referrers = self._run.history.referrers((*catalog.committed, *catalog.lost))
            referred = {name for referrer in referrers for name in referrer.refers_to}
            self._sweep(catalog, referred.union(busy))

    def follow(self, generation: int, origin: StepName | None) -> None:
        """Continues with a generation that the leader of the job has opened from that step, or from the beginning."""
        self.generation, self._token = generation, self._run.opening(generation).token
        self._named_step = MAX_STEP
        if self._incremental is not None:
            self._incremental.begin(origin)

    def _name_attempt(self, step: int, generation: int, least_attempt: int) -> StepName:
        """**Blocks.** Returns a name that no directory has, and that no removed directory had."""
        taken: list[int] = []
        # All directories of this generation are named here, so a later step than all before has none.
        if step <= self._named_step:
            known = self._incremental.list_known() if self._incremental is not None else ()
            names = (*known, *(parse_step_directory(entry.name) for entry in self._storage.list("")))
            taken = [name.attempt for name in names if name and (name.step, name.generation) == (step, generation)]
        self._named_step = max(self._named_step, step)
        attempt = max(least_attempt, max(taken, default=0) + 1)
        if attempt > MAX_ATTEMPT:
            raise StorageError(
                f"{self._storage.url}: no attempt at step {step} can follow number {MAX_ATTEMPT}",
                hint="A directory there has a number that no job gave it; remove it.",
            )
        name = StepName(step, generation, attempt)
        self._attempts = (name,)
        return name

    def open_files(self, snapshot: Snapshot, name: StepName, metrics: Mapping[str, float]) -> StepFiles:
        """See `CheckpointWriter`."""
        if self._incremental is None:
            return WholeStepFiles(snapshot, self._storage, name)
        return IncrementalStepFiles(self._incremental, snapshot, name, self._find_wanted(name, metrics))

    def commit(
        self, receipts: Receipts, name: StepName, metrics: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> Manifest:
        """See `CheckpointWriter`."""
        try:
            manifest = commit(self._run, receipts, name, token=self._token, metrics=metrics, metadata=metadata)
        except NotFoundError:
            self.check_standing()
            raise
        self.note_committed()
        return manifest

    def note_committed(self) -> None:
        """Called when the last written step is committed."""
        if self._incremental is not None:
            self._incremental.mark_committed()

    def add_metrics(self, name: StepName, metrics: Mapping[str, float], seen_generation: int) -> None:
        """See `CheckpointWriter`. A newer job may have removed the step."""
        self._run.check_fence(self.generation or seen_generation)
        manifest = self._run.step(name).manifest()
        record = seal(LateMetrics(manifest.token, dict(metrics)))
        paths = (f"{name.directory}/{metrics_name(number)}" for number in range(MAX_LATE_METRICS))
        if not any(self._storage.publish(path, record) for path in paths):
            raise StorageError(f"{name.directory} has too many records of metrics", path=name.directory)
        self._run.history.note(name, msgspec.structs.replace(manifest, metrics={**manifest.metrics, **metrics}).facts)

    def check_standing(self) -> None:
        """See `CheckpointWriter`: if a file of this job's is gone, another job may have removed it, or the run."""
        if self.generation is not None:
            self._run.check_fence(self.generation)
            self._run.check_in_place(self.generation, self._token)

    def give_up(self, name: StepName) -> None:
        """See `CheckpointWriter`; if this fails, the next save removes it."""
        # Not with the history, which `clean` may be using.
        if name in StoredRun(self._storage).look().unfinished:
            self._run.step(name).discard()

    def clean(
        self,
        newest: StepName,
        protected: Mapping[StepName, str],
        manifest: Manifest | None = None,
        busy: Collection[StepName] = (),
    ) -> Cleaning:
        """**Blocks.** Removes what the retention policy gives up, and the remains of earlier saves.

        Only the current lineage is considered; other steps stay until a person prunes them. A step to which a kept step
        refers stays too, in the lineage or not. A generation that was fenced removes nothing, and raises `FencedError`.
        Others may still be writing to unfinished steps that are `busy`, and this worker to the next one.
        """
        # It may have been given metrics since; those are known.
        if manifest is not None and newest not in self._run.history.known:
            self._run.history.note(newest, manifest.facts)
        catalog = self._run.look()
        self._run.check_fence(newest.generation, self._run.history.opened)
        # Looked at after that: an attempt is named before it has a directory.
        in_use = {*busy, *self._attempts}
        # A step that is being published may be seen before it survives a power cut: it replaces none yet.
        known = self._run.history.candidates(catalog.living)
        candidates = [one for one in known if one.key == newest or one.key not in in_use]
        problems: list[HoldfastError] = []
        absent = absent_metrics(self._keep, candidates) if len(candidates) > 1 else ()
        reported = tuple(sorted({metric for each in candidates for metric in each.metrics})) if absent else ()
        referrers = self._run.history.referrers((*catalog.committed, *catalog.lost))
        replaced: list[StepName] = []
        if others := set(catalog.committed).difference(catalog.living, protected):
            own = {name.step for name in catalog.living if name.generation == newest.generation}
            replaced = sorted(name for name in others if name.generation == newest.generation and name.step in own)
        plan = plan_retention(self._keep, candidates, protected, time.time(), referrers, replaced)
        newest_bytes = max(worker.data_bytes for worker in manifest.workers) if manifest else 0
        if manifest is not None:
            # A copy says that the step was committed if the manifest is lost. A crash before this leaves a step that
            # counts as any other; only that loss is not noticed then.
            try:
                self._storage.write(newest.committed_path, seal(manifest))
            except HoldfastError:
                self._has_swept = False  # It is tried again below, when something is removed, and after each save.
        is_long = self._run.history.summary or len(catalog.committed) > FEW or len(self._run.history.opened) > FEW
        removed: list[StepName] = []
        try:
            going = plan.remove
            if is_long and going:
                going = self._summarizer.release(going, catalog, newest.generation)
            if going:
                removed = self._remove(going, newest_bytes, problems)
        except FencedError:
            raise
        except HoldfastError as error:
            problems.append(error)
        referred = {name for referrer in referrers if referrer.key not in removed for name in referrer.refers_to}
        if catalog.spare_bytes is not None:
            try:
                self.recycler.sweep(newest_bytes)
            except HoldfastError as error:
                problems.append(error)
        swept: list[str] = []
        if catalog.unfinished or catalog.trash or not self._has_swept:
            swept, left = self._sweep(catalog, referred | in_use)
            if not self._has_swept:
                # Those of a summary are not looked into: there may be thousands.
                stay = set(catalog.committed).difference(removed, self._run.history.believed, in_use - {newest})
                for name in sorted(stay):
                    try:
                        self._run.step(name).renew_copy()
                    except HoldfastError as error:
                        left.append(error)
            problems += left
            self._has_swept = not left
        if is_long:
            # Whether or not they are gone: some may be half removed.
            self._summarizer.update(catalog, plan.remove, newest.generation)
        self._run.history.forget_all_but(set(catalog.committed) - set(removed))
        return Cleaning(
            dict(plan.keep),
            tuple(removed),
            tuple(swept),
            tuple(problems),
            absent,
            reported,
            catalog.lost,
            self._storage.traits.hindrance,
        )

    def _find_wanted(self, name: StepName, metrics: Mapping[str, float]) -> Collection[StepName]:
        """Returns the steps that the policy will keep for their own sake when a save is committed."""
        now_seconds = time.time()
        known = self._run.history.candidates(self._run.look().living)
        before = [one for one in known if one.step < name.step]
        try:
            return self._keep.choose_kept([*before, KeptCandidate(name, name.step, now_seconds, metrics)], now_seconds)
        except Exception:  # noqa: BLE001  A policy of the user's own may fail; that is reported after the commit.
            return ()

    def _remove(self, names: Collection[StepName], newest_bytes: int, problems: list[HoldfastError]) -> list[StepName]:
        """Removes committed steps: first all their manifests, then, if this generation still counts, their data."""
        withdrawn: list[StepName] = []
        needed: set[StepName] = set()
        # Newest first: what refers to others goes before them. If it cannot be removed, neither can they.
        for name in sorted(set(names), reverse=True):
            if name not in needed:
                try:
                    self._run.step(name).withdraw()
                    withdrawn.append(name)
                except HoldfastError as error:
                    problems.append(error)
                    needed |= self._run.history.kept_with(name)
        if withdrawn and self.generation is not None:
            # A newer job may have begun since, and refer to them: it sees that they are gone, or is seen here.
            self._run.check_fence(self.generation)
        removed: list[StepName] = []
        for name in reversed(withdrawn):
            try:
                self.recycler.discard_withdrawn(name.directory, newest_bytes)
                removed.append(name)
            except HoldfastError as error:
                problems.append(error)
        return removed

    def _sweep(self, catalog: Catalog, kept: Collection[StepName]) -> tuple[list[str], list[HoldfastError]]:
        """Removes unfinished steps of this and older generations, except those that are needed."""
        newest = self.generation
        unfinished = [
            name for name in catalog.unfinished if newest is not None and name.generation <= newest and name not in kept
        ]
        return sweep(self._run, unfinished, catalog.trash, newest or 0)


def make_debris_warning(name: StepName, error: HoldfastError) -> Warned:
    """**Pure.** Returns a warning that a failed attempt could not be removed: the next save removes it."""
    return Warned(text=f"the files of an unfinished save in {name.directory} could not be removed: {error}")
