"""`holdfast prune`: removes checkpoints that are no longer wanted, and the remains of unfinished saves."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from holdfast.catalog import Catalog, StoredRun, find_owner
from holdfast.catalog.stored_step import remove_own_files
from holdfast.cli.screen import (
    BAD,
    FAINT,
    GOOD,
    NOTABLE,
    PLAIN,
    Screen,
    Words,
    counted,
    write_json,
)
from holdfast.cli.survey import Found, State, Survey, found_fields, survey_run
from holdfast.cli.target import RunTarget, find_run
from holdfast.cli.verbs.verify import CheckOutcome, judge_step
from holdfast.errors import HoldfastError, NoCheckpointError, NoWholeCheckpointError, StorageError, UsageError
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME, StepName, parse_step_directory
from holdfast.policies import Best, EveryHours, EveryN, Latest, Newer, RetentionPolicy, spare_referred
from holdfast.policies.retention import AnyKeeps, KeptCandidate, absent_metrics, plan_retention
from holdfast.storage import Storage


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--keep", metavar="N", type=click.IntRange(1), help="Keep the N newest steps and remove the older ones.")
@click.option(
    "--policy",
    metavar="POLICY",
    help="Remove what a policy does not keep, such as \"Latest(3) | Best('val_loss')\".",
)
@click.option("--off-line", is_flag=True, help="Remove all steps that are not in the current lineage.")
@click.option("--unfinished", is_flag=True, help="Remove the remains of saves that never finished.")
@click.option("--lost", is_flag=True, help="Remove steps whose manifests are gone, with their data.")
@click.option("--steps", metavar="A,B,...", default="", help="Remove these steps, in the current lineage or not.")
@click.option(
    "--job-is-dead",
    is_flag=True,
    help="With --unfinished, also remove what the newest job was writing. Make sure that it no longer runs.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation. Needed without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document; needs --yes or --dry-run.")
def command(
    run: str,
    keep: int | None,
    policy: str | None,
    off_line: bool,
    unfinished: bool,
    lost: bool,
    steps: str,
    job_is_dead: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove checkpoints that you no longer want, and remains of unfinished saves.

    The newest whole checkpoint is never removed: prune first finds it, reading every byte of it. What a running job
    may be writing is skipped, unless you give --job-is-dead.
    """
    target = find_run(run)
    survey = survey_run(target.storage)
    named = tuple(text.strip() for text in steps.split(",") if text.strip())
    if keep is not None and policy is not None:
        raise UsageError("--keep and --policy cannot be combined", hint=f"Write --policy 'Latest({keep}) | ...'.")
    wanted = Latest(keep) if keep is not None else None if policy is None else parse_policy(policy)
    wishes = Wishes(off_line, unfinished, lost, job_is_dead, named, wanted)
    if not (off_line or unfinished or lost or named or wanted is not None):
        raise UsageError(
            "nothing is selected",
            hint="Give --keep 3 (the newest three), --policy, --steps A,B, --off-line, --unfinished or --lost; "
            f"`holdfast list --all {target.location}` shows what there is.",
        )
    if job_is_dead and not unfinished:
        raise UsageError("--job-is-dead needs --unfinished", hint="Give both, or leave --job-is-dead out.")
    if job_is_dead and (owner := find_owner(target.storage)):
        raise UsageError(f"the job is not dead: {owner} has {target.location} open", hint="Stop it first.")
    may_ask = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
    if not (dry_run or yes or may_ask):
        raise UsageError(
            "cannot ask for confirmation without a terminal",
            hint="Give --yes to remove, or --dry-run to see what would be removed.",
        )
    plan = plan_removals(survey, wishes)
    check_removable(target.storage, plan, survey.catalog)
    screen = None if as_json else Screen(sys.stdout)
    if screen is not None:
        _show_plan(screen, plan)
    done: Sequence[Removed] = ()
    if plan.remove and not dry_run:
        if not yes and not _ask(plan):
            click.echo("nothing was removed", err=True)
            return
        check_unchanged(target.storage, plan, survey.catalog)
        done = carry_out(target.storage, plan)
        if screen is not None:
            _show_done(screen, done)
    if screen is None:
        write_json(sys.stdout, "prune", _document(target, plan, done, dry_run))
    for removed in done:
        if removed.error is not None:
            raise removed.error


