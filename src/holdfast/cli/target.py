"""Finds the run or step that `RUN` or `RUN@STEP` on the command line names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.catalog import Catalog, StoredRun, make_lost_error
from holdfast.errors import NoCheckpointError, StorageError, UsageError
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    TRASH_PREFIX,
    StepName,
    is_own_file,
    parse_step_directory,
)
from holdfast.storage import Entry, LocalStorage, Storage, local_directory, open_storage

MOST_LOOKS: Final = 30
"""Most tries at finding the newest checkpoint: a running job may remove the one that was found."""

MAX_DEPTH: Final = 3
"""How many levels below a directory are searched for runs, as in `runs/experiment/model/seed-1`."""

_MOST_DIRECTORIES: Final = 20_000
_MAX_STEP_DIGITS: Final = 16
_NAMED_RUNS: Final = 5


@dataclass(frozen=True, slots=True)
class RunTarget:
    """The run or step that an argument names.

    Attributes:
        storage: Its root is the run's directory, or that of a single step.
        location: The directory as it was written, without the step.
        step: The step that was asked for, or None.
        is_step: Whether the root is the directory of a single step. Such a directory may have any name and parent.
    """

    storage: Storage
    location: str
    step: int | None
    is_step: bool

    @property
    def beside(self) -> Storage | None:
        """Directory with the steps that a step may refer to: the run, or the parent of a single step's directory."""
        if not self.is_step:
            return self.storage
        # If it is a link to a step's directory, the parent of its target.
        return LocalStorage(Path(self.storage.url).resolve().parent) if isinstance(self.storage, LocalStorage) else None


def find_target(
    text: str, *, hint: str = "Name the directory that the job saves into, or that of one step."
) -> RunTarget:
    """**Blocks.** Finds a run, a step of a run, or the directory of a single step.

    If a directory of that name exists, `@` included, it is used. Otherwise the text after the last `@` is a step.
    Raises `NoCheckpointError` if there is no such directory, or no file of holdfast in it.
    """
    location, step = _split(text)
    storage = open_storage(location)
    entries = storage.list("")
    is_step = any(not entry.is_directory and is_own_file(entry.name) for entry in entries)
    if not is_step and not any(belongs_to_run(entry) for entry in entries):
        raise _nothing_there(storage, location, entries, hint)
    if is_step and step is not None:
        raise UsageError(f"{location} is the directory of a single step", hint=f"Leave out @{step}.")
    return RunTarget(storage, location, step, is_step)


def find_run(text: str) -> RunTarget:
    """**Blocks.** Finds a whole run, as `find_target` does; raises `UsageError` for a single step."""
    target = find_target(text, hint="Name the directory that the job saves into.")
    if target.is_step:
        raise UsageError(
            f"{target.location} is the directory of a single step, not of a run",
            hint=f"`holdfast show {target.location}` shows the step; for the run, name the directory above it.",
        )
    if target.step is not None:
        raise UsageError(
            f"{text}: a run is expected here, not one of its steps",
            hint=f"Write {target.location}, without @{target.step}.",
        )
    return target


def choose_step(catalog: Catalog, target: RunTarget) -> StepName:
    """**Blocks.** Returns the step that was named, or else the newest step of the current lineage."""
    if target.step is None:
        if catalog.newest is None:
            raise no_living(catalog, target)
        return catalog.newest
    if all(name.step != target.step for name in catalog.committed):
        if lost := [name for name in StoredRun(target.storage).find_lost(catalog) if name.step == target.step]:
            raise make_lost_error(lost, target.location)
        for name in catalog.unfinished:
            if name.step == target.step:
                raise NoCheckpointError(
                    f"step {target.step} of {target.location} is not a checkpoint: it has no {MANIFEST_NAME}",
                    hint=f"A save is writing {name.directory} now, or was interrupted.",
                )
    return catalog.find(target.step)


def no_living(catalog: Catalog, target: RunTarget) -> NoCheckpointError:
    """**Blocks.** The error for a run without a checkpoint in its current lineage."""
    if lost := StoredRun(target.storage).find_lost(catalog):
        return make_lost_error(lost, target.location)
    off_line = len(catalog.committed) - len(catalog.living)
    if off_line:
        return NoCheckpointError(
            f"{target.location} has no checkpoint in its current lineage, only {off_line} elsewhere",
            hint="The run was started again from the beginning. `holdfast list --all` shows every step.",
        )
    if catalog.unfinished:
        return NoCheckpointError(
            f"{target.location} has no checkpoint, only {len(catalog.unfinished)} unfinished",
            hint="The first save is being written, or no save ever finished. `holdfast list --all` shows every step.",
        )
    return NoCheckpointError(
        f"{target.location} has no checkpoint yet", hint="A job has started there and has not saved yet."
    )


def _split(text: str) -> tuple[str, int | None]:
    location, at, step = text.rpartition("@")
    if not at or not location or not _is_step(step) or _exists(text):
        return text, None
    return location, int(step)


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_STEP_DIGITS


def _exists(location: str) -> bool:
    storage = open_storage(location)
    return os.path.lexists(storage.url) if isinstance(storage, LocalStorage) else bool(storage.list(""))


def belongs_to_run(entry: Entry) -> bool:
    """**Pure.** True if a directory with this entry is the directory of a run."""
    name = entry.name
    return entry.is_directory and (
        name == GENERATIONS_DIRECTORY or name.startswith(TRASH_PREFIX) or parse_step_directory(name) is not None
    )


def find_runs(directory: Path) -> Iterator[Path]:
    """**Blocks.** Yields the directories of runs at or below a directory, in the order of their names.

    Hidden directories and the insides of runs are not searched.
    """
    left = _MOST_DIRECTORIES

    def search(place: Path, depth: int) -> Iterator[Path]:
        nonlocal left
        left -= 1
        try:
            if any(belongs_to_run(entry) for entry in LocalStorage(place).list("")):
                yield place
                return
            with os.scandir(place) as entries:
                inner = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except (StorageError, OSError):
            return  # One that may not be read hides no other.
        for name in inner if depth < MAX_DEPTH else ():
            if left > 0:
                yield from search(place / name, depth + 1)

    yield from search(directory, 0)


def _nothing_there(storage: Storage, location: str, entries: list[Entry], hint: str) -> NoCheckpointError:
    if entries:
        root = local_directory(storage)
        place = location.rstrip("/")
        runs = [] if root is None else [f"{place}/{path.relative_to(root)}" for path in find_runs(root)]
        if runs:
            more = f" and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else ""
            hint = f"It holds runs: {', '.join(runs[:_NAMED_RUNS])}{more}. Name one of them."
        return NoCheckpointError(f"{location} is not a run: it has no checkpoints", hint=hint)
    if isinstance(storage, LocalStorage) and not os.path.isdir(storage.url):  # noqa: PTH112
        if os.path.lexists(storage.url):
            return NoCheckpointError(
                f"{location} is not a directory", hint="Name the directory that the job saves into."
            )
        hint = "Check the path."
        before, at, after = location.rpartition("@")
        if at and before and os.path.isdir(before):  # noqa: PTH112
            hint = f"{before} exists, but {after!r} is not a step. A step is a number, as in {before}@500."
        return NoCheckpointError(f"there is no directory {location}", hint=hint)
    return NoCheckpointError(f"{location} is empty", hint="No job has saved there yet.")
