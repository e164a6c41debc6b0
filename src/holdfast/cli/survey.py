"""What lies in a run's directory, as the verbs show it: more than names, less than every byte."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.catalog import Catalog, read_catalog, read_manifest, read_opening
from holdfast.cli.wording import iso_text
from holdfast.errors import DamageError, FormatError, HoldfastError, NotFoundError
from holdfast.format.generation import Opening
from holdfast.format.manifest import Manifest
from holdfast.format.names import StepName, data_name, index_name
from holdfast.storage import Storage


class State(enum.StrEnum):
    """Where a directory stands in its run."""

    LIVING = "living"
    """Committed, on the living line."""
    OFF_LINE = "off_line"
    """Committed, but off the living line: the run went on from elsewhere."""
    UNFINISHED = "unfinished"
    """Without a manifest: being written, or left behind by a save that never ended."""
    SET_ASIDE = "set_aside"
    """Renamed to be removed, and not removed yet."""


@dataclass(frozen=True, slots=True)
class Found:
    """One directory of a run.

    Attributes:
        directory: Its name.
        state: Where it stands.
        name: The checkpoint that it is or was to be; None for what was set aside.
        size_bytes: What its files take; for a checkpoint, its data files and indexes.
        manifest: Its manifest; None if it has none or that is damaged.
        damages: What can be seen to be wrong without reading the arrays.
        may_be_in_progress: Whether a job may be writing it at this moment.
    """

    directory: str
    state: State
    name: StepName | None
    size_bytes: int
    manifest: Manifest | None = None
    damages: tuple[DamageError, ...] = ()
    may_be_in_progress: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """A run at one moment.

    Attributes:
        catalog: What lies there, by name.
        found: Every directory: committed steps in order, then unfinished ones, then what was set aside.
        opening: Who opened the newest generation; None if that is not known.
    """

    catalog: Catalog
    found: tuple[Found, ...]
    opening: Opening | None

    def of(self, *states: State) -> list[Found]:
        """The directories in any of these states, in order."""
        return [one for one in self.found if one.state in states]

    @property
    def newest(self) -> Found | None:
        """The newest step of the living line, or None."""
        living = self.of(State.LIVING)
        return living[-1] if living else None


def survey_run(storage: Storage) -> Survey:
    """**Blocks.** Looks at every directory of a run; reads the manifests, but no arrays.

    Raises:
        StorageError: If the place cannot be read.
    """
    catalog = read_catalog(storage)
    living = set(catalog.living)
    committed = (
        look_at_step(storage, name.directory, name, State.LIVING if name in living else State.OFF_LINE)
        for name in catalog.committed
    )
    unfinished = (
        Found(
            name.directory,
            State.UNFINISHED,
            name,
            _size_bytes(storage, name.directory),
            # A generation that is over can commit no more; the newest may be at it.
            may_be_in_progress=name.generation == catalog.generation,
        )
        for name in catalog.unfinished
    )
    trash = (Found(name, State.SET_ASIDE, None, _size_bytes(storage, name)) for name in catalog.trash)
    found = (*(one for one in committed if one is not None), *unfinished, *trash)
    return Survey(catalog, found, _read_opening(storage, catalog.generation))


def look_at_step(storage: Storage, directory: str, name: StepName, state: State) -> Found | None:
    """**Blocks.** Reads a committed step's manifest and holds the sizes of its files against it.

    Returns:
        The step, or None if it has been removed since.

    Raises:
        StorageError: If the place cannot be read.
    """
    try:
        manifest = read_manifest(storage, name)
    except NotFoundError:
        return None
    except FormatError as damage:
        return Found(directory, state, name, _size_bytes(storage, directory), damages=(damage,))
    sizes = {entry.name: entry.size_bytes for entry in storage.list(directory) if not entry.is_directory}
    misfits = tuple(_find_misfits(directory, manifest, sizes))
    return Found(directory, state, name, checkpoint_bytes(manifest), manifest, misfits)


def checkpoint_bytes(manifest: Manifest) -> int:
    """**Pure.** What a checkpoint's data files and indexes take."""
    return sum(worker.data_bytes + worker.index_bytes for worker in manifest.workers)


