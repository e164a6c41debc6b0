"""Writes the checkpoints of one manager: its generation, and one attempt after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from holdfast.catalog import Catalog, StoredRun
from holdfast.catalog.publish import Receipts, commit, make_manifest
from holdfast.catalog.step_copier import StepCopier
from holdfast.errors import (
    ChangedError,
    FencedError,
    HoldfastError,
    NotFoundError,
    StorageError,
    StorageFullError,
)
from holdfast.events import Event, GenerationOpened, Warned
from holdfast.format.digests import seal
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    MAX_ATTEMPT,
    MAX_STEP,
    StepName,
    base_path,
    generation_path,
    metrics_name,
    parse_step_directory,
)
from holdfast.format.records import (
    MAX_GENERATION_BYTES,
    MAX_LATE_METRICS,
    Base,
    LateMetrics,
    Manifest,
    make_base,
)
from holdfast.policies import RetentionPolicy, find_modes
from holdfast.process.terminal import inform
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.handle import Origin, SaveRequest
from holdfast.save.image import Snapshot, Staging
from holdfast.save.incremental import Incremental
from holdfast.save.retention import Cleaning, Retention, Tidier
from holdfast.save.writer import FilePlan, StepFiles, digest_plan, make_index, make_receipts
from holdfast.storage.kept_images import ImageRecord
from holdfast.storage.open import nearest_of
from holdfast.storage.protocol import Storage

if TYPE_CHECKING:
    from holdfast.save.joint.protocol import CommitProtocol


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
        copier: What brings each committed step to the farther tiers of the run; None if it has none.
    """

    writes_early: bool
    compares: bool
    generation: int | None
    copier: StepCopier | None

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

    def open_files(self, snapshot: Snapshot, name: StepName, request: SaveRequest, pool: WorkerPool) -> StepFiles:
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

    def check_valid(self) -> None:
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

    def make_room(self, warn: Callable[[str], object]) -> bool:
        """**Blocks.** Called if the disk is full: removes a step that stays for a reader or a farther tier only; True
        if it did, and warned of it."""
        return False


class StepAttempt:
    """The files of one save, from their name to the commit. If the disk is full, it begins again once the save before
    is cleaned up after. Not thread-safe."""

    def __init__(
        self,
        writer: CheckpointWriter,
        request: SaveRequest,
        tidier: Tidier,
        emit: Callable[[Event], None],
    ) -> None:
        self._writer, self._request, self._tidier, self._emit = writer, request, tidier, emit
        self._files: StepFiles | None = None

    def write_behind_copy(self, staging: Staging, pool: WorkerPool) -> None:
        """**Blocks.** Writes what has been copied, until all is."""
        try:
            self._open(staging, pool).write_behind_copy(pool)
        except StorageFullError as error:
            if not (self._tidier.is_busy or self._writer.make_room(self._warn)):
                raise
            self.give_up(error)  # `write` begins again, where it may wait for room.

    def write(self, staging: Staging, pool: WorkerPool) -> Receipts:
        """**Blocks.** Writes what is left to write, and makes all of it durable."""
        while True:
            try:
                return (self._files or self._open(staging, pool)).finish(pool)
            except StorageFullError as error:
                if not (self._tidier.wait() or self._writer.make_room(self._warn)):
                    raise
                self.give_up(error)

    def commit(self, receipts: Receipts) -> Manifest | None:
        """**Blocks.** Commits what was written; returns None if another worker does."""
        name, request = self._request.name, self._request
        assert name is not None, "it was opened"
        while True:
            try:
                return self._writer.commit(receipts, name, request.metrics, request.metadata)
            except StorageFullError:
                if not (self._tidier.wait() or self._writer.make_room(self._warn)):
                    raise

    def _warn(self, text: str) -> None:
        self._emit(Warned(text=text))

    def give_up(self, error: BaseException) -> None:
        """**Blocks.** Removes what was written, as the save has failed with `error`. If this raises, that replaces it.

        If a file was missing, another job may have removed it, or the others abandoned the save: the error says so.
        """
        files, self._files = self._files, None
        try:
            if files is not None:
                files.abandon()
            if isinstance(error, NotFoundError):
                self._writer.check_valid()
        finally:
            if (name := self._request.name) is not None:
                try:
                    self._writer.give_up(name)
                except HoldfastError as left:
                    self._emit(make_debris_warning(name, left))

    def _open(self, staging: Staging, pool: WorkerPool) -> StepFiles:
        if not self._writer.writes_early:
            self._tidier.wait()
        if self._request.name is None:
            name, base = self._writer.open(self._request.origin, self._request.step)
            if base is not None:
                self._emit(GenerationOpened(generation=base.generation, base_step=base.step))
            self._request.name = name
            self._request.named.open()
        self._files = self._writer.open_files(staging.snapshot, self._request.name, self._request, pool)
        return self._files


