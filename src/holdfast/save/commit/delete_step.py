"""How a step's directory goes: the manifest first, then what it vouched for. Nothing of a user's own is removed."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.errors import StorageError
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    MAX_ATTEMPT,
    StepName,
    is_own_file,
    parse_generation_temporary,
    parse_step_directory,
)
from holdfast.storage.protocol import Storage


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


def next_attempt(storage: Storage, step: int, generation: int, known: Collection[StepName] = ()) -> StepName:
    """**Blocks.** The name for a new attempt of a generation at a step: one that no directory has.

    Args:
        storage: Where the run lies.
        step: The step.
        generation: The generation.
        known: Names that are not given either, though somebody may have removed their directories.

    Raises:
        StorageError: If the place fails.
    """
    names = (*known, *(parse_step_directory(entry.name) for entry in storage.list("")))
    taken = [name.attempt for name in names if name and (name.step, name.generation) == (step, generation)]
    attempt = max(taken, default=0) + 1
    if attempt > MAX_ATTEMPT:
        raise StorageError(
            f"{storage.url}: no attempt at step {step} can follow number {MAX_ATTEMPT}",
            hint="Some directory there has a number that no job gave it; remove that one.",
        )
    return StepName(step, generation, attempt)
