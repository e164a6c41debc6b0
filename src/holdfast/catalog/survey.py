"""Lists what is in a run's directory; chooses, checks again and removes what a person no longer wants.

Reads manifests and sizes, but no arrays.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, TypeAlias

from holdfast.catalog import Catalog, StoredRun, find_owner
from holdfast.catalog.holds import Hold, list_current_holds
from holdfast.catalog.stored_step import remove_own_files
from holdfast.errors import DamageError, HoldfastError, NotFoundError, StorageError, UsageError
from holdfast.format.names import (
    DATA_SUFFIX,
    MANIFEST_NAME,
    SPARE_NAME,
    StepName,
    data_name,
    index_name,
    is_own_file,
    is_part,
)
from holdfast.format.records import Manifest, Opening
from holdfast.policies import Referrer, RetentionPolicy, spare_referred
from holdfast.policies.retention import KeptCandidate, absent_metrics, plan_retention
from holdfast.process.worker_pool import WorkerPool
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
        size_bytes: Size of its data files and indexes.
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
    def step(self) -> int | None:
        """Its step, or None."""
        return self.name.step if self.name else None

    @property
    def committed_at_unix_seconds(self) -> float | None:
        """When it was committed, if its manifest says so."""
        return self.manifest.committed_at_unix_seconds if self.manifest else None

    @property
    def workers(self) -> int | None:
        """The number of workers that wrote it, if its manifest says so."""
        return self.manifest.world_size if self.manifest else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of that step."""
        return self.manifest.metrics if self.manifest else {}


@dataclass(frozen=True, slots=True)
class Survey:
    """A run at one moment.

    Attributes:
        catalog: Its directories, by name.
        found: Every directory: committed steps in order, those that lost their manifests, unfinished ones, those set
            aside; then the spare.
        opening: The record of the process that opened the newest generation; None if that is not known.
        holds: The pins, and the leases of readers.
    """

    catalog: Catalog
    found: tuple[Found, ...]
    opening: Opening | None
    holds: tuple[Hold, ...] = ()

    def find_holds(self, one: Found) -> list[Hold]:
        """Returns the holds of a step, its pin last."""
        return sorted(
            (hold for hold in self.holds if hold.name == one.name),
            key=lambda hold: (not hold.reader, -hold.renewed_at_unix_seconds, hold.reader),
        )

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
    run = StoredRun(storage)
    catalog = run.look(closely=closely)
    living = set(catalog.living)
    states = {name: State.LIVING if name in living else State.OFF_LINE for name in catalog.committed}
    looked: dict[StepName, Found | None] = {}

    def look(name: StepName) -> None:
        looked[name] = look_at_step(run, name, states[name])

    # Many at once where that is fast, as in a bucket.
    pool = WorkerPool(max(storage.traits.read_parallel, 1), "holdfast-survey")
    try:
        if storage.traits.read_parallel > 1:
            pool.start()
        pool.run(partial(look, name) for name in states)
    finally:
        pool.close()
    committed = [looked[name] for name in states]
    if not closely and None in committed:
        # The step is being removed, or the summary that lists it as committed is wrong.
        return survey_run(storage, closely=True)
    lost = {*catalog.lost, *run.find_lost(catalog), *run.find_journaled(catalog)}
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
            *(_look_at_damaged(run, name, State.LOST, _make_lost_damage(name)) for name in sorted(lost)),
            *unfinished,
            *trash,
            *(spare if catalog.spare_bytes is not None else ()),
        ]
    )
    return Survey(catalog, found, run.try_opening(catalog.generation), tuple(list_current_holds(storage)))


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


def look_at_step(run: StoredRun, name: StepName, state: State) -> Found | None:
    """**Blocks.** Reads a committed step's manifest and compares the sizes of its files with it; None if it is gone."""
    directory = name.directory
    try:
        manifest = run.step(name).manifest()
    except NotFoundError:
        return None
    except DamageError as damage:
        return _look_at_damaged(run, name, state, damage)
    sizes = {entry.name: entry.size_bytes for entry in run.storage.list(directory) if not entry.is_directory}
    if MANIFEST_NAME not in sizes:
        return None  # It goes just now, and nothing of it is damaged.
    misfits = tuple(_find_misfits(directory, manifest, sizes))
    refers_to = tuple(reference.name for reference in manifest.references)
    return Found(directory, state, name, manifest.size_bytes, manifest, misfits, refers_to=refers_to)


