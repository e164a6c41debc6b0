"""Lists the checkpoints and remains in a run's directory, with their manifests and sizes; reads no arrays."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.catalog import Catalog, StoredRun
from holdfast.cli.screen import iso_text
from holdfast.errors import DamageError, HoldfastError, NotFoundError
from holdfast.format.names import DATA_SUFFIX, MANIFEST_NAME, SPARE_NAME, StepName, data_name, index_name
from holdfast.format.records import Manifest, Opening
from holdfast.policies import Referrer
from holdfast.storage import Storage


class State(enum.StrEnum):
    """State of a directory in its run."""

    LIVING = "living"
    """Committed, in the current lineage."""
    OFF_LINE = "off_line"
    """Committed, but off the current lineage: the run went on from elsewhere."""
    UNFINISHED = "unfinished"
    """Without a manifest: being written, or left over from a save that never ended."""
    LOST = "lost"
    """Committed once, and its manifest is gone: no restore uses it, and no job removes it."""
    SET_ASIDE = "set_aside"
    """Renamed for removal, and not removed yet."""
    SPARE = "spare"
    """Not a directory but a file: the data file of a removed checkpoint, kept for the next save to write into."""


@dataclass(frozen=True, slots=True)
class Found:
    """One directory of a run, or the spare file.

    Attributes:
        directory: Its name.
        state: Its state in the run.
        name: The checkpoint that it is or was to be; None if it was set aside, and for the spare.
        size_bytes: Size of its files; for a checkpoint, of its data files and indexes.
        manifest: Its manifest; None if it has none, or it is damaged.
        damages: Damage that is found without reading the arrays.
        may_be_in_progress: Whether a job may be writing it at this moment.
        refers_to: The steps whose directories hold a part of its bytes.
        referred_by: The directories of the steps that refer to bytes in this one.
    """

    directory: str
    state: State
    name: StepName | None
    size_bytes: int
    manifest: Manifest | None = None
    damages: tuple[DamageError, ...] = ()
    may_be_in_progress: bool = False
    refers_to: tuple[StepName, ...] = ()
    referred_by: tuple[str, ...] = ()

    @property
    def referred_bytes(self) -> int:
        """Number of its bytes that are stored in the directories of other steps."""
        return self.manifest.referred_bytes if self.manifest else 0


@dataclass(frozen=True, slots=True)
class Survey:
    """A run at one moment.

    Attributes:
        catalog: Its directories, by name.
        found: Every directory: committed steps in order, those that lost their manifests, unfinished ones, those set
            aside; then the spare.
        opening: The record of the process that opened the newest generation; None if that is not known.
    """

    catalog: Catalog
    found: tuple[Found, ...]
    opening: Opening | None

    def of(self, *states: State) -> list[Found]:
        """The directories in any of these states, in order."""
        return [one for one in self.found if one.state in states]

    @property
    def newest(self) -> Found | None:
        """The newest step of the current lineage, or None."""
        return next((one for one in reversed(self.found) if one.state is State.LIVING), None)

    @property
    def referrers(self) -> list[Referrer[str]]:
        """The committed steps that refer to others, by their directories."""
        return [
            Referrer(one.directory, one.name.step, tuple(name.directory for name in one.refers_to))
            for one in self.found
            if one.name is not None and one.refers_to
        ]


NOTHING: Final = Survey(Catalog((), (), (), (), (), 0, (), None), (), None)
"""The survey of a directory without a run."""


def survey_run(storage: Storage, *, closely: bool = False) -> Survey:
    """**Blocks.** Examines every directory of a run; reads the manifests, but no arrays."""
    catalog = StoredRun(storage).look(closely=closely)
    living = set(catalog.living)
    committed = [
        look_at_step(storage, name.directory, name, State.LIVING if name in living else State.OFF_LINE)
        for name in catalog.committed
    ]
    if not closely and None in committed:
        # The step is being removed, or the summary that lists it as committed is wrong.
        return survey_run(storage, closely=True)
    lost = {*catalog.lost, *StoredRun(storage).find_lost(catalog), *StoredRun(storage).find_journaled(catalog)}
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
        if name not in lost
    )
    trash = (Found(name, State.SET_ASIDE, None, _size_bytes(storage, name)) for name in catalog.trash)
    # A job removes it when it ends, so that it is in use, or that job has died.
    spare = (Found(SPARE_NAME, State.SPARE, None, catalog.spare_bytes or 0, may_be_in_progress=True),)
    found = _connect(
        [
            *(one for one in committed if one is not None),
            *(_look_at_lost(storage, name) for name in sorted(lost)),
            *unfinished,
            *trash,
            *(spare if catalog.spare_bytes is not None else ()),
        ]
    )
    return Survey(catalog, found, _read_opening(storage, catalog.generation))


def _connect(found: Sequence[Found]) -> tuple[Found, ...]:
    """Adds to each directory the steps that refer to it, and to each of those the damage of what it refers to."""
    by_directory = {one.directory: one for one in found}
    referred_by: dict[str, list[str]] = {}
    for one in found:
        for name in one.refers_to:
            referred_by.setdefault(name.directory, []).append(one.directory)
    return tuple(
        replace(
            one,
            damages=(*one.damages, *_find_lacking(one, by_directory)),
            referred_by=tuple(referred_by.get(one.directory, ())),
        )
        for one in found
    )


def _find_lacking(one: Found, by_directory: dict[str, Found]) -> Iterable[DamageError]:
    step = one.name.step if one.name else None
    for name in one.refers_to:
        source = by_directory.get(name.directory)
        if source is None:
            yield DamageError(
                f"{name.directory} is missing; {one.directory} refers to it", step=step, path=name.directory
            )
            continue
        for damage in source.damages:
            if damage.path.endswith(DATA_SUFFIX):
                yield DamageError(f"{damage.message}; {one.directory} refers to it", step=step, path=damage.path)


def look_at_step(storage: Storage, directory: str, name: StepName, state: State) -> Found | None:
    """**Blocks.** Reads a committed step's manifest and compares the sizes of its files with it."""
    try:
        manifest = StoredRun(storage).step(name).manifest()
    except NotFoundError:
        return None
    except DamageError as damage:
        # One that a newer holdfast wrote says nevertheless what it needs.
        refers_to = _read_references(storage, name)
        size_bytes = _size_bytes(storage, directory)
        return Found(directory, state, name, size_bytes, damages=(damage,), refers_to=refers_to)
    sizes = {entry.name: entry.size_bytes for entry in storage.list(directory) if not entry.is_directory}
    if MANIFEST_NAME not in sizes:
        return None  # It goes just now, and nothing of it is damaged.
    misfits = tuple(_find_misfits(directory, manifest, sizes))
    refers_to = tuple(reference.name for reference in manifest.references)
    return Found(directory, state, name, checkpoint_bytes(manifest), manifest, misfits, refers_to=refers_to)


