"""How checkpoints go: one of them, the place on the disk that it had, and all those of a run.

A step's manifest goes first, then what it vouched for. Nothing of a user's own is removed.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from holdfast.catalog import (
    Catalog,
    check_fence,
    open_generation,
    read_catalog,
    read_generations,
    read_opening,
    record_base,
)
from holdfast.errors import DamageError, FencedError, HoldfastError, NotFoundError
from holdfast.format.generation import make_base
from holdfast.format.names import (
    DATA_SUFFIX,
    GENERATIONS_DIRECTORY,
    StepName,
    base_path,
    generation_path,
    is_own_file,
    parse_generation_temporary,
)
from holdfast.save.drain import register_drain, unregister_drain
from holdfast.storage.protocol import SparingStorage, Storage


def discard_committed(storage: Storage, name: StepName) -> bool:
    """**Blocks.** Removes a committed step to which nobody can refer.

    A crash after the manifest has gone leaves a directory without one, which the next sweep removes.

    Returns:
        True if all of it is gone, False if files that are not holdfast's keep the directory.

    Raises:
        StorageError: If the place fails.
    """
    withdraw(storage, name)
    return remove_own_files(storage, name.directory)


def withdraw(storage: Storage, name: StepName) -> None:
    """**Blocks.** Takes a committed step's manifest away. Its data stays, since a save that goes on may refer to it.

    Whoever withdraws a step looks again, when this has returned, whether somebody may have come to refer to it, and
    only then removes the data. Whoever has committed a step looks again whether those that it refers to still have
    their manifests. So of two that do this at the same time, at least one sees the other.

    Raises:
        StorageError: If the place fails.
    """
    # First: a step without a manifest that has this file is one that has lost it, and is kept.
    storage.remove(name.committed_path)
    storage.remove(name.manifest_path)
    # The manifest must be gone for good before the data goes: the other order would leave half a checkpoint.
    storage.sync_directory(name.directory)


def discard_unfinished(storage: Storage, name: StepName) -> bool:
    """**Blocks.** Removes the directory of a step that was never committed, or that a person gives up.

    It is moved aside first, so that a writer which is not as dead as it seems finds its directory gone and fails,
    rather than publishing a manifest beside data that have been removed.

    Returns:
        True if all of it is gone, False if files that are not holdfast's keep the directory, which then has its name
        again.

    Raises:
        StorageError: If the place fails.
    """
    if any(not is_own_file(entry.name) for entry in storage.list(name.directory)):
        return remove_own_files(storage, name.directory)
    return remove_own_files(storage, storage.set_aside(name.directory))


def discard_trash(storage: Storage, directory: str) -> bool:
    """**Blocks.** Removes what was set aside before.

    Returns:
        True if all of it is gone.

    Raises:
        StorageError: If the place fails.
    """
    return remove_own_files(storage, directory)


def discard_half_published(storage: Storage, generation: int) -> list[str]:
    """**Blocks.** Removes what openings that died before they were published left, of this generation and older ones.

    Returns:
        The paths that were removed.

    Raises:
        StorageError: If the place fails.
    """
    removed: list[str] = []
    for entry in storage.list(GENERATIONS_DIRECTORY):
        number = parse_generation_temporary(entry.name)
        if number is not None and number <= generation and not entry.is_directory:
            path = f"{GENERATIONS_DIRECTORY}/{entry.name}"
            storage.remove(path)
            removed.append(path)
    return removed


def remove_own_files(storage: Storage, directory: str) -> bool:
    """**Blocks.** Removes holdfast's own files from a directory, and the directory if nothing else lies in it.

    Raises:
        StorageError: If the place fails.
    """
    for entry in storage.list(directory):
        if not entry.is_directory and is_own_file(entry.name):
            storage.remove(f"{directory}/{entry.name}")
    return storage.remove_directory(directory)


_MAX_SHARE: Final = 2
"""How many times as large as the newest data file the spare may be: the next one is likely to be of that size."""


class FileRecycler:
    """What becomes of the data files of those steps that one line removes.

    While the job lives, one of them stays as the spare. It goes when the line is closed, or else when the program ends;
    a crash leaves it to the next job that saves here. One save uses it at a time; `close` may be called at any moment.
    """

    def __init__(self, storage: Storage, *, reuse: bool) -> None:
        """Reads and writes nothing yet.

        Args:
            storage: The run.
            reuse: False to keep nothing.
        """
        self._storage = storage
        self._spare = storage.spare if isinstance(storage, SparingStorage) else None
        self._generation = 0
        # Guards the two fields below, and that nothing is kept any more when they say so.
        self._lock = threading.Lock()
        self._reuse = reuse and self._spare is not None
        self._has_kept = False

    def begin(self, generation: int) -> None:
        """**Blocks.** A generation was opened, which now has the spare; one that keeps none removes what it finds."""
        self._generation = generation
        if self._spare is not None and not self._reuse:
            # If this fails, the sweep tells of it.
            with suppress(HoldfastError):
                self._spare.remove()

    def discard_withdrawn(self, directory: str, newest_bytes: int) -> bool:
        """**Blocks.** Removes the files of a committed step that this line has withdrawn, and to which nobody refers.

        A data file may stay as the spare. Only such a step's may: whoever left another directory unfinished may be
        writing into its files still.

        Args:
            directory: The step's directory.
            newest_bytes: How large the data file is that was committed last.

        Returns:
            True if the directory is gone.

        Raises:
            StorageError: If the place fails.
        """
        if self._reuse:
            for entry in self._storage.list(directory):
                if is_own_file(entry.name) and entry.name.endswith(DATA_SUFFIX) and not entry.is_directory:
                    self._try_keep(f"{directory}/{entry.name}", newest_bytes)
        return remove_own_files(self._storage, directory)

    def _try_keep(self, path: str, newest_bytes: int) -> None:
        with self._lock:
            if self._reuse and self._spare is not None and self._spare.try_keep(path, _MAX_SHARE * newest_bytes):
                self._has_kept = True
                register_drain(self)

    def sweep(self, newest_bytes: int) -> None:
        """**Blocks.** Removes a spare that is too large by now, or any if none is to be kept.

        Raises:
            StorageError: If the place fails.
        """
        if self._spare is not None:
            self._spare.remove(_MAX_SHARE * newest_bytes if self._reuse else -1)

    def close(self) -> None:
        """**Blocks.** Removes the spare that was kept here, unless a newer job has begun, whose it is then.

        From now on nothing is kept.

        Raises:
            StorageError: If the place fails.
        """
        if self._end() and self._spare is not None:
            with suppress(FencedError):
                check_fence(self._storage, self._generation)
                self._spare.remove()

    def abandon(self) -> None:
        """As `close`, but leaves the spare where it is, as a crash does."""
        self._end()

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends and nobody has closed the line."""
        with suppress(HoldfastError):
            self.close()
        return []

    def _end(self) -> bool:
        """Keeps nothing from now on; whether something was kept before."""
        with self._lock:
            unregister_drain(self)
            had_kept, self._has_kept, self._reuse = self._has_kept, False, False
        return had_kept


