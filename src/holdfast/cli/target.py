"""Finds the run or step that `RUN` or `RUN@STEP` on the command line names, and reads its records."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from holdfast.catalog import Asked, Catalog, StoredRun, StoredStep, find_step, make_lost_error, split_place
from holdfast.catalog.named_step import EXAMPLES
from holdfast.catalog.survey import State
from holdfast.convert.leaf_stream import StoredLeaf
from holdfast.errors import (
    DamageError,
    NoCheckpointError,
    NotFoundError,
    NoWholeCheckpointError,
    StorageError,
    UsageError,
)
from holdfast.events import Copied
from holdfast.format.index import StoredBox
from holdfast.format.names import (
    COMMITTED_NAME,
    GENERATIONS_DIRECTORY,
    MANIFEST_NAME,
    TRASH_PREFIX,
    StepName,
    data_name,
    is_own_file,
    parse_step_directory,
)
from holdfast.format.records import Manifest
from holdfast.format.scalars import Node
from holdfast.restore.read import open_pool
from holdfast.restore.records import OpenedStep
from holdfast.restore.verify import open_step
from holdfast.storage import Entry, LocalStorage, Storage, open_storage
from holdfast.storage.checks import plain_path
from holdfast.storage.tiers import Tiers
from holdfast.witness.ring import FOLDER

MOST_LOOKS: Final = 30
"""Most tries at finding the newest checkpoint: a running job may remove the one that was found."""

MAX_DEPTH: Final = 3
"""How many levels below a directory are searched for runs, as in `runs/experiment/model/seed-1`."""

_MOST_DIRECTORIES: Final = 20_000
_MOST_PREFIXES: Final = 2_000
_NAMED_RUNS: Final = 5
_FOREIGN: Final = (".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class RunTarget:
    """The run or step that an argument names.

    Attributes:
        storage: Its root is the run's directory, or that of a single step.
        location: The directory as it was written, without the step.
        step: The step that was asked for: its number, or a name such as `latest` or `best:val_loss`; or None.
        is_step: Whether the root is the directory of a single step. Such a directory may have any name and parent.
    """

    storage: Storage
    location: str
    step: Asked
    is_step: bool

    @property
    def run(self) -> StoredRun:
        """**Pure.** The run, as if nothing of it was read yet."""
        return StoredRun(self.storage)

    @property
    def siblings(self) -> Storage | None:
        """Directory with the steps that a step may refer to: the run, or the parent of a single step's directory."""
        if not self.is_step:
            return self.storage
        # If it is a link to a step's directory, the parent of its target.
        if (place := self.storage.location) is not None:
            return LocalStorage(place.resolve().parent)
        above = self.storage.url.rpartition("/")[0]
        return open_storage(above) if above.partition("://")[2] else None


