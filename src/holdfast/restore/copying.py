"""Copies committed steps into another storage: every byte is checked as it passes, and the manifest appears last.

A copied step has the same name, files and bytes in both places, and the records of its generation go with it. So the
destination is the same run: a job can continue there, and a later copy finds what is there already.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Final, NamedTuple

from msgspec.structs import replace

from holdfast.catalog import RunLock, StoredRun, make_lost_error
from holdfast.catalog.publish import check_references
from holdfast.catalog.survey import Found, State, find_misfits, look_at_step
from holdfast.errors import DamageError, FencedError, NotFoundError, StorageError, StorageFullError, UsageError
from holdfast.format.digests import digest, unseal
from holdfast.format.index import Index
from holdfast.format.names import StepName, base_path, data_name, generation_path, index_name, metrics_name
from holdfast.format.records import (
    MAX_GENERATION_BYTES,
    MAX_LATE_METRICS,
    MAX_MANIFEST_BYTES,
    Manifest,
    Opening,
    decode_base,
    decode_manifest,
)
from holdfast.process.progress import show_progress
from holdfast.restore.read import Piece, find_damages, open_pool, plan_pieces
from holdfast.restore.records import OpenedStep, Part
from holdfast.restore.verify import open_step, read_rank, verify_data
from holdfast.storage.buffers import Scratch
from holdfast.storage.checks import choose_piece_bytes
from holdfast.storage.protocol import FileWriter, Storage

_THREADS: Final = 4
_PAGE_BYTES: Final = 4096


class CopyOutcome(enum.StrEnum):
    """Outcome of copying one step."""

    COPIED = "copied"
    THERE = "there"
    """It was in the destination already."""
    DAMAGED = "damaged"
    """It is not whole in the source, or the destination has another one of that name."""
    REMOVED = "removed"
    """A job removed it from the source meanwhile."""


class CopiedStep(NamedTuple):
    """One step, its outcome, how many bytes were copied, and the damage."""

    name: StepName
    outcome: CopyOutcome
    size_bytes: int = 0
    problem: DamageError | None = None


def copy_steps(
    source: StoredRun, goal: Storage, chosen: Iterable[StepName], newest: int | None = None
) -> Iterator[CopiedStep]:
    """**Blocks.** Copies steps and those to which they refer; yields each as soon as it is done. Shows a progress bar.

    Args:
        source: The run with the steps.
        goal: The destination.
        chosen: The steps.
        newest: A generation that is to be the newest one in the destination, even if no step is of it.

    Raises:
        NoWholeCheckpointError: If a step is needed that has lost its manifest.
        UsageError: If the destination is another run, or a process of this machine has it open.
        StorageError: If a storage fails, or a job has begun to save in the destination.
    """
    names = _add_needed(source, chosen)
    more = [] if newest is None else [newest]
    copier = RunCopier(source, goal)
    copier.open([*(name.generation for name in names), *more])
    damaged: set[StepName] = set()
    for number, name in enumerate(names, start=1):
        label = f"step {name.step}" + (f" ({number} of {len(names)})" if len(names) > 1 else "")
        try:
            if lacking := sorted(damaged & source.history.kept_with(name)):
                raise DamageError(
                    f"step {name.step} refers to step {lacking[0].step}, which is damaged", step=name.step
                )
            with show_progress(label) as bar:
                size_bytes = copier.copy(name, expect=bar.expect, progress=bar.advance)
        except (DamageError, NotFoundError) as error:
            if not source.step(name).is_committed():
                yield CopiedStep(name, CopyOutcome.REMOVED)
            elif isinstance(error, NotFoundError):
                raise
            else:
                damaged.add(name)
                yield CopiedStep(name, CopyOutcome.DAMAGED, problem=error)
        else:
            outcome = CopyOutcome.THERE if size_bytes is None else CopyOutcome.COPIED
            yield CopiedStep(name, outcome, size_bytes or 0)
    for generation in more:
        copier.record_base(generation)


def _add_needed(run: StoredRun, names: Iterable[StepName]) -> list[StepName]:
    """**Blocks.** Returns some steps and all to which they refer, in order: each comes after those that it needs.

    Raises:
        NoWholeCheckpointError: If one of those has lost its manifest.
    """
    chosen = set(names)
    needed = {name for one in chosen for name in run.history.kept_with(one)}
    if lost := sorted(name for name in needed - chosen if not run.step(name).is_committed()):
        raise make_lost_error(lost, run.url)
    return sorted(chosen | needed, key=lambda name: (name.generation, name.step, name.attempt))


class RunCopier:
    """Copies steps from one run to the same run in another place. Not thread-safe.

    A crash at any point leaves whole steps, and at most one without a manifest, which the next copy completes.
    """

    def __init__(
        self,
        source: StoredRun,
        goal: Storage,
        takes: Callable[[int], bool] | None = None,
        owner: tuple[int, str] | None = None,
    ) -> None:
        """Reads nothing yet; `source` has the steps, and `goal` gets them.

        With `takes`, other workers of the job copy there at the same time: this one takes the files of some ranks, as
        far as the source has them, leaves others alone, and publishes the manifest if it finds all of them there.
        The `owner` is the generation of a job that saves in the source, and its token: once a newer one is there, the
        copy ends, and nothing more is removed.
        """
        self._source, self._goal, self._takes, self._owner = source, StoredRun(goal), takes, owner
        self._lock = RunLock(goal)
        # The newest generation there, which no other may follow while this copies; and its token.
        self._generation, self._token = 0, ""
        self._scratch = Scratch()

    def open(self, generations: Iterable[int]) -> None:
        """**Blocks.** Checks that the destination is the same run or a new one, and opens generations there.

        Raises:
            UsageError: If it is another run, or a job has continued there; or a process of this machine has it open.
            StorageError: If a storage fails.
        """
        source, goal = self._source, self._goal
        if self._takes is None:
            self._lock.take()
        self._check_same()
        for generation in sorted(set(generations)):
            path = generation_path(generation)
            try:
                data = source.storage.read(path, MAX_GENERATION_BYTES)
            except NotFoundError:
                continue
            token = unseal(Opening, data, path=path).token
            goal.storage.make_directory(path.rpartition("/")[0])
            if not goal.storage.publish(path, data) and goal.opening(generation).token != token:
                raise self._other_run(generation)
        if self._owner is not None:
            self._generation, self._token = self._owner
        else:
            self._generation = max(goal.list_generations(), default=0)
            self._token = goal.opening(self._generation).token if self._generation else ""
        if self._takes is None:
            self._lock.take()  # A new run has its directory now.

    def copy(
        self,
        name: StepName,
        *,
        expect: Callable[[int], None] = lambda size_bytes: None,
        progress: Callable[[int], None] = lambda size_bytes: None,
    ) -> int | None:
        """**Blocks.** Copies one step, after those to which it refers; returns its size, or None if it is there.

        Of a shared copy, what this source has of it; the size is 0 if other workers have to add to it.

        What is there of an incomplete one is read, and kept as far as it is whole. `expect` is called with the number
        of bytes to read, `progress` from any thread with those that were just read.

        Raises:
            DamageError: If the step is damaged in the source; nothing of it is left in the destination. Also if another
                save has made the one in the destination, which stays as it is.
            NotFoundError: If it is not committed in the source any more.
            StorageError: If a storage fails, or a job has begun to save in the destination.
        """
        source, goal = self._source, self._goal
        data = source.storage.read(name.manifest_path, MAX_MANIFEST_BYTES)
        manifest = decode_manifest(data, path=name.manifest_path, expected=name)
        if (found := look_at_step(goal, name, State.LIVING)) is not None:
            self._check_same_step(found, manifest)
            if not found.damages:
                self._copy_metrics(name)
                goal.step(name).renew_copy()
                return None
            self._check_unpassed(name)
            goal.step(name).withdraw()
        try:
            try:
                opened = self._open(name)
                expect(sum(index.data_bytes for index in opened.indexes))
                self._copy_files(opened, progress)
            except (DamageError, StorageFullError):
                if self._takes is None or manifest.world_size == 1:
                    self._check_unpassed(name)
                    goal.step(name).discard()
                raise
            if self._takes is None or not find_misfits(goal, name, manifest):
                self._commit(name, data, manifest)
                return manifest.size_bytes
        except (StorageError, FencedError):
            # A job that has begun there removes what it takes for the remains of a save.
            self._check_unpassed(name)
            raise
        return 0

    def try_commit(self, name: StepName) -> bool:
        """**Blocks.** Publishes the manifest of a step if other workers have copied all the rest of it; True if it is
        there."""
        if self._goal.step(name).is_committed():
            return True
        data = self._source.storage.read(name.manifest_path, MAX_MANIFEST_BYTES)
        manifest = decode_manifest(data, path=name.manifest_path, expected=name)
        if find_misfits(self._goal, name, manifest):
            return False
        self._commit(name, data, manifest)
        return True

    def record_base(self, generation: int) -> None:
        """**Blocks.** Copies the record of the step from which a generation began, if it has one."""
        path = base_path(generation)
        try:
            data = self._source.storage.read(path, MAX_GENERATION_BYTES)
        except NotFoundError:
            return
        decode_base(data, path=path, generation=generation)
        self._goal.storage.publish(path, data)

    def _open(self, name: StepName) -> OpenedStep:
        """Returns the records of a step: all, or of those files that are to be taken and in the source."""
        storage = self._source.storage
        if self._takes is None:
            return open_step(storage, name.directory, name)
        manifest, there = self._source.step(name).manifest(), self._source.step(name).list_names()
        ranks = [rank for rank in range(manifest.world_size) if index_name(rank, manifest.world_size) in there]
        ranks = [*filter(self._takes, ranks)]
        return OpenedStep(
            name.directory, manifest, tuple(read_rank(storage, name.directory, manifest, rank) for rank in ranks)
        )

    def _check_same(self) -> None:
        """Checks that no generation was opened in the destination that the source does not have."""
        if generations := self._goal.list_generations():
            mine, other = self._source.try_opening(generations[-1]), self._goal.opening(generations[-1])
            if mine is None or mine.token != other.token:
                raise self._other_run(generations[-1])
            return
        strangers = set(self._goal.look().committed) - set(self._source.look().committed)
        if strangers:
            raise self._other_run(max(name.generation for name in strangers))

    def _other_run(self, generation: int) -> UsageError:
        return UsageError(
            f"{self._goal.url} is another run than {self._source.url}, or a job has continued there: its generation "
            f"{generation} is not that of the source",
            hint="Copy into a new place.",
        )

    def _check_same_step(self, found: Found, manifest: Manifest) -> None:
        if found.manifest is not None and found.manifest.token != manifest.token:
            raise DamageError(
                f"{self._goal.url}/{found.directory} differs from the step in {self._source.url}",
                step=manifest.step,
                path=manifest.name.manifest_path,
                hint="Another save has made it. Copy into a new place.",
            )

    def _find_whole(self, opened: OpenedStep, progress: Callable[[int], None]) -> set[str]:
        """Returns the files that are in the destination already, and whole; removes the others.

        An index is written when its data file is durable. Without directories, a file that is there is durable itself:
        it may be what another copy has just put there, and stays.
        """
        storage, directory, manifest = self._goal.storage, opened.directory, opened.manifest
        there = {entry.name: entry.size_bytes for entry in storage.list(directory)}
        whole: set[str] = set()
        written: list[Index] = []
        for index in opened.indexes:
            worker, file = manifest.workers[index.rank], index_name(index.rank, manifest.world_size)
            if there.get(file) == worker.index_bytes:
                path = f"{directory}/{file}"
                whole |= {path} if digest(storage.read(path, worker.index_bytes)) == worker.index_digest else set()
            is_written = f"{directory}/{file}" in whole or not storage.traits.has_directories
            if is_written and there.get(data_name(index.rank, manifest.world_size)) == worker.data_bytes:
                written.append(_own_part(index))
        partly = replace(opened, indexes=tuple(written))
        damaged = {damage.path for damage in verify_data(storage, partly, threads=_THREADS, progress=progress)}
        whole |= {opened.data_path(index.rank) for index in written}.difference(damaged)
        for index in opened.indexes:
            if opened.data_path(index.rank) not in whole:
                whole.discard(f"{directory}/{index_name(index.rank, manifest.world_size)}")
        ranks = (index.rank for index in opened.indexes)
        names = (f"{directory}/{name(rank, manifest.world_size)}" for rank in ranks for name in (index_name, data_name))
        if left := [path for path in names if path not in whole and path.rpartition("/")[2] in there]:
            self._check_unpassed(opened.name)
            if self._goal.step(opened.name).is_committed():  # By another copy, just now.
                raise StorageError(f"{self._goal.url}: another copy writes there", path=directory)
            storage.delete(left)
        return whole

    def _copy_files(self, opened: OpenedStep, progress: Callable[[int], None]) -> None:
        whole = self._find_whole(opened, progress)
        indexes = [index for index in opened.indexes if opened.data_path(index.rank) not in whole]
        for rank in (index.rank for index in opened.indexes if index not in indexes):
            if f"{opened.directory}/{index_name(rank, opened.manifest.world_size)}" not in whole:
                self._copy_index(opened, rank)
        writers: list[FileWriter] = []
        with open_pool(self._source.storage, _THREADS, opened.manifest.data_bytes) as pool:
            try:
                pool.run(chain.from_iterable(self._list_jobs(opened, index, writers, progress) for index in indexes))
            except BaseException:
                # The threads of the pool may wait for a piece that comes no more.
                for writer in writers:
                    writer.abandon()
                raise

    def _list_jobs(
        self, opened: OpenedStep, index: Index, writers: list[FileWriter], progress: Callable[[int], None]
    ) -> Iterator[Callable[[], None]]:
        """Yields jobs that each copy a piece of one worker's data file; the last one to end copies the index."""
        part = Part(opened.data_path(index.rank), _own_part(index), index.data_bytes, None, opened.directory)
        reader = part.open(self._source.storage, None)
        writer = self._goal.storage.create(part.path, index.data_bytes)
        writers.append(writer)
        left, lock = [index.data_bytes], threading.Lock()

        def copy(piece: Piece | None, begin: int, end: int) -> None:
            try:
                first = begin - begin % _PAGE_BYTES
                memory = self._scratch.take(end - first)[begin - first :]
                # The header is read with what follows it.
                begins = [*([0] if begin == 0 else []), *(piece.begins if piece else ())]
                parts = [memory[one - begin : last - begin] for one, last in pairwise([*begins, end])]
                found = reader.read_digested(begin, parts)
                if begin == 0 and found.pop(0) != index.header_digest:
                    text = f"{part.path}: the header does not match its digest"
                    raise DamageError(text, step=index.step, path=part.path, offset_bytes=0)
                for damage in find_damages(part.index, part.path, piece, found) if piece else ():
                    raise damage
                writer.write_at(begin, memory[: end - begin])
                progress(end - begin)
                with lock:
                    left[0] -= end - begin
                    is_last = not left[0]
                if is_last:
                    writer.finish()
                    reader.close()
                    self._copy_index(opened, index.rank)
            except BaseException:
                reader.close()
                writer.abandon()  # Others may wait until this piece is written.
                raise

        pieces = _join(plan_pieces(part.index, range(len(index.leaves)), {}), self._goal.storage, index.data_bytes)
        head = next(pieces, None)
        yield partial(copy, head, 0, head.end if head else index.header_bytes)
        yield from (partial(copy, piece, piece.begin, piece.end) for piece in pieces)

    def _copy_index(self, opened: OpenedStep, rank: int) -> None:
        worker = opened.manifest.workers[rank]
        path = f"{opened.directory}/{index_name(rank, opened.manifest.world_size)}"
        data = self._source.storage.read(path, worker.index_bytes)
        if digest(data) != worker.index_digest:
            raise DamageError(f"{path} does not match the digest in the manifest", step=opened.name.step, path=path)
        self._goal.storage.publish(path, data)

    def _copy_metrics(self, name: StepName) -> None:
        for number in range(MAX_LATE_METRICS):
            path = f"{name.directory}/{metrics_name(number)}"
            try:
                self._goal.storage.publish(path, self._source.storage.read(path, MAX_GENERATION_BYTES))
            except NotFoundError:
                return

    def _commit(self, name: StepName, data: bytes, manifest: Manifest) -> None:
        """Publishes the manifest. A crash before leaves what the next copy completes; after it, a whole step."""
        goal = self._goal
        self._check_unpassed(name)
        goal.storage.sync_directory(name.directory)
        self._copy_metrics(name)
        self.record_base(name.generation)
        if not goal.storage.publish(name.manifest_path, data) and self._takes is not None:
            return  # Another worker has found all of it there.
        found = look_at_step(goal, name, State.LIVING)
        if found is None or found.damages:
            # A job that saves there has taken it for the remains of a save, and removed a part of it.
            goal.step(name).withdraw()
            self._check_unpassed(name)
            goal.step(name).discard()
            raise StorageError(
                f"{goal.url}: files of step {name.step} were removed while it was copied",
                path=name.directory,
                hint="A job saves there. Stop it, or copy into a new place.",
            )
        self._check_same_step(found, manifest)
        self._check_unpassed(name)
        check_references(goal, manifest)
        goal.step(name).renew_copy()

    def _check_unpassed(self, name: StepName) -> None:
        try:
            if self._generation:
                self._goal.check_owned(self._generation, self._token)
            else:
                self._goal.check_fence(0)
        except FencedError as error:
            raise StorageError(
                f"{self._goal.url}: a job has begun to save there during the copy",
                path=name.directory,
                hint="What was copied before is whole. Stop the job, or copy into a new place.",
            ) from error


def _own_part(index: Index) -> Index:
    """**Pure.** Returns the index without what is in the files of earlier steps."""
    return replace(index, sources=(), referred=())


def _join(pieces: Iterable[Piece], storage: Storage, size_bytes: int) -> Iterator[Piece]:
    """**Pure.** Joins pieces that are smaller than those that a storage takes."""
    traits = storage.traits
    least_bytes = choose_piece_bytes(traits, size_bytes) if traits.least_piece_bytes or traits.most_pieces else 0
    joined: Piece | None = None
    for piece in pieces:
        if joined is None or joined.size_bytes >= least_bytes:
            if joined is not None:
                yield joined
            joined = piece
        else:
            joined = Piece(
                [*joined.leaves, *piece.leaves],
                [*joined.begins, *piece.begins],
                [*joined.digests, *piece.digests],
                piece.end,
            )
    if joined is not None:
        yield joined