def find_misfits(run: StoredRun, name: StepName, manifest: Manifest) -> list[DamageError]:
    """**Blocks.** Compares the sizes of a step's files with a manifest, which need not be there."""
    sizes = {entry.name: entry.size_bytes for entry in run.storage.list(name.directory) if not entry.is_directory}
    return [*_find_misfits(name.directory, manifest, sizes)]


def _look_at_damaged(run: StoredRun, name: StepName, state: State, damage: DamageError) -> Found:
    refers_to: tuple[StepName, ...] = ()
    with suppress(DamageError, NotFoundError):
        # A manifest that a newer holdfast wrote, or the copy of a lost one, says nevertheless what it needs.
        refers_to = run.step(name).references()
    size_bytes = _size_bytes(run.storage, name.directory)
    return Found(name.directory, state, name, size_bytes, damages=(damage,), refers_to=refers_to)


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


def _size_bytes(storage: Storage, *directories: str) -> int:
    """Returns the size of all files but the records of a commit: that of the checkpoint if it is whole."""
    if len(directories) > 1 and storage.traits.lists_deep:
        parts = [(*one.name.rpartition("/")[::2], one.size_bytes) for one in storage.list("", deep=True)]
        known = frozenset(directories)
        listed = [(name, size_bytes) for directory, name, size_bytes in parts if directory in known]
    else:
        listed = [(one.name, one.size_bytes) for directory in directories for one in storage.list(directory)]
    return sum(size_bytes for name, size_bytes in listed if is_part(name) or not is_own_file(name))


def find_damaged_records(run: StoredRun, catalog: Catalog, *, closely: bool) -> list[DamageError]:
    """**Blocks.** Returns the damage of a run's own records, which give the order of its steps.

    These are the faults of the catalog, lost manifests of steps that would be the newest, and, if looked at closely, of
    all others, and the records of all generations.
    """
    lost = [name for name in run.find_lost(catalog) if catalog.newest is None or closely or name > catalog.newest]
    damages = [*catalog.faults, *map(_make_lost_damage, lost)]
    for generation in run.list_generations() if closely else ():
        try:
            run.opening(generation)
        except NotFoundError:
            continue
        except DamageError as damage:
            damages.append(damage)
    return damages


def _make_lost_damage(name: StepName) -> DamageError:
    path = name.manifest_path
    return DamageError(f"{path} is missing, but the step was committed", step=name.step, path=path)


def find_extremes(steps: Sequence[Found]) -> dict[str, tuple[StepName | None, StepName | None]]:
    """**Pure.** For each metric the steps with its lowest and its highest value; of equal values the newest.

    Only the job knows which of the two is better. A metric with the same value everywhere has neither.
    """
    values: dict[str, list[tuple[float, StepName]]] = {}
    for one in steps:
        if one.manifest is not None:
            for metric, figure in one.metrics.items():
                values.setdefault(metric, []).append((figure, one.manifest.name))
    extremes: dict[str, tuple[StepName | None, StepName | None]] = {}
    for metric, measured in values.items():
        lowest = min(measured, key=lambda entry: (entry[0], -entry[1].step))
        highest = max(measured, key=lambda entry: (entry[0], entry[1].step))
        distinct = lowest[0] != highest[0]
        extremes[metric] = (lowest[1], highest[1]) if distinct else (None, None)
    return extremes


RunState: TypeAlias = Literal["running", "ok", "damaged", "lost", "empty", "unreadable"]

