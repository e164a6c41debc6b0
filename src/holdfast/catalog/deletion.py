"""Removes checkpoints: one of them, its space on the disk, and all those of a run.

A step's manifest is removed first, then its data. Nothing of a user's own is removed. Each function here raises
`StorageError` if the storage fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from holdfast.catalog.openers import RunLock, is_own
from holdfast.catalog.stored_run import Catalog, StoredRun, name_opener
from holdfast.catalog.stored_step import remove_own_files
from holdfast.errors import FencedError, HoldfastError
from holdfast.format.names import (
    DATA_SUFFIX,
    GENERATIONS_DIRECTORY,
    StepName,
    base_path,
    generation_path,
    is_own_file,
    parse_generation_temporary,
)
from holdfast.format.records import make_base
from holdfast.process.exit import register_drain, unregister_drain
from holdfast.storage.protocol import Storage
from holdfast.witness.ring import remove_rings


def sweep(
    run: StoredRun, unfinished: Iterable[StepName], trash: Iterable[str], generation: int
) -> tuple[list[str], list[HoldfastError]]:
    """**Blocks.** Removes the remains of dead saves; returns the paths, and what could not be removed.

    `unfinished` are steps that no job can commit any more, `trash` are directories that were set aside before. Openings
    that were never published go too, up to `generation`.
    """
    swept: list[str] = []
    problems: list[HoldfastError] = []
    work: list[tuple[str, Callable[[], bool]]] = [(name.directory, run.step(name).discard) for name in unfinished]
    work += [(directory, partial(remove_own_files, run.storage, directory)) for directory in trash]
    try:
        for entry in run.storage.list(GENERATIONS_DIRECTORY):
            number = parse_generation_temporary(entry.name)
            if number is not None and number <= generation and not entry.is_directory:
                path = f"{GENERATIONS_DIRECTORY}/{entry.name}"
                work.append((path, partial(run.storage.delete, [path])))
    except HoldfastError as error:
        problems.append(error)
    for path, remove in work:
        try:
            if remove():
                swept.append(path)
        except HoldfastError as error:
            problems.append(error)
    return swept, problems


class FileRecycler:
    """Recycles the data file of a removed checkpoint for the next save of one run writer.

    While the job lives, the storage may keep the space of one data file. It is given back when the manager is closed,
    or else when the program ends; after a crash the next job that saves here uses it. One save uses it at a time;
    `close` may be called at any time. Its `lock` marks the run as open until then.
    """

    def __init__(self, storage: Storage, *, reuse: bool) -> None:
        self._storage = storage
        self._generation = 0
        self.lock = RunLock(storage)
        # Guards the two fields below, and that nothing is kept any more when they say so.
        self._lock = threading.Lock()
        self._reuse = reuse and storage.traits.keeps_space
        self._has_kept = False

    def begin(self, generation: int) -> None:
        """**Blocks.** Called when a generation was opened, which now has the spare; if none is kept, removes it."""
        self._generation = generation
        if not self._reuse:
            # If this fails, the sweep reports it.
            with suppress(HoldfastError):
                self._storage.discard((), 0)

    def discard_withdrawn(self, directory: str, newest_bytes: int) -> bool:
        """**Blocks.** Removes the files of a committed step that was withdrawn here, and to which nothing refers.

        A data file may stay as the spare, unless it is much larger than that of the newest commit. Only such a step's
        may: the files of another unfinished directory may still be written to.
        """
        reuses = self._reuse
        for entry in self._storage.list(directory) if reuses else ():
            if is_own_file(entry.name) and entry.name.endswith(DATA_SUFFIX) and not entry.is_directory:
                with self._lock:
                    if not self._reuse:
                        break
                    self._has_kept = True
                    register_drain(self)
                self._storage.discard([f"{directory}/{entry.name}"], newest_bytes)
        if reuses and not self._reuse:  # It was closed meanwhile.
            self._storage.discard((), 0)
        return remove_own_files(self._storage, directory)

    def sweep(self, newest_bytes: int) -> None:
        """**Blocks.** Removes a spare that is too large by now, or any if none is to be kept."""
        self._storage.discard((), newest_bytes if self._reuse else 0)

    def close(self) -> None:
        """**Blocks.** Removes the spare that was kept here, unless a newer job has begun, which owns it then.

        From now on nothing is kept.
        """
        if self._end():
            with suppress(FencedError):
                StoredRun(self._storage).check_fence(self._generation)
                self._storage.discard((), 0)

    def abandon(self) -> None:
        """Like `close`, but leaves the spare where it is, as a crash does."""
        self._end()

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends without having closed the manager."""
        with suppress(HoldfastError):
            self.close()
        return []

    def _end(self) -> bool:
        """Keeps nothing from now on; returns True if something was kept before."""
        self.lock.release()
        with self._lock:
            unregister_drain(self)
            had_kept, self._has_kept, self._reuse = self._has_kept, False, False
        return had_kept


