"""All checkpoints of a run removed on purpose, in such a way that no late writer brings one back."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from holdfast.catalog import Catalog, open_generation, read_catalog, read_generations, read_opening, record_base
from holdfast.errors import DamageError, FencedError, HoldfastError, NotFoundError
from holdfast.format.generation import make_base
from holdfast.format.names import StepName, base_path, generation_path
from holdfast.save.commit.delete_step import (
    discard_half_published,
    discard_trash,
    discard_unfinished,
    remove_own_files,
    withdraw,
)
from holdfast.storage.protocol import Storage


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