_MOST_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as one of many.

    Attributes:
        location: Its directory, as a person would write it.
        url: The same in full.
        state: `running` if a process of this machine has the run open; `damaged` if the newest checkpoint, or the
            record of a generation, can be seen to be; `lost` if manifests are gone; `empty` if it has no checkpoint;
            `unreadable` if its directory cannot be read; else `ok`.
        newest: The newest checkpoint of the current lineage, or None.
        steps: How many checkpoints are in the current lineage.
        size_bytes: What all steps take, unfinished ones and those off the current lineage included.
        opening: Who opened the newest generation; None if that is not known.
        problem: Why it is `unreadable`; else empty.
    """

    location: str
    url: str
    state: RunState
    newest: Found | None = None
    steps: int = 0
    size_bytes: int = 0
    opening: Opening | None = None
    problem: str = ""


def summarize_run(storage: Storage, location: str) -> RunSummary:
    """**Blocks.** Looks at a run: the names of its steps, the sizes of files, and the newest manifest alone."""
    run = StoredRun(storage)
    try:
        for _ in range(_MOST_LOOKS):
            catalog = run.look()
            newest = look_at_step(run, catalog.newest, State.LIVING) if catalog.newest else None
            if catalog.newest is None or newest is not None:
                break  # Else a job that goes on has removed it just now.
        names = (*catalog.committed, *catalog.unfinished, *catalog.lost)
        directories = (*(name.directory for name in names), *catalog.trash)
        size_bytes = _size_bytes(storage, *directories) + (catalog.spare_bytes or 0)
        state, opening = _find_state(run, catalog, newest), run.try_opening(catalog.generation)
        return RunSummary(location, storage.url, state, newest, len(catalog.living), size_bytes, opening)
    except HoldfastError as error:
        return RunSummary(location, storage.url, "unreadable", problem=error.message)


def _find_state(run: StoredRun, catalog: Catalog, newest: Found | None) -> RunState:
    if catalog.faults or (newest is not None and newest.damages):
        return "damaged"
    lost = run.find_lost(catalog)
    if lost and (catalog.newest is None or lost[-1] > catalog.newest):
        return "lost"
    if find_owner(run.storage):
        return "running"
    return "ok" if newest is not None else "empty"


@dataclass(frozen=True, slots=True)
class Wishes:
    """The selection that a person makes.

    Attributes:
        off_line: All steps off the current lineage.
        unfinished: Remains of unfinished saves, directories that are set aside already, and the spare.
        lost: All steps that have lost their manifests.
        job_is_dead: Whether the person confirms that no job saves here, so that the newest generation's unfinished
            saves and the spare can be removed too.
        directories: Single checkpoints, by their directories.
        policy: Which checkpoints of the current lineage to keep; None to keep all that are not named otherwise.
    """

    off_line: bool = False
    unfinished: bool = False
    lost: bool = False
    job_is_dead: bool = False
    directories: frozenset[str] = frozenset()
    policy: RetentionPolicy | None = None


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """The directories to remove, and those that were selected but stay.

    Attributes:
        remove: The directories to remove, in the order of their removal.
        left_alone: Selected as unfinished but not removed: a job may be writing it, or it was committed and has lost
            its manifest.
        kept: Selected but not removed, because a step that stays refers to it; each with that reason.
    """

    remove: tuple[Found, ...]
    left_alone: tuple[Found, ...]
    kept: tuple[tuple[Found, str], ...] = ()

    @property
    def committed(self) -> list[Found]:
        """The checkpoints among the directories to remove."""
        return [one for one in self.remove if one.state in (State.LIVING, State.OFF_LINE)]

    @property
    def size_bytes(self) -> int:
        """Number of bytes that the removal frees."""
        return sum(one.size_bytes for one in self.remove)


def plan_removals(survey: Survey, wishes: Wishes, now_unix_seconds: float) -> RemovalPlan:
    """**Pure.** Chooses the directories of a run to remove.

    Raises:
        UsageError: If no checkpoint has a metric of the policy, or damaged records leave the current lineage of the run
            unknown.
    """
    chosen = set(wishes.directories)
    if wishes.off_line:
        chosen |= {one.directory for one in survey.of(State.OFF_LINE)}
    if wishes.lost:
        chosen |= {one.directory for one in survey.of(State.LOST)}
    if wishes.policy is not None:
        chosen |= _choose_outdated(survey, wishes.policy, now_unix_seconds)
    left_alone = []
    if wishes.unfinished:
        for one in survey.of(State.UNFINISHED, State.SET_ASIDE, State.SPARE):
            if one.may_be_in_progress and not wishes.job_is_dead:
                left_alone.append(one)
            else:
                chosen.add(one.directory)
        left_alone += [one for one in survey.of(State.LOST) if not wishes.lost]
    held = {one.directory: holds[-1].reason for one in survey.found if (holds := survey.find_holds(one))}
    kept = {directory: f"it is {why}" for directory, why in held.items() if directory in chosen}
    chosen -= kept.keys()
    spared = {**spare_referred(chosen, survey.referrers), **kept}
    plan = RemovalPlan(
        tuple(one for one in survey.found if one.directory in chosen and one.directory not in spared),
        tuple(left_alone),
        tuple((one, spared[one.directory]) for one in survey.found if one.directory in spared),
    )
    if plan.committed and survey.catalog.faults:
        raise UsageError(
            f"cannot tell which steps are in the current lineage: {survey.catalog.faults[0].message}",
            hint="No checkpoint is removed while that record is damaged; --unfinished alone works.",
        )
    return plan


def _choose_outdated(survey: Survey, policy: RetentionPolicy, now_unix_seconds: float) -> set[str]:
    """Returns the directories in the lineage that a policy does not keep; one with a damaged manifest is kept."""
    candidates = [
        KeptCandidate(one.directory, manifest.step, manifest.committed_at_unix_seconds, manifest.metrics)
        for one in survey.of(State.LIVING)
        if (manifest := one.manifest) is not None
    ]
    if absent := absent_metrics(policy, candidates):
        known = sorted({metric for candidate in candidates for metric in candidate.metrics})
        raise UsageError(
            f"no checkpoint has the metric {', '.join(map(repr, absent))}",
            hint=f"The metrics are {', '.join(map(repr, known)) or 'none at all'}.",
        )
    return set(plan_retention(policy, candidates, {}, now_unix_seconds).remove)


def check_unchanged(storage: Storage, plan: RemovalPlan, before: Catalog) -> None:
    """**Blocks.** Raises `StorageError` if a job has begun since the plan was made, or what is in it has changed."""
    now = survey_run(storage)
    states = {one.directory: one.state for one in now.found}
    moved = any(states.get(one.directory) is not one.state for one in plan.remove)
    needed = _find_needed(storage, plan)
    if moved or any(one.name in needed for one in plan.remove) or now.catalog.generation != before.generation:
        raise _changed(storage)


def _changed(storage: Storage) -> StorageError:
    return StorageError(
        f"{storage.url} changed while holdfast was looking at it; nothing was removed",
        hint="A job is saving there. Run the command again.",
    )


def _find_needed(storage: Storage, plan: RemovalPlan) -> set[StepName]:
    """**Blocks.** Returns the steps that the remaining steps refer to, as the run is at this moment."""
    going = {one.name for one in plan.remove}
    catalog = StoredRun(storage).look(closely=True)
    staying = (name for name in (*catalog.committed, *catalog.lost) if name not in going)
    return {name for referrer in StoredRun(storage).history.referrers(staying) for name in referrer.refers_to}


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of one removal: whether the directory is gone, or files of others keep it, and the error if it failed."""

    found: Found
    is_gone: bool
    error: HoldfastError | None = None