def _show_plan(screen: Screen, plan: RemovalPlan) -> None:
    titles = ("directory", "size", "") if screen.is_terminal else ("DIRECTORY", "BYTES", "STATE")
    rows: list[list[Words]] = [
        [
            one.directory,
            screen.size(one.size_bytes, unit=""),
            (one.state.value.replace("_", " "), FAINT) if screen.is_terminal else one.state.value,
        ]
        for one in plan.remove
    ]
    if rows:
        screen.table(titles, rows, figures={titles[1]})
    what = _count(plan.remove)
    screen.say(f"to remove: {what}, {screen.size(plan.size_bytes)}" if rows else "there is nothing to remove")
    if any(one.state is State.LOST for one in (*plan.remove, *plan.left_alone)):
        screen.say(f"to restore a lost step: {BRING_BACK}")
    for one, reason in plan.kept:
        screen.say(("kept: ", NOTABLE), f"{one.directory}: {reason}")
    for one in plan.left_alone:
        if one.state is State.LOST:
            screen.say(
                ("skipped: ", NOTABLE), f"{one.directory} was committed and lost its manifest (--lost removes it)"
            )
            continue
        doing = "may use" if one.state is State.SPARE else "may be writing"
        screen.say(
            ("skipped: ", NOTABLE),
            f"a job {doing} {one.directory}; if no job runs here, --job-is-dead removes it too",
        )


def _count(found: Sequence[Found]) -> str:
    directories = sum(one.state is not State.SPARE for one in found)
    parts = [counted(directories, "directory", "directories")] if directories or not found else []
    return " and ".join([*parts, *("the spare file" for one in found if one.state is State.SPARE)])


def _show_done(screen: Screen, done: Sequence[Removed]) -> None:
    gone = [removed for removed in done if removed.is_gone]
    size = screen.size(sum(removed.found.size_bytes for removed in gone))
    screen.say((f"removed {_count([removed.found for removed in gone])}, {size}", GOOD if gone else PLAIN))
    for removed in done:
        if removed.error is not None:
            screen.say(("not removed: ", BAD), f"{removed.found.directory}: {removed.error.message}")
        elif not removed.is_gone:
            screen.say(("kept: ", NOTABLE), f"{removed.found.directory} contains files that holdfast did not write")


def _document(target: RunTarget, plan: RemovalPlan, done: Sequence[Removed], dry_run: bool) -> dict[str, Any]:
    outcomes = {
        removed.found.directory: "failed" if removed.error else "removed" if removed.is_gone else "kept_foreign_files"
        for removed in done
    }
    return {
        "run": target.storage.url,
        "is_dry_run": dry_run,
        "size_bytes": plan.size_bytes,
        "remove": [{**found_fields(one), "outcome": outcomes.get(one.directory)} for one in plan.remove],
        "left_alone": [found_fields(one) for one in plan.left_alone],
        "kept": [{**found_fields(one), "reason": reason} for one, reason in plan.kept],
    }


