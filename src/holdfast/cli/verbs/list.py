"""`holdfast list`: lists the checkpoints of a run, or the runs in a directory, one a line."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import click

from holdfast.catalog.holds import Hold
from holdfast.catalog.survey import (
    NOTHING,
    Found,
    RunState,
    RunSummary,
    State,
    Survey,
    find_extremes,
    summarize_run,
    survey_run,
)
from holdfast.cli.completion import RunPath
from holdfast.cli.report import (
    COUNT,
    FIGURE,
    NAME,
    SIZE,
    TIME,
    Column,
    Kind,
    Report,
    found_fields,
    make_fields,
    manifest_fields,
    problem_fields,
    sort_rows,
    time_fields,
    verb,
)
from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, PLAIN, STRONG, Words, age_text, counted, unspaced
from holdfast.cli.target import find_run, find_runs, join_place, no_living, open_below, takes_tiers
from holdfast.errors import NoCheckpointError, UsageError
from holdfast.format.names import StepName
from holdfast.numbers import size_text
from holdfast.report.facts import find_places
from holdfast.restore.read import open_pool
from holdfast.storage import Storage, open_storage

LOWEST: Final = "▼"
HIGHEST: Final = "▲"
_SHOWN_DAMAGES: Final = 10
"""Of each directory."""


@verb("list", json_help="Write one JSON document with everything in it.")
@click.argument("places", metavar="[DIRECTORY]...", type=RunPath(takes_step=False), nargs=-1)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Also show what a restore does not use, such as unfinished saves.",
)
@click.option(
    "--sort",
    "order",
    metavar="COLUMN",
    default="",
    help="Sort by a column, such as run, saved, step, size or a metric; -COLUMN for the greatest, or newest, first.",
)
@takes_tiers
def command(report: Report, places: tuple[str, ...], show_all: bool, order: str, tiers: tuple[str, ...]) -> None:
    """List the checkpoints of a run, or the runs in a directory, the current one by default.

    DIRECTORY can be the URL of a bucket, or of a prefix in it.

    If DIRECTORY is a run (the directory that a job saves into), its checkpoints are listed, the newest last. These are
    the checkpoints that a restore can use.

    If DIRECTORY holds runs, at most three levels down, or if several directories are given, there is one line for each
    run. With --tier, what a run has in farther tiers is listed as well, with a column that says where each step is.
    """
    places = places or (".",)
    if tiers and len(places) > 1:
        raise UsageError("--tier is for one run", hint="Name one directory.")
    try:
        target = find_run(places[0], tiers) if len(places) == 1 else None
    except NoCheckpointError as error:
        storage = open_storage(places[0])
        if tiers or next(iter(find_runs(storage)), None) is None:
            report.fields, report.error = _make_document(storage.url, NOTHING, []), error
            return
        target = None
    if target is None:
        _list_runs(report, places, order)
        return
    survey = survey_run(target.storage)
    shown = list(survey.found) if show_all else survey.of(State.LIVING)
    columns = list_columns(survey, shown, show_all=show_all)
    if tiers:
        columns.insert(-1, _make_tier_column(target.storage))
    report.fields = _make_document(target.storage.url, survey, columns)
    if survey.newest is None:
        report.error = no_living(survey.catalog, target)
    if not shown:
        return
    if report.is_page:
        by, opening = "", survey.opening
        if opening is not None:
            age = age_text(time.time() - opening.opened_at_unix_seconds)
            which = f"generation {opening.generation}, " if show_all else ""
            by = f"   {which}opened {age} by process {opening.process} on {opening.host}"
        report.line((target.location, STRONG), (by, FAINT))
    report.table(columns, sort_rows(columns, shown, order))
    _remark(report, survey, show_all)


def list_columns(survey: Survey, shown: Sequence[Found], *, show_all: bool = False) -> list[Column[Found]]:
    """**Pure.** The columns of a list of checkpoints. A fact with a `key` is in the JSON document too."""
    extremes, newest, styles = find_extremes(survey.of(State.LIVING)), survey.newest, {State.LIVING: PLAIN}
    several_generations = len({one.name.generation for one in shown if one.name}) > 1
    with_references = any(one.refers_to for one in shown)
    return [
        Column("step", lambda one: (one.step, STRONG if one is newest else styles.get(one.state, FAINT)), COUNT),
        Column(
            "gen",
            lambda one: one.name.generation if one.name else None,
            COUNT,
            plain="GENERATION",
            style=FAINT,
            on_page=show_all and several_generations,
        ),
        Column("state", lambda one: one.state.value, on_page=False),
        Column("saved", lambda one: one.committed_at_unix_seconds, TIME, plain="COMMITTED"),
        Column("size", lambda one: one.size_bytes, SIZE, may_go=2),
        Column(
            "referred",
            lambda one: one.manifest.referred_bytes if one.manifest and one.refers_to else None,
            SIZE,
            style=FAINT,
            on_page=with_references,
            in_pipe=False,
            may_go=2,
        ),
        Column("workers", lambda one: one.workers, COUNT, style=FAINT, may_go=3),
        Column("directory", lambda one: one.directory, NAME, on_page=False),
        Column("marks", lambda one: ",".join(_list_marks(survey, one, extremes)) or None, NAME, on_page=False),
        *(_make_metric_column(metric, *ends) for metric, ends in extremes.items()),
        Column("", lambda one: _mark(survey, one), in_pipe=False),
    ]


_PLACES: Final = Kind(", ".join, ",".join)


def _make_tier_column(storage: Any) -> Column[Found]:
    """**Blocks.** Returns the column that says in which tiers a step is committed."""
    places = find_places(storage)
    return Column(
        "is in",
        lambda one: places.get(one.name) if one.name else None,
        _PLACES,
        plain="TIERS",
        key="tiers",
    )


def _list_marks(survey: Survey, one: Found, extremes: Mapping[str, Sequence[StepName | None]]) -> list[str]:
    marks = ["newest"] if one is survey.newest else []
    marks += ["damaged"] if one.damages else []
    marks += ["not_finite"] if _is_not_finite(one) else []
    marks += ["may_be_in_progress"] if one.may_be_in_progress else []
    marks += ["referred_to"] if one.referred_by else []
    marks += [f"read_by:{unspaced(hold.reader)}" if hold.reader else "pinned" for hold in survey.find_holds(one)]
    marks += [f"refers_to:{name.directory}" for name in one.refers_to]
    for metric, (lowest, highest) in extremes.items() if one.manifest else ():
        marks += [f"lowest:{metric}"] if one.name == lowest else []
        marks += [f"highest:{metric}"] if one.name == highest else []
    return marks


def _make_metric_column(metric: str, lowest: StepName | None, highest: StepName | None) -> Column[Found]:
    def find(one: Found) -> tuple[float | None, str]:
        figure = one.metrics.get(metric)
        return figure, FAINT if figure is None or one.state is not State.LIVING else PLAIN

    def mark(one: Found) -> str:
        if one.state is not State.LIVING or metric not in one.metrics:
            return ""
        return LOWEST if one.name == lowest else HIGHEST if one.name == highest else ""

    return Column(metric, find, FIGURE, plain=unspaced(metric), mark=mark, may_go=1)


_STATE_MARKS: Final = {
    State.OFF_LINE: "off line",
    State.UNFINISHED: "unfinished",
    State.SET_ASIDE: "being removed",
    State.SPARE: "spare",
}


def _mark(survey: Survey, one: Found) -> Words:
    if one.state is State.LOST:
        return ("manifest missing", BAD)
    if one.damages:
        return ("newest, damaged" if one is survey.newest else "damaged", BAD)
    is_newest, is_bad = one is survey.newest, _is_not_finite(one)
    marks = ["newest"] * is_newest + ["not finite"] * is_bad + [*map(_describe_hold, survey.find_holds(one))]
    if marks:
        return (", ".join(marks), BAD if is_bad else GOOD if is_newest else NOTABLE)
    if one.may_be_in_progress and one.state is State.UNFINISHED:
        return ("being written?", NOTABLE)
    return (_STATE_MARKS.get(one.state, "referred to" if one.referred_by else ""), FAINT)


def _is_not_finite(one: Found) -> bool:
    return one.manifest is not None and not one.manifest.facts.is_finite


def _describe_hold(hold: Hold) -> str:
    # By the clock of the reader, which may be another machine's.
    ago = f" ({age_text(time.time() - hold.renewed_at_unix_seconds)})" if hold.reader else ""
    return hold.reason + ago


def _remark(report: Report, survey: Survey, show_all: bool) -> None:
    """Notes damage and hidden rows."""
    # A directory that was lost is missing in two files for each worker, and there may be thousands.
    for damages in (survey.catalog.faults, *(one.damages for one in survey.found)):
        for damage in damages[:_SHOWN_DAMAGES]:
            report.note(("damaged ", BAD), damage.message)
        if len(damages) > _SHOWN_DAMAGES:
            more = f"and {len(damages) - _SHOWN_DAMAGES} more places (--json names them all)"
            report.note(("damaged ", BAD), more)
    if show_all:
        return
    count = {state: len(survey.of(state)) for state in State}
    hidden = {
        State.OFF_LINE: f"{counted(count[State.OFF_LINE], 'step')} off the current lineage",
        State.UNFINISHED: f"{count[State.UNFINISHED]} unfinished",
        State.LOST: f"{counted(count[State.LOST], 'step')} without a manifest",
        State.SET_ASIDE: f"{count[State.SET_ASIDE]} being removed",
        State.SPARE: f"a spare file of {size_text(survey.catalog.spare_bytes or 0)}",
    }
    if texts := [text for state, text in hidden.items() if count[state]]:
        report.note((f"not shown: {', '.join(texts)} (--all shows them)", FAINT))


def _make_document(url: str, survey: Survey, columns: Sequence[Column[Found]]) -> dict[str, Any]:
    living = survey.of(State.LIVING)
    opening = survey.opening

    def list_fields(state: State) -> list[dict[str, Any]]:
        return [found_fields(one) | _hold_fields(survey, one) | make_fields(columns, one) for one in survey.of(state)]

    return {
        "run": url,
        "generation": survey.catalog.generation,
        "opened": opening
        and {
            "host": opening.host,
            "process": opening.process,
            **time_fields("opened_at", opening.opened_at_unix_seconds),
        },
        "newest_step": survey.newest.step if survey.newest else None,
        "extremes": {
            metric: {"lowest_step": lowest.step if lowest else None, "highest_step": highest.step if highest else None}
            for metric, (lowest, highest) in find_extremes(living).items()
        },
        **{"steps" if state is State.LIVING else state.value: list_fields(state) for state in State},
        "damaged_records": [problem_fields(fault) for fault in survey.catalog.faults],
    }


def _hold_fields(survey: Survey, one: Found) -> dict[str, Any]:
    if one.state not in (State.LIVING, State.OFF_LINE):
        return {}
    holds = survey.find_holds(one)
    return {
        "is_pinned": any(not hold.reader for hold in holds),
        "readers": [
            {"name": hold.reader, **time_fields("renewed_at", hold.renewed_at_unix_seconds)}
            for hold in holds
            if hold.reader
        ],
    }


_RUN_STYLES: Final[dict[RunState, str]] = {
    "running": GOOD,
    "ok": PLAIN,
    "damaged": BAD,
    "lost": BAD,
    "empty": FAINT,
    "unreadable": BAD,
}


def _list_runs(report: Report, places: Sequence[str], order: str) -> None:
    found: dict[str, RunSummary] = {}
    for place in places:
        storage = open_storage(place)
        below = {join_place(place, relative): open_below(storage, relative) for relative in find_runs(storage)}
        summaries: dict[str, RunSummary] = {}
        # Of a directory one after the other.
        with open_pool(storage, 1, 0) as pool:
            pool.run(partial(_summarize, summaries, *each) for each in below.items())
        for location, one in below.items():
            found.setdefault(one.url, summaries[location])
    if not found:
        raise NoCheckpointError(
            f"there is no run in {', '.join(places)}",
            hint="Name the directory that a job saves into, or a directory that holds runs.",
        )
    runs = list(found.values())
    columns = list_run_columns(runs)
    runs = sort_rows(columns, runs, order)
    report.fields = {"runs": [_run_fields(run) | make_fields(columns, run) for run in runs]}
    report.table(columns, runs)
    if report.is_page:
        report.line((f"{counted(len(runs), 'run')}, {size_text(sum(run.size_bytes for run in runs))}", FAINT))
    for run in runs:
        if run.problem:
            report.note(("unreadable ", BAD), run.problem)
        for damage in run.newest.damages[:1] if run.newest else ():
            report.note(("damaged ", BAD), f"{run.location}: {damage.message}")


def _summarize(summaries: dict[str, RunSummary], location: str, run: Storage) -> None:
    summaries[location] = summarize_run(run, location)


def list_run_columns(runs: Sequence[RunSummary]) -> list[Column[RunSummary]]:
    """**Pure.** The columns of a list of runs. A fact with a `key` is in the JSON document too."""

    def column(metric: str) -> Column[RunSummary]:
        def find(run: RunSummary) -> float | None:
            return run.newest.metrics.get(metric) if run.newest else None

        return Column(metric, find, FIGURE, plain=unspaced(metric), may_go=1)

    metrics = dict.fromkeys(metric for run in runs if run.newest for metric in run.newest.metrics)
    return [
        Column("run", lambda run: run.location, NAME, style=STRONG),
        Column("step", lambda run: run.newest and run.newest.step, COUNT),
        Column(
            "saved", lambda run: run.newest and run.newest.committed_at_unix_seconds, TIME, plain="COMMITTED", may_go=1
        ),
        Column("steps", lambda run: run.steps, COUNT, style=FAINT, may_go=3),
        Column("size", lambda run: run.size_bytes, SIZE, may_go=2),
        Column("workers", lambda run: run.newest and run.newest.workers, COUNT, on_page=False),
        Column("state", lambda run: (run.state, _RUN_STYLES[run.state])),
        *map(column, metrics),
    ]


def _run_fields(run: RunSummary) -> dict[str, Any]:
    of_newest = manifest_fields(run.newest.manifest if run.newest else None)
    return {
        "run": run.url,
        "state": run.state,
        "newest_step": run.newest.step if run.newest else None,
        "committed_at_unix_seconds": of_newest["committed_at_unix_seconds"],
        "committed_at": of_newest["committed_at"],
        "steps": run.steps,
        "size_bytes": run.size_bytes,
        "workers": of_newest["workers"],
        "metrics": of_newest["metrics"],
        "host": run.opening.host if run.opening else None,
        "process": run.opening.process if run.opening else None,
        "problem": run.problem or None,
    }
