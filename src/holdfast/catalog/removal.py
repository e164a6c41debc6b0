"""Removes what a person no longer wants of a run: chooses the directories, checks them again, and removes them."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.catalog import Catalog, StoredRun
from holdfast.catalog.stored_step import remove_own_files
from holdfast.catalog.survey import Found, State, Survey, survey_run
from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.format.names import StepName
from holdfast.policies import RetentionPolicy, spare_referred
from holdfast.policies.retention import KeptCandidate, absent_metrics, plan_retention
from holdfast.storage import Storage


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
    spared = spare_referred(chosen, survey.referrers)
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
    """**Blocks.** Raises `StorageError` if a job has begun since the plan was made, or a directory in it is needed
    now."""
    now = survey_run(storage)
    states = {one.directory: one.state for one in now.found}
    moved = any(states.get(one.directory) is not one.state for one in plan.remove)
    needed = _find_needed(storage, plan)
    if moved or any(one.name in needed for one in plan.remove) or now.catalog.generation != before.generation:
        raise StorageError(
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


def carry_out(storage: Storage, plan: RemovalPlan) -> list[Removed]:
    """**Blocks.** Removes everything in the plan. If one removal fails, only the steps that it refers to are kept too.

    A crash in the middle leaves remains that a later removal of what is unfinished finds.
    """
    failures: dict[str, HoldfastError] = {}
    held: dict[StepName, str] = {}
    if plan.committed:
        # A summary would go on vouching for them. A job that runs writes a new one.
        StoredRun(storage).history.drop_summaries()
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