def _ask(plan: RemovalPlan) -> bool:
    """Asks on the error stream, so that the output can go elsewhere; everything but a plain yes means no."""
    sys.stdout.flush()
    one = "it" if len(plan.remove) == 1 else f"all {len(plan.remove)}"
    sys.stderr.write(f"Remove {one}? There is no way back. [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower()
    return answer in ("y", "yes")


@dataclass(frozen=True, slots=True)
class Wishes:
    """The selection that the command line makes.

    Attributes:
        off_line: All steps off the current lineage.
        unfinished: Remains of unfinished saves, directories that are set aside already, and the spare.
        lost: All steps that have lost their manifests.
        job_is_dead: Whether the user confirms that no job saves here, so that the newest generation's unfinished saves
            and the spare can be removed too.
        steps: Single checkpoints, each a step or the name of its directory.
        policy: Which checkpoints of the current lineage to keep; None to keep all that are not named otherwise.
    """

    off_line: bool
    unfinished: bool
    lost: bool
    job_is_dead: bool
    steps: tuple[str, ...]
    policy: RetentionPolicy | None = None


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """The directories to remove, and those that were selected but stay.

    Attributes:
        remove: The directories to remove, in the order of their removal.
        left_alone: Selected by `--unfinished` but not removed: a job may be writing it, or it was committed and has
            lost its manifest.
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


def plan_removals(survey: Survey, wishes: Wishes) -> RemovalPlan:
    """**Pure.** Chooses the directories of a run to remove.

    Raises:
        UsageError: If a selection is ambiguous, or damaged records leave the current lineage of the run unknown.
        NoCheckpointError: If a step that was named does not exist.
    """
    chosen = {one.directory for one in _choose_named(survey, wishes.steps)}
    if wishes.off_line:
        chosen |= {one.directory for one in survey.of(State.OFF_LINE)}
    if wishes.lost:
        chosen |= {one.directory for one in survey.of(State.LOST)}
    if wishes.policy is not None:
        chosen |= set(_choose_outdated(survey, wishes.policy))
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


BRING_BACK: Final = (
    f"`{COMMITTED_NAME}` in the step's directory is a copy of `{MANIFEST_NAME}`, unless it is empty or missing"
)
"""Explains how to restore a lost manifest."""


def _choose_outdated(survey: Survey, policy: RetentionPolicy) -> Iterable[str]:
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
    return plan_retention(policy, candidates, {}, time.time()).remove


_POLICIES: Final = {"Latest": Latest, "EveryN": EveryN, "EveryHours": EveryHours, "Best": Best, "Newer": Newer}


def parse_policy(text: str) -> RetentionPolicy:
    """**Pure.** Parses a policy such as `Latest(3) | Best('val_loss')`, written as in a program.

    The text is never executed. Raises `UsageError` if it is not a policy.
    """

    def read(node: ast.expr) -> RetentionPolicy:
        match node:
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return AnyKeeps((read(left), read(right)))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="hf"), attr=name)):
                arguments = [ast.literal_eval(argument) for argument in node.args]
                keywords = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg is not None}
                if name in _POLICIES and len(keywords) == len(node.keywords):
                    made: RetentionPolicy = _POLICIES[name](*arguments, **keywords)
                    return made
        raise ValueError(text)

    try:
        return read(ast.parse(text.strip(), mode="eval").body)
    except UsageError as error:
        raise UsageError(f"--policy {text!r}: {error.message}", hint=error.hint) from error
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise UsageError(
            f"--policy {text!r} is not a policy",
            hint=f"Write {', '.join(_POLICIES)} with their arguments, joined by |: "
            "\"Latest(3) | Best('val_loss', mode='min') | EveryN(1000)\".",
        ) from error


def _choose_named(survey: Survey, steps: Iterable[str]) -> Iterable[Found]:
    committed = survey.of(State.LIVING, State.OFF_LINE)
    for text in steps:
        if parse_step_directory(text) is not None:
            matching = [one for one in committed if one.directory == text]
        elif text.isascii() and text.isdigit():
            matching = [one for one in committed if one.name and one.name.step == int(text[:20])]
        else:
            raise UsageError(f"--steps {text!r} is not a step", hint="Write steps and commas, as in --steps 300,500.")
        lost = [name for one in survey.of(State.LOST) if (name := one.name) and text in (one.directory, str(name.step))]
        if lost and not matching:
            raise UsageError(
                f"step {lost[0].step} was committed, and its manifest is gone; --steps does not remove such a step",
                hint=f"Restore the manifest: {BRING_BACK}. Or remove all such steps with --lost.",
            )
        if not matching:
            raise NoCheckpointError(f"there is no checkpoint {text}", hint="`holdfast list --all` shows what is there.")
        if len(matching) > 1:
            names = ", ".join(one.directory for one in matching)
            raise UsageError(
                f"there are {len(matching)} checkpoints of step {text}",
                hint=f"Name the directories instead: {names}.",
            )
        yield matching[0]


def find_newest_whole(storage: Storage, living: Sequence[StepName]) -> StepName:
    """**Blocks.** Reads the lineage, the newest first, until one is whole; `NoWholeCheckpointError` if none is."""
    for name in reversed(living):
        verdict = judge_step(storage, name.directory, name, f"is step {name.step} whole?")
        if verdict.outcome is CheckOutcome.WHOLE:
            return name
        if verdict.outcome is CheckOutcome.UNREADABLE:
            raise verdict.problems[-1]
    raise NoWholeCheckpointError(
        f"{storage.url}: no checkpoint of the current lineage is whole, so nothing is removed",
        damages=(),
        hint="Other steps may be all you have. To remove one all the same, delete its directory by hand.",
    )


def check_removable(storage: Storage, plan: RemovalPlan, catalog: Catalog) -> None:
    """**Blocks.** Makes sure that a whole checkpoint stays in the current lineage; reads at least one for that.

    Raises `UsageError` if the newest whole one is among what is to go, and `NoWholeCheckpointError` if there is none.
    """
    if not plan.committed:
        return
    newest = find_newest_whole(storage, catalog.living)
    if any(one.name == newest for one in plan.committed):
        raise UsageError(
            f"step {newest.step} is the newest whole checkpoint of the current lineage, which is never removed",
            hint="Leave it out, or first make an older step the newest: `holdfast rollback RUN@STEP`.",
        )


def check_unchanged(storage: Storage, plan: RemovalPlan, before: Catalog) -> None:
    """**Blocks.** Raises `UsageError` if a job has begun since the plan was made, or what is to go is needed now."""
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
    """Result of one removal."""

    found: Found
    is_gone: bool
    error: HoldfastError | None = None


def carry_out(storage: Storage, plan: RemovalPlan) -> list[Removed]:
    """**Blocks.** Removes everything in the plan. If one removal fails, only the steps that it refers to are kept too.

    A crash in the middle leaves remains that `--unfinished` removes.
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
        # A job that runs beside this may have committed a step by now that refers to one of them.
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
            storage.remove(one.directory)
            return Removed(one, True)
        if one.name is None:
            return Removed(one, remove_own_files(storage, one.directory))
        if one.state in (State.UNFINISHED, State.LOST):
            return Removed(one, StoredRun(storage).step(one.name).discard())
        return Removed(one, remove_own_files(storage, one.directory))
    except HoldfastError as failure:
        return Removed(one, False, failure)