@dataclass(frozen=True, slots=True)
class Clearing:
    """The outcome of clearing a run.

    Attributes:
        removed: The checkpoints that are gone.
        generation: The generation that was opened for it; None if there was nothing to remove.
        problems: The files that could not be removed, and why.
    """

    removed: tuple[StepName, ...] = ()
    generation: int | None = None
    problems: tuple[HoldfastError, ...] = ()


def clear_run(run: StoredRun, known_generation: int, *, keeps_files: bool = False) -> Clearing:
    """**Blocks.** Removes all checkpoints of a run, and the remains of unfinished saves; nothing of a user's own.

    First a generation without a base is opened. From then on nothing can be restored, even after a crash, and jobs that
    saved before are fenced. The record of that generation stays as long as the directory does. With `keeps_files` the
    checkpoints only stop being the source of a resume; they are removed when all are removed next.

    Raises:
        FencedError: If another job has opened a newer one than `known_generation`; nothing has been removed.
        UsageError: If another process of this machine has the run open; likewise.
    """
    lock = RunLock(run.storage)
    lock.take()
    before = run.look(closely=True)
    for generation in run.list_generations():
        opening = run.try_opening(generation) if generation > known_generation else None
        if generation > known_generation and not (opening and is_own(opening)):
            raise FencedError(
                f"{run.url}: generation {generation} was opened{name_opener(opening)} since this job began; "
                "nothing was removed",
                hint="Another job saves there. Stop this job, or give it its own directory.",
            )
    if not (before.committed or before.unfinished or before.lost or before.trash):
        return Clearing()
    generation = run.open_generation()
    run.record_base(make_base(generation, None))
    if keeps_files:
        return Clearing(generation=generation)
    # Looked at again: what was committed meanwhile is fenced now, and goes as well.
    catalog = run.look(closely=True)
    removed, problems = _remove_committed(run, catalog, generation)
    older = [name for name in (*catalog.unfinished, *catalog.lost) if name.generation < generation]
    problems += sweep(run, older, catalog.trash, generation)[1]
    # The newest record fences all older generations by itself.
    for other in run.list_generations():
        if other < generation:
            try:
                run.storage.delete([base_path(other), generation_path(other)])
            except HoldfastError as error:
                problems.append(error)
    with suppress(HoldfastError):  # They say nothing about the newest generation.
        run.history.drop_summaries()
    remove_rings(run.storage)
    return Clearing(tuple(removed), generation, tuple(problems))


def _remove_committed(run: StoredRun, catalog: Catalog, generation: int) -> tuple[list[StepName], list[HoldfastError]]:
    """Removes the newest first: steps go before those that they refer to. All manifests go before any data does."""
    problems: list[HoldfastError] = []
    withdrawn: list[StepName] = []
    for name in sorted(catalog.committed, reverse=True):
        if name.generation < generation:
            try:
                run.step(name).withdraw()
                withdrawn.append(name)
            except HoldfastError as error:
                problems.append(error)
                break
    removed: list[StepName] = []
    for name in withdrawn:
        try:
            remove_own_files(run.storage, name.directory)
            removed.append(name)
        except HoldfastError as error:
            problems.append(error)
    return removed, problems
