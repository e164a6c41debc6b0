"""`holdfast prune`: removes checkpoints that are no longer wanted, and the remains of unfinished saves."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import click

from holdfast.catalog import Catalog, find_owner
from holdfast.catalog.survey import (
    Found,
    RemovalPlan,
    Removed,
    State,
    Survey,
    Wishes,
    carry_out,
    check_unchanged,
    plan_removals,
    survey_run,
)
from holdfast.cli.completion import RunPath
from holdfast.cli.report import SIZE, Column, Kind, Report, found_fields, verb
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, PLAIN, counted
from holdfast.cli.target import find_run
from holdfast.errors import NoCheckpointError, NoWholeCheckpointError, UsageError
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME, StepName, parse_step_directory
from holdfast.policies import Best, EveryHours, EveryN, LastGood, Latest, Newer, RetentionPolicy, read_keep
from holdfast.policies.retention import AnyKeeps
from holdfast.process.progress import show_progress
from holdfast.restore.verify import CheckOutcome, judge_step
from holdfast.storage import Storage

BRING_BACK: Final = (
    f"`{COMMITTED_NAME}` in the step's directory is a copy of `{MANIFEST_NAME}`, unless it is empty or missing"
)
"""Explains how to restore a lost manifest."""


@verb("prune", json_help="Write one JSON document; needs --yes or --dry-run.")
@click.argument("run", metavar="RUN", type=RunPath(takes_step=False))
@click.option(
    "--keep", metavar="N", help="Keep the N newest steps, or with a time such as 7d the newer ones; remove the others."
)
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
def command(
    report: Report,
    run: str,
    keep: str | None,
    policy: str | None,
    off_line: bool,
    unfinished: bool,
    lost: bool,
    steps: str,
    job_is_dead: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove checkpoints that you no longer want, and remains of unfinished saves.

    The newest whole checkpoint is never removed: prune first finds it, reading every byte of it. What a running job
    may be writing is skipped, unless you give --job-is-dead.
    """
    target = find_run(run)
    storage, survey = target.storage, survey_run(target.storage)
    named = [text.strip() for text in steps.split(",") if text.strip()]
    if keep is not None and policy is not None:
        raise UsageError("--keep and --policy cannot be combined", hint="Write --policy 'Latest(3) | ...'.")
    try:
        wanted = read_keep(int(keep) if keep and keep.isdecimal() and len(keep) < 19 else keep)
    except UsageError as error:
        raise UsageError(
            f"--keep {keep!r} is neither a number from 1 nor a time", hint="Write --keep 3, or 7d."
        ) from error
    wanted = wanted if policy is None else parse_policy(policy)
    if not (off_line or unfinished or lost or named or wanted is not None):
        raise UsageError(
            "nothing is selected",
            hint="Give --keep 3 (the newest three), --policy, --steps A,B, --off-line, --unfinished or --lost; "
            f"`holdfast list --all {target.location}` shows what there is.",
        )
    if job_is_dead and not unfinished:
        raise UsageError("--job-is-dead needs --unfinished", hint="Give both, or leave --job-is-dead out.")
    if job_is_dead and (owner := find_owner(storage)):
        raise UsageError(f"the job is not dead: {owner} has {target.location} open", hint="Stop it first.")
    may_ask = sys.stdin.isatty() and sys.stderr.isatty() and not report.is_json
    if not (dry_run or yes or may_ask):
        raise UsageError(
            "cannot ask for confirmation without a terminal",
            hint="Give --yes to remove, or --dry-run to see what would be removed.",
        )
    directories = frozenset(one.directory for one in _find_named(survey, named))
    wishes = Wishes(off_line, unfinished, lost, job_is_dead, directories, wanted)
    plan = plan_removals(survey, wishes, time.time())
    check_removable(storage, plan, survey.catalog)
    _show_plan(report, plan)
    done: Sequence[Removed] = ()
    if plan.remove and not dry_run:
        if not yes and not _ask(plan):
            report.note("nothing was removed")
            return
        check_unchanged(storage, plan, survey.catalog)
        done = carry_out(storage, plan, survey.catalog)
        _show_done(report, done)
    outcomes = {
        removed.found.directory: "failed" if removed.error else "removed" if removed.is_gone else "kept_foreign_files"
        for removed in done
    }
    report.fields = {
        "run": storage.url,
        "is_dry_run": dry_run,
        "size_bytes": plan.size_bytes,
        "remove": [{**found_fields(one), "outcome": outcomes.get(one.directory)} for one in plan.remove],
        "left_alone": [found_fields(one) for one in plan.left_alone],
        "kept": [{**found_fields(one), "reason": reason} for one, reason in plan.kept],
    }
    report.finish()
    for removed in done:
        if removed.error is not None:
            raise removed.error


