"""`holdfast prune`: removes checkpoints that are no longer wanted, and what unfinished saves have left."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from holdfast.cli.removals import (
    BRING_BACK,
    RemovalPlan,
    Removed,
    Wishes,
    carry_out,
    check_removable,
    check_unchanged,
    plan_removals,
)
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, Column, Screen, Styled, Words, write_json
from holdfast.cli.survey import Found, State, Survey, found_fields, survey_run
from holdfast.cli.target import RunTarget, find_run
from holdfast.cli.wording import counted, size_text
from holdfast.errors import UsageError


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--off-line", is_flag=True, help="Remove all steps off the living line.")
@click.option("--unfinished", is_flag=True, help="Remove what saves that never ended have left.")
@click.option("--lost", is_flag=True, help="Remove steps whose manifests are gone, with their data.")
@click.option("--steps", metavar="A,B,...", default="", help="Remove these steps, on the living line or off it.")
@click.option(
    "--job-is-dead",
    is_flag=True,
    help="With --unfinished, also remove what the newest job was writing: only if it surely runs no more.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask. Needed where there is no terminal to ask on.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document; needs --yes or --dry-run.")
def command(
    run: str,
    off_line: bool,
    unfinished: bool,
    lost: bool,
    steps: str,
    job_is_dead: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove steps that are no longer wanted, and what unfinished saves left.

    The newest whole checkpoint of the living line is never removed: before any checkpoint goes, it is looked for, and
    every byte of it is read. What a running job may be writing is left alone unless --job-is-dead is given.
    """
    target = find_run(run)
    survey = survey_run(target.storage)
    named = tuple(text.strip() for text in steps.split(",") if text.strip())
    wishes = Wishes(off_line, unfinished, lost, job_is_dead, named)
    if not (off_line or unfinished or lost or named):
        raise UsageError(f"what is to be removed from {target.location}?", hint=_offer(survey))
    if job_is_dead and not unfinished:
        raise UsageError("--job-is-dead means nothing without --unfinished")
    may_ask = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
    if not (dry_run or yes or may_ask):
        raise UsageError("nobody can be asked here", hint="Give --yes to remove, or --dry-run to see what would go.")
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


def _offer(survey: Survey) -> str:
    """What each of the selections would remove."""

    def size_of(*states: State) -> str:
        return size_text(sum(one.size_bytes for one in survey.of(*states)))

    offers, empty = [], []
    if off_line := survey.of(State.OFF_LINE):
        offers.append(f"--off-line removes {counted(len(off_line), 'step')} ({size_of(State.OFF_LINE)})")
    else:
        empty.append("--off-line")
    if unfinished := survey.of(State.UNFINISHED, State.SET_ASIDE):
        what = counted(len(unfinished), "unfinished directory", "unfinished directories")
        offers.append(f"--unfinished removes {what} ({size_of(State.UNFINISHED, State.SET_ASIDE)})")
    if survey.of(State.SPARE):
        offers.append(f"--unfinished --job-is-dead removes the spare file ({size_of(State.SPARE)})")
    elif not unfinished:
        empty.append("--unfinished")
    offers.append("--steps A,B removes the steps that it names")
    if lost := survey.of(State.LOST):
        steps = f"{counted(len(lost), 'step')} ({size_of(State.LOST)})"
        what = "has lost its manifest" if len(lost) == 1 else "have lost their manifests"
        offers.append(f"{steps} that jobs committed {what}, and only --lost removes such steps")
    else:
        empty.append("--lost")
    if empty:
        offers.append(f"{' and '.join(empty)} would remove nothing now")
    return "; ".join(offers) + "."


def _show_plan(screen: Screen, plan: RemovalPlan) -> None:

    titles = ("directory", "size", "") if screen.is_terminal else ("DIRECTORY", "BYTES", "STATE")
    columns = [Column(titles[0]), Column(titles[1], is_figure=True), Column(titles[2])]
    rows: list[list[Words]] = [
        [
            one.directory,
            size_text(one.size_bytes) if screen.is_terminal else str(one.size_bytes),
            Styled(one.state.value.replace("_", " "), FAINT) if screen.is_terminal else one.state.value,
        ]
        for one in plan.remove
    ]
    if rows:
        screen.table(columns, rows)
    what = _count(plan.remove)
    screen.say(f"to remove: {what}, {size_text(plan.size_bytes)}" if rows else "there is nothing to remove")
    if any(one.state is State.LOST for one in (*plan.remove, *plan.left_alone)):
        screen.say(f"to bring a lost step back: {BRING_BACK}")
    for one, reason in plan.kept:
        screen.say(Styled("kept: ", NOTABLE), f"{one.directory}, since {reason}")
    for one in plan.left_alone:
        if one.state is State.LOST:
            screen.say(Styled("left alone: ", NOTABLE), f"{one.directory}, which was committed and lost its manifest")
            continue
        doing = "is to use for its next save" if one.state is State.SPARE else "may be writing now"
        screen.say(
            Styled("left alone: ", NOTABLE),
            f"{one.directory}, which a job {doing}; if none runs, --job-is-dead removes it too",
        )


def _count(found: Sequence[Found]) -> str:

    directories = sum(one.state is not State.SPARE for one in found)
    parts = [counted(directories, "directory", "directories")] if directories or not found else []
    return " and ".join([*parts, *("the spare file" for one in found if one.state is State.SPARE)])


def _show_done(screen: Screen, done: Sequence[Removed]) -> None:

    gone = [removed for removed in done if removed.is_gone]
    size = size_text(sum(removed.found.size_bytes for removed in gone))
    screen.say(Styled(f"removed {_count([removed.found for removed in gone])}, {size}", GOOD if gone else ""))
    for removed in done:
        if removed.error is not None:
            screen.say(Styled("not removed: ", BAD), f"{removed.found.directory}: {removed.error.message}")
        elif not removed.is_gone:
            screen.say(Styled("kept: ", NOTABLE), f"{removed.found.directory} holds files that are not holdfast's")


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
