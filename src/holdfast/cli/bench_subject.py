"""What a bench is about: a directory, and the state that is to be saved there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from holdfast.bench.plan import DEFAULT_SIZE_BYTES
from holdfast.catalog import Catalog, read_catalog, read_manifest
from holdfast.cli.survey import checkpoint_bytes
from holdfast.errors import DamageError, NoCheckpointError, NotFoundError, UsageError
from holdfast.format.names import is_own_file
from holdfast.storage import LocalStorage, Storage, open_storage

SizeFrom: TypeAlias = Literal["option", "checkpoint", "default"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was found on the command line and in the directory.

    Attributes:
        root: The directory.
        location: The same as it was written.
        size_bytes: The size of the state.
        size_from: Where that comes from.
        step: The checkpoint that it is the size of, or None.
        has_checkpoint: Whether the run has a checkpoint.
        may_be_saving: Whether a job may be saving there at this moment.
    """

    root: Path
    location: str
    size_bytes: int
    size_from: SizeFrom
    step: int | None
    has_checkpoint: bool
    may_be_saving: bool


def find_subject(location: str, size_bytes: int | None, trial_bytes: int | None) -> Subject:
    """**Blocks.** Finds the directory, and how large a state is saved there.

    Args:
        location: What was written on the command line.
        size_bytes: The size of the state; None for that of the newest checkpoint, or a usual one.
        trial_bytes: How much is to be saved in a trial, or None.

    Raises:
        NoCheckpointError: If there is no such directory.
        UsageError: If it is of another kind, or the trial is larger than the state.
        StorageError: If it cannot be read.
    """
    storage = open_storage(location)
    if not isinstance(storage, LocalStorage):
        raise UsageError(
            f"{location} is no directory of this machine", hint="Only what is mounted on it can be measured."
        )
    root = Path(storage.url)
    if not os.path.isdir(root):  # noqa: PTH112  It gives False, not an error, where we may not look.
        raise _no_directory(root, location)
    if any(not entry.is_directory and is_own_file(entry.name) for entry in storage.list("")):
        raise UsageError(
            f"{location} is the directory of a single step, not of a run",
            hint="Name the directory above it; the disk is the same.",
        )
    catalog = read_catalog(storage)
    size_from: SizeFrom = "option"
    step = None
    if size_bytes is None:
        size_from, size_bytes = "default", max(DEFAULT_SIZE_BYTES, trial_bytes or 0)
        found = _find_newest_size(storage, catalog)
        if found is not None:
            size_from, (step, size_bytes) = "checkpoint", found
    if trial_bytes is not None and trial_bytes > size_bytes:
        raise UsageError(
            f"a trial of {trial_bytes} bytes is larger than the state, which has {size_bytes}",
            hint=f"Give the state's size as well: --size {trial_bytes}.",
        )
    return Subject(
        root=root,
        location=location,
        size_bytes=size_bytes,
        size_from=size_from,
        step=step,
        has_checkpoint=bool(catalog.committed),
        may_be_saving=any(name.generation == catalog.generation for name in catalog.unfinished),
    )


def _find_newest_size(storage: Storage, catalog: Catalog) -> tuple[int, int] | None:
    """The newest step of the living line whose manifest can be read, and the size of its state, wherever it lies."""
    for name in reversed(catalog.living):
        try:
            manifest = read_manifest(storage, name)
        except (DamageError, NotFoundError):
            continue
        return name.step, max(checkpoint_bytes(manifest) + manifest.referred_bytes, 1)
    return None


def _no_directory(root: Path, location: str) -> NoCheckpointError:
    if os.path.lexists(root):
        return NoCheckpointError(f"{location} is not a directory", hint="Name the directory that the job saves into.")
    above = next(place for place in root.parents if os.path.isdir(place))  # noqa: PTH112
    return NoCheckpointError(
        f"there is no directory {location}",
        hint=f"Make it first (mkdir -p), or name one on the same disk that exists, such as {above}.",
    )