def _show_plan(report: Report, plan: RemovalPlan) -> None:
    if plan.remove:
        columns: list[Column[Found]] = [
            Column("directory", lambda one: one.directory),
            Column("size", lambda one: one.size_bytes, SIZE),
            Column("", lambda one: one.state.value, _STATE, plain="STATE", style=FAINT),
        ]
        report.table(columns, plan.remove)
        report.line(f"to remove: {_count(plan.remove)}, {report.size(plan.size_bytes)}")
    else:
        report.line("there is nothing to remove")
    if any(one.state is State.LOST for one in (*plan.remove, *plan.left_alone)):
        report.line(f"to restore a lost step: {BRING_BACK}")
    for one, reason in plan.kept:
        report.line(("kept: ", NOTABLE), f"{one.directory}: {reason}")
    for one in plan.left_alone:
        doing = "may use" if one.state is State.SPARE else "may be writing"
        text = f"a job {doing} {one.directory}; if no job runs here, --job-is-dead removes it too"
        if one.state is State.LOST:
            text = f"{one.directory} was committed and lost its manifest (--lost removes it)"
        report.line(("skipped: ", NOTABLE), text)


_STATE: Final = Kind(lambda state: state.replace("_", " "), str)


def _count(found: Sequence[Found]) -> str:
    directories = sum(one.state is not State.SPARE for one in found)
    parts = [counted(directories, "directory", "directories")] if directories or not found else []
    return " and ".join([*parts, *("the spare file" for one in found if one.state is State.SPARE)])


def _show_done(report: Report, done: Sequence[Removed]) -> None:
    gone = [removed.found for removed in done if removed.is_gone]
    size = report.size(sum(one.size_bytes for one in gone))
    report.line((f"removed {_count(gone)}, {size}", GOOD if gone else PLAIN))
    for removed in done:
        if removed.error is not None:
            report.line(("not removed: ", BAD), f"{removed.found.directory}: {removed.error.message}")
        elif not removed.is_gone:
            report.line(("kept: ", NOTABLE), f"{removed.found.directory} contains files that holdfast did not write")


def _ask(plan: RemovalPlan) -> bool:
    """Asks on the error stream, so that the output can go elsewhere; everything but a plain yes means no."""
    sys.stdout.flush()
    one = "it" if len(plan.remove) == 1 else f"all {len(plan.remove)}"
    sys.stderr.write(f"Remove {one}? There is no way back. [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline().strip().lower()
    return answer in ("y", "yes")


_POLICIES: Final = {
    "Latest": Latest,
    "LastGood": LastGood,
    "EveryN": EveryN,
    "EveryHours": EveryHours,
    "Best": Best,
    "Newer": Newer,
}


def parse_policy(text: str) -> RetentionPolicy:
    """**Pure.** Parses a policy such as `Latest(3) | Best('val_loss')`, written as in a program.

    The text is never executed. Raises `UsageError` if it is not a policy.
    """

    def read(node: ast.expr) -> RetentionPolicy:
        match node:
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return AnyKeeps((read(left), read(right)))
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="hf" | "holdfast"), attr=name)):
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


def _find_named(survey: Survey, steps: Iterable[str]) -> Iterator[Found]:
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
        with show_progress(f"is step {name.step} whole?") as bar:
            verdict = judge_step(storage, name.directory, name, expect=bar.expect, progress=bar.advance)
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