@dataclass(frozen=True, slots=True)
class Clearing:
    """What came of it.

    Attributes:
        removed: The checkpoints that are gone.
        generation: The generation that was opened for it; None if there was nothing to remove.
        problems: What could not be removed, and why.
    """

    removed: tuple[StepName, ...] = ()
    generation: int | None = None
    problems: tuple[HoldfastError, ...] = ()


def clear_run(storage: Storage, known_generation: int, *, keeps_files: bool = False) -> Clearing:
    """**Blocks.** Removes all checkpoints of a run, and what unfinished saves have left; nothing of a user's own.

    First a generation is opened that begins anew. From then on nothing is there to be restored, whatever else a crash
    prevents, and whoever saved before is fenced. The record of that generation stays for as long as the directory does.

    Args:
        storage: The run.
        known_generation: The newest generation that was there when the caller began.
        keeps_files: Whether the checkpoints only stop being what a run goes on from. Their files stay until the next
            time that all are removed.

    Raises:
        FencedError: If another job has opened a newer one; nothing has been removed.
        StorageError: If the place fails.
    """
    before = read_catalog(storage)
    for generation in read_generations(storage):
        if generation > known_generation:
            _check_own(storage, generation)
    if not (before.committed or before.unfinished or before.lost or before.trash):
        return Clearing()
    generation = open_generation(storage)
    record_base(storage, make_base(generation, None))
    if keeps_files:
        return Clearing(generation=generation)
    # Looked at again: what was committed meanwhile is fenced now, and goes as well.
    catalog = read_catalog(storage)
    problems: list[HoldfastError] = []
    removed = _remove_committed(storage, catalog, generation, problems)
    _sweep(storage, catalog, generation, problems)
    return Clearing(tuple(removed), generation, tuple(problems))


def _check_own(storage: Storage, generation: int) -> None:
    try:
        opening = read_opening(storage, generation)
        if (opening.host, opening.process) == (socket.gethostname(), os.getpid()):
            return
        by = f" by process {opening.process} on {opening.host}"
    except (DamageError, NotFoundError):
        by = ""
    raise FencedError(
        f"{storage.url}: generation {generation} was opened{by} since this job began; nothing was removed",
        hint="Another job saves there. Stop this one, or give it a directory of its own.",
    )


def _remove_committed(
    storage: Storage, catalog: Catalog, generation: int, problems: list[HoldfastError]
) -> list[StepName]:
    """The newest first: what refers to others goes before them. All manifests go before any data does."""
    withdrawn: list[StepName] = []
    for name in sorted(catalog.committed, reverse=True):
        if name.generation < generation:
            try:
                withdraw(storage, name)
                withdrawn.append(name)
            except HoldfastError as error:
                problems.append(error)
                break
    removed: list[StepName] = []
    for name in withdrawn:
        try:
            remove_own_files(storage, name.directory)
            removed.append(name)
        except HoldfastError as error:
            problems.append(error)
    return removed


def _sweep(storage: Storage, catalog: Catalog, generation: int, problems: list[HoldfastError]) -> None:
    work: list[Callable[[], object]] = [
        partial(discard_unfinished, storage, name)
        for name in (*catalog.unfinished, *catalog.lost)
        if name.generation < generation
    ]
    work += [partial(discard_trash, storage, directory) for directory in catalog.trash]
    work.append(partial(discard_half_published, storage, generation))
    # The newest record fences all older generations by itself.
    for older in read_generations(storage):
        if older < generation:
            work += [partial(storage.remove, path) for path in (base_path(older), generation_path(older))]
    for remove in work:
        try:
            remove()
        except HoldfastError as error:
            problems.append(error)