def carry_out(storage: Storage, plan: RemovalPlan, before: Catalog) -> list[Removed]:
    """**Blocks.** Removes everything in the plan. If one removal fails, only the steps that it refers to are kept too.

    A crash in the middle leaves remains that a later removal of what is unfinished finds.

    Raises:
        StorageError: If a job has begun since the plan was made, which may be about to continue from a step in it.
    """
    failures: dict[str, HoldfastError] = {}
    held: dict[StepName, str] = {}
    if plan.committed:
        # A summary would go on vouching for them. A job that runs writes a new one.
        StoredRun(storage).history.drop_summaries()
        if max(StoredRun(storage).list_generations(), default=0) != before.generation:
            raise _changed(storage)
    # The newest first: what refers to others goes before them.
    for one in sorted(plan.committed, key=lambda one: one.name or StepName(0, 0), reverse=True):
        try:
            if one.name in held:
                raise StorageError(f"{held[one.name]} could not be removed, and refers to it", path=one.directory)
            if one.name is not None:
                StoredRun(storage).step(one.name).withdraw()
        except HoldfastError as error:
            failures[one.directory] = error
            held |= dict.fromkeys(one.refers_to, one.directory)
    try:
        # A job that runs at the same time may have committed a step by now that refers to one of them.
        needed = _find_needed(storage, plan)
    except HoldfastError as error:
        failures |= {one.directory: error for one in plan.committed if one.directory not in failures}
        needed = set()
    for one in plan.remove:
        if one.name in needed:
            text = "a save that has ended just now refers to it; its data stay"
            failures.setdefault(one.directory, StorageError(text, path=one.directory))
    return [_remove(storage, one, failures.get(one.directory)) for one in plan.remove]


def _remove(storage: Storage, one: Found, error: HoldfastError | None) -> Removed:
    if error is not None:
        return Removed(one, False, error)
    try:
        if one.state is State.SPARE:
            return Removed(one, storage.delete([one.directory]))
        if one.name is not None and one.state in (State.UNFINISHED, State.LOST):
            return Removed(one, StoredRun(storage).step(one.name).discard())
        return Removed(one, remove_own_files(storage, one.directory))
    except HoldfastError as failure:
        return Removed(one, False, failure)