def takes_tiers(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--tier` to a verb, whose function gets `tiers`."""
    return click.option(
        "--tier",
        "tiers",
        metavar="PLACE",
        multiple=True,
        help="A farther tier of the run, such as s3://bucket/run; may be repeated, nearest first.",
    )(command)


def find_target(
    text: str,
    tiers: Sequence[str] = (),
    *,
    hint: str = "Name the directory that the job saves into, or that of one step.",
) -> RunTarget:
    """**Blocks.** Finds a run, a step of a run, or the directory of a single step; with `tiers`, of a run in several.

    If a directory of that name exists, `@` included, it is used. Otherwise the text after the `@` is a step.
    Raises `NoCheckpointError` if there is no such directory, or no file of holdfast in it.
    """
    storage, location, step = split_place(text)
    if tiers:
        near, storage = storage, Tiers(storage, *tiers)
        for tier in storage.tiers[1:]:
            if not any(belongs_to_run(entry) for entry in tier.storage.list("")):
                known = sorted({event.tier for event in StoredRun(near).read_journal() if isinstance(event, Copied)})
                hint = f"Its job has copied to {', '.join(known)}." if known else "Its job names it in Tiers(...)."
                raise NoCheckpointError(f"--tier {tier.place}: no job has copied a run there", hint=hint)
    entries = storage.list("")
    is_step = any(not entry.is_directory and is_own_file(entry.name) for entry in entries)
    if not is_step and not any(belongs_to_run(entry) for entry in entries):
        raise _nothing_there(storage, location, entries, hint)
    if is_step and step is not None:
        raise UsageError(f"{location} is the directory of a single step", hint=f"Leave out @{step}.")
    return RunTarget(storage, location, step, is_step)


def find_run(text: str, tiers: Sequence[str] = ()) -> RunTarget:
    """**Blocks.** Finds a whole run, as `find_target` does; raises `UsageError` for a single step."""
    target = find_target(text, tiers, hint="Name the directory that the job saves into.")
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
    if not isinstance(target.step, int):
        if catalog.newest is None:
            raise no_living(catalog, target)
        return find_step(target.run, catalog, target.step)
    if all(name.step != target.step for name in catalog.committed):
        if lost := [name for name in target.run.find_lost(catalog) if name.step == target.step]:
            raise make_lost_error(lost, target.location)
        for name in catalog.unfinished:
            if name.step == target.step:
                raise NoCheckpointError(
                    f"step {target.step} of {target.location} is not a checkpoint: it has no {MANIFEST_NAME}",
                    hint=f"A save is writing {name.directory} now, or was interrupted.",
                )
    return catalog.find(target.step, target.location)


def no_living(catalog: Catalog, target: RunTarget) -> NoCheckpointError:
    """**Blocks.** The error for a run without a checkpoint in its current lineage."""
    if lost := target.run.find_lost(catalog):
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


def belongs_to_run(entry: Entry) -> bool:
    """**Pure.** True if a directory with this entry is the directory of a run."""
    name = entry.name
    return entry.is_directory and (
        name in (GENERATIONS_DIRECTORY, FOLDER)  # The latter is there once a job has trained.
        or name.startswith(TRASH_PREFIX)
        or parse_step_directory(name) is not None
    )


def find_runs(storage: Storage) -> Iterator[str]:
    """**Blocks.** Yields the places of runs at or below a place, relative to it, in the order of their names; empty for
    itself.

    Hidden directories and the insides of runs are not searched.
    """
    if (root := storage.location) is None:
        yield from _find_prefixes(storage)
        return
    left = _MOST_DIRECTORIES

    def search(place: Path, depth: int) -> Iterator[str]:
        nonlocal left
        left -= 1
        try:
            if any(belongs_to_run(entry) for entry in LocalStorage(place).list("")):
                yield "" if place == root else str(place.relative_to(root))
                return
            with os.scandir(place) as entries:
                inner = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        except (StorageError, OSError):
            return  # One that may not be read hides no other.
        for name in inner if depth < MAX_DEPTH else ():
            if left > 0:
                yield from search(place / name, depth + 1)

    yield from search(root, 0)


def _find_prefixes(storage: Storage) -> list[str]:
    """Returns the runs in a bucket: by one request for each prefix, many of them at once."""
    found: list[str] = []
    level, left = [""], _MOST_PREFIXES
    for depth in range(MAX_DEPTH + 1):
        listed: dict[str, list[Entry]] = {}

        def look(place: str, listed: dict[str, list[Entry]] = listed) -> None:
            listed[place] = storage.list(place)

        with open_pool(storage, 1, 0) as pool:
            pool.run(partial(look, place) for place in level[:left])
        left = max(left - len(level), 0)
        found += [place for place, entries in listed.items() if any(map(belongs_to_run, entries))]
        level = [
            f"{place}/{entry.name}".lstrip("/")
            for place, entries in listed.items()
            if place not in found and depth < MAX_DEPTH
            for entry in entries
            if entry.is_directory and not entry.name.startswith(".")
        ]
    return sorted(found)


def join_place(location: str, relative: str) -> str:
    """**Pure.** Returns a place below another one, as a person would write it."""
    if "://" in location:
        return f"{location.rstrip('/')}/{relative}".rstrip("/")
    return os.path.normpath(os.path.join(location, relative))  # noqa: PTH118


def open_below(storage: Storage, relative: str) -> Storage:
    """Returns the storage of a place below another one."""
    if storage.location is not None:
        return LocalStorage(storage.location / relative)
    return open_storage(join_place(storage.url, relative)) if relative else storage


def _nothing_there(storage: Storage, location: str, entries: list[Entry], hint: str) -> NoCheckpointError:
    if entries:
        runs = [join_place(location, relative) for relative in find_runs(storage)]
        files = sorted(entry.name for entry in entries if entry.name.endswith(_FOREIGN)) if storage.location else []
        if files:
            hint = (
                f"It holds files of other programs: holdfast import {shlex.quote(join_place(location, files[0]))} RUN"
            )
        hint = f"It holds runs: {_some(runs)}. Name one of them." if runs else hint
        return NoCheckpointError(f"{location} is not a run: it has no checkpoints", hint=hint)
    if storage.location is not None and not os.path.isdir(storage.location):  # noqa: PTH112
        if os.path.lexists(storage.location):
            hint = "Name the directory that the job saves into."
            if location.endswith(_FOREIGN):
                hint = f"It is a file of another program: holdfast import {shlex.quote(location)} RUN"
            return NoCheckpointError(f"{location} is not a directory", hint=hint)
        hint = _suggest_run(location)
        before, at, after = location.rpartition("@")
        if at and before and os.path.isdir(before):  # noqa: PTH112
            before = plain_path(before)
            hint = f"{before} exists, but {after!r} is not a step. Write {before} and {EXAMPLES}."
        return NoCheckpointError(f"there is no directory {location}", hint=hint)
    return NoCheckpointError(f"{location} is empty", hint="No job has saved there yet.")


def _suggest_run(location: str) -> str:
    """**Blocks.** Returns a hint for a directory that is not there: the run with a similar name, or the runs nearby."""
    place = Path(location)
    above = next((parent for parent in place.parents if parent.is_dir()), None)
    found = [] if above is None else [above / relative for relative in find_runs(LocalStorage(above))]
    runs = {str(path): path.resolve().name for path in found}
    near = get_close_matches(place.name, runs.values(), _NAMED_RUNS)
    if near:
        return f"Did you mean {_some([run for run, name in runs.items() if name in near])}?"
    return f"Check the path. Runs nearby: {_some([*runs])}" if runs else "Check the path."


def _some(runs: Sequence[str]) -> str:
    """**Pure.** Names a few runs."""
    return ", ".join(runs[:_NAMED_RUNS]) + (f" and {len(runs) - _NAMED_RUNS} more" if len(runs) > _NAMED_RUNS else "")


@dataclass(frozen=True, slots=True)
class Heading:
    """Identity of one checkpoint, and its manifest.

    Attributes:
        location: The run, or the directory of the step, as it was written on the command line.
        url: The full path of `location`.
        directory: The name of the step's directory in the run; empty where the step's directory itself was named.
        expected: The step that the directory's name gives; None if the directory may have any name.
        state: Its state in its run; None if it was named by its own directory.
        is_newest: Whether it is the newest of the current lineage.
        manifest: Its manifest.
    """

    location: str
    url: str
    directory: str
    expected: StepName | None
    state: State | None
    is_newest: bool
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        """Size of its data files and indexes."""
        return self.manifest.size_bytes


class Array(NamedTuple):
    """One array, a leaf or a box of one, with the name of its data file.

    `source` is the directory of the step with that file, if it is another step.
    """

    stored: StoredBox
    file: str
    source: str


def _read_heading(target: RunTarget) -> Heading | None:
    """**Blocks.** Finds the checkpoint that is meant and reads its manifest; None if it has been removed meanwhile.

    Raises as `read_checkpoint`.
    """
    name, state, is_newest = None, None, False
    if not target.is_step:
        catalog = target.run.look()
        name = choose_step(catalog, target)
        state = State.LIVING if name in catalog.living else State.OFF_LINE
        is_newest = name == catalog.newest
    directory = name.directory if name else ""
    step = StoredStep(target.storage, directory, name)
    try:
        manifest = step.manifest()
    except NotFoundError:
        if name is not None:
            return None
        if step.has(COMMITTED_NAME):
            raise NoWholeCheckpointError(
                f"{target.location} was committed, and its manifest is gone; the data files are still there",
                damages=(DamageError("the manifest is gone", path=MANIFEST_NAME),),
                hint=f"Bring it back: `{COMMITTED_NAME}` in that directory is a copy of `{MANIFEST_NAME}`, "
                "unless it is empty.",
            ) from None
        raise NoCheckpointError(
            f"{target.location} is not a checkpoint: it has no {MANIFEST_NAME}",
            hint="It is being saved or removed, or that was interrupted, or its manifest is lost: "
            "`holdfast list --all` on the run says which.",
        ) from None
    return Heading(target.location, target.storage.url, directory, name, state, is_newest, manifest)


@dataclass(frozen=True, slots=True)
class Contents:
    """The records of one checkpoint."""

    opened: OpenedStep

    @property
    def objects(self) -> dict[str, Node]:
        """For each named object its state, with references in place of arrays."""
        objects: dict[str, Node] = {}
        for index in self.opened.indexes:
            for name, node in index.objects.items():
                objects.setdefault(name, node)
        return objects

    def arrays(self, select: Callable[[str], bool] | None = None) -> list[Array]:
        """The selected arrays, in the order of the files; all of them by default."""
        arrays: list[Array] = []
        for index in self.opened.indexes:
            own = data_name(index.rank, index.world_size)
            sources = [(source.file_name, source.name.directory) for source in index.sources]
            places = [(own, "")] * len(index.leaves) + [sources[record.source] for record in index.referred]
            arrays += (Array(stored, *place) for stored, place in zip(index.stored_boxes(), places, strict=True))
        return [array for array in arrays if select is None or select(array.stored.leaf)]

    def leaves(self) -> dict[str, StoredLeaf]:
        """Returns the type and shape of each leaf, in the order in which the files list them."""
        return {stored.leaf: StoredLeaf(stored.dtype, stored.global_shape) for stored, _, _ in self.arrays()}

    def sizes(self) -> dict[str, dict[str, int]]:
        """For each object the size of each of its leaves."""
        sizes: dict[str, dict[str, int]] = {name: {} for name in self.objects}
        for name, leaf in self.leaves().items():
            sizes.setdefault(name.partition("/")[0], {})[name] = leaf.size_bytes
        return sizes


def read_checkpoint(target: RunTarget) -> tuple[Heading, Contents | DamageError]:
    """**Blocks.** Finds the checkpoint that a target names, and reads its manifest and its indexes.

    If a running job removes the checkpoint meanwhile, it is looked for again. Returns its heading, and its contents or
    the damage of its indexes. Raises `NoCheckpointError` if there is none, and `DamageError` or
    `NoWholeCheckpointError` if its manifest is damaged or lost.
    """
    for _ in range(MOST_LOOKS):
        heading = _read_heading(target)
        if heading is None:
            continue
        try:
            return heading, Contents(open_step(target.storage, heading.directory, heading.expected))
        except DamageError as damage:
            if heading.expected is None or target.run.step(heading.expected).is_committed():
                return heading, damage
    raise NoCheckpointError(
        f"{target.location}: every checkpoint was removed before it could be read",
        hint="A running job removes them quickly. Try again, or let it keep more.",
    )