def make_debris_warning(name: StepName, error: HoldfastError) -> Warned:
    """**Pure.** Returns a warning that a failed attempt could not be removed: the next save removes it."""
    return Warned(text=f"the files of an unfinished save in {name.directory} could not be removed: {error}")


class RunWriter(CheckpointWriter):
    """Writes checkpoints of one generation, one after the other: a `CheckpointWriter` for one worker alone.

    Not thread-safe, except that `clean` and a save may go on at the same time, as `CheckpointWriter` says.

    Attributes:
        base: The base of the generation that was opened here, or None.
        recycler: Recycles the data file of a removed checkpoint; the owner of this closes it.
    """

    compares = False

    def __init__(
        self,
        storage: Storage,
        keep: RetentionPolicy,
        *,
        incremental: bool = False,
        reuse_space: bool = True,
        copier: StepCopier | None = None,
    ) -> None:
        """`storage` may have tiers, whose nearest is written to; the `copier` brings each step to the others."""
        # What generations are opened in, and what is saved into: the same, but for tiers.
        self._whole = StoredRun(storage)
        self.copier = copier
        self.generation: int | None = None
        self.base: Base | None = None
        # By this it knows an opening of its own that has failed half-way.
        self._token = os.urandom(16).hex()
        self._best = find_modes(keep)
        self._run = self._whole if copier is None else StoredRun(nearest_of(storage))
        self._retention = Retention(
            self._run,
            keep,
            self._token,
            incremental=incremental,
            reuse_space=reuse_space,
            find_needed=None if copier is None else copier.find_needed,
        )
        self.recycler = self._retention.recycler
        # The newest attempt that was named here, if any: it may be written while the save before is cleaned up after.
        self._attempts: tuple[StepName, ...] = ()
        # No later step than this was named in this generation, and no attempt with a higher number.
        self._named = (-1, 0)
        # Attempts of which it is not known whether they are committed, or will be: a put may still be on its way.
        self._undecided: frozenset[StepName] = frozenset()
        self._incremental = Incremental(self._run) if incremental else None
        # The leaves that were not finite in the run's first checkpoint; None before there is one.
        self.exempt: frozenset[str] | None = None
        # What refers to earlier steps has to know which of them stay, and all that has changed. An image in memory is
        # to be whole before the first byte is written.
        self.writes_early = not incremental and (copier is None or not copier.keeps_images)

    def leave_generation(self) -> None:
        """See `CheckpointWriter`."""
        self.generation = None

    def open(self, origin: Origin, step: int, busy: Collection[StepName] = ()) -> tuple[StepName, Base | None]:
        """**Blocks.** Opens a generation if there is none yet, checks that it is the newest, and names an attempt.

        A crash between the opening and its base leaves a generation that saved nothing, and does not change the
        lineage. Once the base is recorded, the remains of unfinished saves of older generations are removed, unless
        they are `busy`: a job that dies repeatedly in its first save would fill the disk with them.

        Raises:
            FencedError: If another job has opened a newer one since; or one since this job restored, which would be
                left out if this job continued from its state; or if another job has removed that state since.
            StorageError: If the storage fails, or the run was moved or removed since.
            UsageError: If another process of this machine has the run open, and does not leave it soon.
        """
        base = None
        if self.generation is None:
            self.recycler.lock.take(inform)
            self.align()
            whole = self._whole
            whole.check_unpassed(origin.seen_generation, self._token)
            before = self._keep_lost()
            if origin.base not in before.committed:
                whole.check_base(origin.base)
            generation = self._open_generation(origin.seen_generation)
            # Those that are fenced now remove no step that they have not removed yet.
            whole.check_base(origin.base)
            self._retention.begin(generation)
            base = make_base(generation, origin.base, origin.start_from)
            whole.record_base(base)
            self.generation, self.base, self._named = generation, base, (-1, 0)
            if self.copier is not None:
                self.copier.note_generation(generation, self._token)
            self.exempt = origin.exempt
            self.recycler.lock.take(inform)  # A new run has its directory now.
            if self._incremental is not None:
                self._incremental.begin(origin.base)
        self.check_valid()
        if base is not None and (before.unfinished or before.trash):
            self._retention.make_room(self.generation, {*busy, *self._undecided})
        return self._name_attempt(step, self.generation), base

    def _open_generation(self, seen: int) -> int:
        if self.copier is None:
            return self._run.open_generation(self._token, seen_generation=seen, best=self._best)
        for is_last in (False, True):
            least = self.copier.find_least()
            try:
                return self._whole.open_generation(self._token, seen_generation=seen, best=self._best, least=least)
            except StorageError:
                # If the farthest tier has gone out of reach just now, the next number is one without it.
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def align(self) -> None:
        """**Blocks.** Makes all tiers know the same generations; see `Tiers.align`."""
        if self.copier is not None:
            self.copier.align()

    def read_records(self, generation: int) -> dict[str, str]:
        """**Blocks.** Returns the records of a generation that was opened here, by path."""
        paths = (generation_path(generation), base_path(generation))
        return {path: self._run.storage.read(path, MAX_GENERATION_BYTES).decode() for path in paths}

    def take_records(self, records: Mapping[str, str]) -> None:
        """**Blocks.** Puts the records of the leader's generation into a tier of this worker's own."""
        if records:
            self.align()
            self._run.storage.make_directory(GENERATIONS_DIRECTORY)
        for path, record in records.items():
            self._run.storage.publish(path, record.encode())

    def make_room(self, warn: Callable[[str], object]) -> bool:
        """See `CheckpointWriter`. The newest step is never among them."""
        if (found := self._retention.remove_spared()) is None:
            return False
        name, is_needed = found
        if is_needed and self.copier is not None:
            self.copier.give_up(name)
        else:
            warn(f"the disk is full: step {name.step} was removed, although a reader had a lease")
        return True

    def _keep_lost(self) -> Catalog:
        """Marks steps of older runs that have lost their manifests: later saves would take them for unfinished."""
        catalog = self._whole.look()
        for name in self._whole.find_lost(catalog):
            if name not in catalog.lost and self._run.step(name).has_data():
                self._run.storage.write(name.committed_path, b"")
                self._run.storage.sync_directory(name.directory)
        return catalog

    def follow(self, generation: int, origin: StepName | None, exempt: frozenset[str] | None = None) -> None:
        """Continues with a generation that the leader of the job has opened from that step, or from the beginning.

        What was not finite in the run's first checkpoint is `exempt`.
        """
        self.exempt = exempt
        self.generation, self._token = generation, self._run.opening(generation).token
        self._named = (MAX_STEP, self._named[1])
        if self.copier is not None:
            self.copier.note_generation(generation, self._token)
        if self._incremental is not None:
            self._incremental.begin(origin)

    def _name_attempt(self, step: int, generation: int) -> StepName:
        """**Blocks.** Returns a name that no directory has, and that no removed directory had: a late request, or a
        worker that was thought dead, may still write there."""
        taken = [0]
        # All directories of this generation are named here, so a later step than all before has none.
        if step <= self._named[0]:
            known = self._incremental.list_known() if self._incremental is not None else ()
            names = (*known, *(parse_step_directory(entry.name) for entry in self._run.storage.list("")))
            taken = [name.attempt for name in names if name and (name.step, name.generation) == (step, generation)]
            taken.append(self._named[1])
        attempt = max(taken) + 1
        self._named = max(self._named[0], step), max(self._named[1], attempt)
        if attempt > MAX_ATTEMPT:
            raise StorageError(
                f"{self._run.storage.url}: no attempt at step {step} can follow number {MAX_ATTEMPT}",
                hint="A directory there has a number that no job gave it; remove it.",
            )
        name = StepName(step, generation, attempt)
        self._attempts = (name,)
        return name

    def open_files(
        self,
        snapshot: Snapshot,
        name: StepName,
        request: SaveRequest,
        pool: WorkerPool,
        make_part: Callable[[Receipts], bytes] | None = None,
    ) -> StepFiles:
        """See `CheckpointWriter`. Of several workers, `make_part` makes this worker's report to the leader."""
        if self.copier is not None and self.copier.keeps_images:
            plan = self._keep_image(self.copier, snapshot, name, request, digest_plan(snapshot, pool), make_part)
            return StepFiles(snapshot, self._run.storage, name, plan)
        if self._incremental is None:
            return StepFiles(snapshot, self._run.storage, name)
        plan = self._incremental.plan(snapshot, name, pool, self._retention.find_wanted(name, request.metrics))
        return StepFiles(snapshot, self._run.storage, name, plan, self._incremental.note_written)

    def commit(
        self, receipts: Receipts, name: StepName, metrics: Mapping[str, float], metadata: Mapping[str, Any]
    ) -> Manifest:
        """See `CheckpointWriter`."""
        if not self._run.storage.traits.has_directories:
            self._undecided |= {name}
        manifest = make_manifest(receipts, name, metrics=metrics, metadata=metadata, exempt=self.exempt)
        try:
            commit(self._run, manifest, token=self._token)
        except StorageError as error:
            if isinstance(error, NotFoundError) or self.copier is not None:
                self.check_valid()
            raise
        self._undecided -= {name}
        if self.exempt is None:
            self.exempt = frozenset(() if manifest.nonfinite is None else manifest.nonfinite.exempt)
        if self._incremental is not None:
            self._incremental.mark_committed()
        return manifest

    def _keep_image(
        self,
        copier: StepCopier,
        snapshot: Snapshot,
        name: StepName,
        request: SaveRequest,
        plan: FilePlan,
        make_part: Callable[[Receipts], bytes] | None,
    ) -> FilePlan:
        """Says that the image of a snapshot, in memory that outlives this process, is whole; returns the plan with its
        index."""
        index = make_index(snapshot, plan.layout, name, plan.spans or ())
        data = seal(index)
        receipts = make_receipts(index, data, snapshot.state.loose, plan.nonfinite)
        record = ImageRecord(
            step=name.step,
            generation=name.generation,
            attempt=name.attempt,
            rank=index.rank,
            world_size=index.world_size,
            data_bytes=index.data_bytes,
            index=data,
            opening=self._run.storage.read(generation_path(name.generation), MAX_GENERATION_BYTES),
            part=b"" if make_part is None else make_part(receipts),
            metrics=dict(request.metrics),
            metadata=dict(request.metadata),
            exempt=None if self.exempt is None else tuple(sorted(self.exempt)),
        )
        if make_part is None:
            manifest = make_manifest(
                receipts, name, metrics=request.metrics, metadata=request.metadata, exempt=self.exempt
            )
            record = msgspec.structs.replace(record, manifest=seal(manifest))
        copier.keep_image(record)
        return msgspec.structs.replace(plan, index=index)

    def note_committed(self, exempt: frozenset[str]) -> None:
        """Called when the last written step is committed, by the leader of the job, with what it exempts here."""
        if self.exempt is None:
            self.exempt = exempt
        if self._incremental is not None:
            self._incremental.mark_committed()

    def add_metrics(self, name: StepName, metrics: Mapping[str, float], seen_generation: int) -> None:
        """See `CheckpointWriter`. A newer job may have removed the step."""
        self._run.check_fence(self.generation or seen_generation)
        manifest = self._run.step(name).manifest()
        record = seal(LateMetrics(manifest.token, dict(metrics)))
        paths = (f"{name.directory}/{metrics_name(number)}" for number in range(MAX_LATE_METRICS))
        if not any(self._run.storage.publish(path, record) for path in paths):
            raise StorageError(f"{name.directory} has too many records of metrics", path=name.directory)
        self._run.history.note(name, msgspec.structs.replace(manifest, metrics={**manifest.metrics, **metrics}).facts)
        if self.copier is not None:
            self.copier.note_metrics(name)

    def fail(self, error: BaseException) -> None:
        """See `CheckpointWriter`. What was fenced, or has changed while it was copied, is not to be restored."""
        if isinstance(error, FencedError | ChangedError):
            self.forget_image()

    def forget_image(self) -> None:
        """Called when the image of the save, if there is one, is not to be restored."""
        if self.copier is not None and self._attempts:
            self.copier.forget_image(self._attempts[0])

    def check_valid(self) -> None:
        """See `CheckpointWriter`: if a file of this job's is gone, another job may have removed it, or the run."""
        if self.copier is not None:
            self.copier.check()
        if self.generation is not None:
            self._run.check_owned(self.generation, self._token)

    def give_up(self, name: StepName) -> None:
        """See `CheckpointWriter`; if this fails, the next save removes it.

        Where a manifest may still arrive, its data stay for it, until the next generation removes what is left.
        """
        # Not with the history, which `clean` may be using.
        if name not in self._undecided and name in StoredRun(self._run.storage).look().unfinished:
            self._run.step(name).discard()

    def clean(
        self,
        newest: StepName,
        protected: Mapping[StepName, str],
        manifest: Manifest | None = None,
        busy: Collection[StepName] = (),
    ) -> Cleaning:
        """See `CheckpointWriter`. Others may still be writing to unfinished steps that are `busy`, and this worker to
        the next one."""
        return self._retention.clean(newest, protected, manifest, lambda: {*busy, *self._attempts, *self._undecided})