def _find_misfits(directory: str, manifest: Manifest, sizes: dict[str, int]) -> Iterable[DamageError]:
    for rank, worker in enumerate(manifest.workers):
        expected = (
            (index_name(rank, manifest.world_size), worker.index_bytes),
            (data_name(rank, manifest.world_size), worker.data_bytes),
        )
        for name, size_bytes in expected:
            path = f"{directory}/{name}"
            if name not in sizes:
                yield DamageError(f"{path} is missing", step=manifest.step, path=path)
            elif sizes[name] != size_bytes:
                yield DamageError(
                    f"{path} has {sizes[name]} bytes, {size_bytes} were written", step=manifest.step, path=path
                )


def _size_bytes(storage: Storage, directory: str) -> int:
    return sum(entry.size_bytes for entry in storage.list(directory))


def _read_opening(storage: Storage, generation: int) -> Opening | None:
    if generation == 0:
        return None
    try:
        return read_opening(storage, generation)
    except HoldfastError:
        return None  # It only says by whom; `verify --all` names the damage.


def time_fields(key: str, unix_seconds: float) -> dict[str, Any]:
    """**Pure.** A time in a JSON document: as a figure, and in ISO 8601 for people."""
    return {f"{key}_unix_seconds": unix_seconds, key: iso_text(unix_seconds)}


def problem_fields(problem: HoldfastError) -> dict[str, Any]:
    """**Pure.** Damage, or a place that failed, in a JSON document."""
    return {
        "file": getattr(problem, "path", "") or None,
        "offset_bytes": getattr(problem, "offset_bytes", None),
        "tensor": getattr(problem, "tensor", "") or None,
        "message": problem.message,
    }


def name_fields(name: StepName | None) -> dict[str, Any]:
    """**Pure.** Which checkpoint it is, in a JSON document."""
    return {
        "step": name.step if name else None,
        "generation": name.generation if name else None,
        "attempt": name.attempt if name else None,
    }


def found_fields(found: Found) -> dict[str, Any]:
    """**Pure.** A directory of a run in a JSON document; committed steps have more fields than the others."""
    fields: dict[str, Any] = {
        **name_fields(found.name),
        "directory": found.directory,
        "state": found.state.value,
        "size_bytes": found.size_bytes,
    }
    if found.state is State.UNFINISHED:
        fields["may_be_in_progress"] = found.may_be_in_progress
    if found.state in (State.LIVING, State.OFF_LINE):
        fields |= manifest_fields(found.manifest)
        fields["damages"] = [problem_fields(damage) for damage in found.damages]
    return fields


def manifest_fields(manifest: Manifest | None) -> dict[str, Any]:
    """**Pure.** What a manifest says, in a JSON document; all null where it is damaged."""
    if manifest is None:
        absent = ("committed_at_unix_seconds", "committed_at", "workers", "metrics", "metadata", "versions")
        return dict.fromkeys(absent)
    return {
        **time_fields("committed_at", manifest.committed_at_unix_seconds),
        "workers": manifest.world_size,
        "metrics": manifest.metrics,
        "metadata": manifest.metadata,
        "versions": manifest.versions,
    }


def find_extremes(steps: Sequence[Found]) -> dict[str, tuple[StepName | None, StepName | None]]:
    """**Pure.** For each metric the steps with its lowest and its highest value; of equal values the newest.

    Which of the two is the better one only the job knows. A metric that is the same everywhere has neither.
    """
    values: dict[str, list[tuple[float, StepName]]] = {}
    for one in steps:
        if one.manifest is not None:
            for metric, figure in one.manifest.metrics.items():
                values.setdefault(metric, []).append((figure, one.manifest.name))
    extremes: dict[str, tuple[StepName | None, StepName | None]] = {}
    for metric, measured in values.items():
        lowest = min(measured, key=lambda entry: (entry[0], -entry[1].step))
        highest = max(measured, key=lambda entry: (entry[0], entry[1].step))
        distinct = lowest[0] != highest[0]
        extremes[metric] = (lowest[1], highest[1]) if distinct else (None, None)
    return extremes