def _look_at_lost(storage: Storage, name: StepName) -> Found:
    path = name.manifest_path
    damage = DamageError(f"{path} is missing, but the step was committed", step=name.step, path=path)
    size_bytes = _size_bytes(storage, name.directory)
    refers_to = _read_references(storage, name)
    return Found(name.directory, State.LOST, name, size_bytes, damages=(damage,), refers_to=refers_to)


def _read_references(storage: Storage, name: StepName) -> tuple[StepName, ...]:
    try:
        return StoredRun(storage).step(name).references()
    except (DamageError, NotFoundError):
        return ()


def checkpoint_bytes(manifest: Manifest) -> int:
    """**Pure.** Size of a checkpoint's data files and indexes."""
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
                    f"{path} has {sizes[name]} bytes, but {size_bytes} were written", step=manifest.step, path=path
                )


def _size_bytes(storage: Storage, directory: str) -> int:
    return sum(entry.size_bytes for entry in storage.list(directory))


def _read_opening(storage: Storage, generation: int) -> Opening | None:
    if generation == 0:
        return None
    try:
        return StoredRun(storage).opening(generation)
    except HoldfastError:
        return None  # It only says by whom; `verify --all` names the damage.


def time_fields(key: str, unix_seconds: float) -> dict[str, Any]:
    """**Pure.** A time in a JSON document: as a number, and in ISO 8601 for people."""
    return {f"{key}_unix_seconds": unix_seconds, key: iso_text(unix_seconds)}


def problem_fields(problem: HoldfastError) -> dict[str, Any]:
    """**Pure.** Damage, or an I/O error, in a JSON document."""
    return {
        "file": getattr(problem, "path", "") or None,
        "offset_bytes": getattr(problem, "offset_bytes", None),
        "tensor": getattr(problem, "tensor", "") or None,
        "message": problem.message,
    }


def name_fields(name: StepName | None) -> dict[str, Any]:
    """**Pure.** The name of a checkpoint, in a JSON document."""
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
        "referred_by": list(found.referred_by),
    }
    if found.state in (State.UNFINISHED, State.SPARE):
        fields["may_be_in_progress"] = found.may_be_in_progress
    if found.state in (State.LIVING, State.OFF_LINE):
        fields |= manifest_fields(found.manifest)
    if found.state in (State.LIVING, State.OFF_LINE, State.LOST):
        fields["damages"] = [problem_fields(damage) for damage in found.damages]
    return fields


def manifest_fields(manifest: Manifest | None) -> dict[str, Any]:
    """**Pure.** The fields of a manifest, in a JSON document; all null if it is damaged."""
    if manifest is None:
        absent = ("committed_at_unix_seconds", "committed_at", "workers", "metrics", "metadata", "versions")
        return dict.fromkeys((*absent, "referred_bytes", "references"))
    return {
        **time_fields("committed_at", manifest.committed_at_unix_seconds),
        "workers": manifest.world_size,
        "metrics": manifest.metrics,
        "metadata": manifest.metadata,
        "versions": manifest.versions,
        "referred_bytes": manifest.referred_bytes,
        "references": [
            {
                **name_fields(reference.name),
                "directory": reference.name.directory,
                "leaves": reference.leaves,
                "size_bytes": reference.size_bytes,
            }
            for reference in manifest.references
        ],
    }


def find_extremes(steps: Sequence[Found]) -> dict[str, tuple[StepName | None, StepName | None]]:
    """**Pure.** For each metric the steps with its lowest and its highest value; of equal values the newest.

    Only the job knows which of the two is better. A metric with the same value everywhere has neither.
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
