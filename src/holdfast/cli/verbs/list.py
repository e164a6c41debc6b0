"""`holdfast list`: lists the checkpoints of a run, one a line."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import click

from holdfast.cli.exit_codes import holdfast_error_fields
from holdfast.cli.runs import RunSummary, show_runs, summarize_run
from holdfast.cli.screen import (
    BAD,
    FAINT,
    GOOD,
    NOTABLE,
    PLAIN,
    STRONG,
    Screen,
    Words,
    age_text,
    counted,
    figure_text,
    iso_text,
    terminal_width,
    unspaced,
    when_text,
    write_json,
)
from holdfast.cli.survey import (
    NOTHING,
    Found,
    State,
    Survey,
    find_extremes,
    found_fields,
    problem_fields,
    survey_run,
    time_fields,
)
from holdfast.cli.target import RunTarget, find_run, find_runs, no_living
from holdfast.errors import HoldfastError, NoCheckpointError
from holdfast.events.kinds import size_text
from holdfast.storage import LocalStorage, local_directory, open_storage

_SHOWN_DAMAGES: Final = 10
"""Of each directory."""


@click.command()
@click.argument("places", metavar="DIRECTORY...", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Also show what a restore does not use, such as unfinished saves.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document with everything in it.")
def command(places: tuple[str, ...], show_all: bool, as_json: bool) -> None:
    """List the checkpoints of a run, or the runs in a directory.

    If DIRECTORY is a run (the directory that a job saves into), its checkpoints are listed, the newest last. These are
    the checkpoints that a restore can use.

    If DIRECTORY holds runs, at most three levels down, or if several directories are given, there is one line for each
    run.
    """
    if len(places) > 1:
        _list_runs(places, as_json)
        return
    run = places[0]
    try:
        target = find_run(run)
    except NoCheckpointError as error:
        root = local_directory(open_storage(run))
        if root is not None and next(find_runs(root), None) is not None:
            _list_runs(places, as_json)
            return
        if as_json:
            write_json(sys.stdout, "list", make_document(open_storage(run).url, NOTHING, error))
        raise
    survey = survey_run(target.storage)
    problem = no_living(survey.catalog, target) if survey.newest is None else None
    if as_json:
        write_json(sys.stdout, "list", make_document(target.storage.url, survey, problem))
    elif survey.found and (show_all or survey.of(State.LIVING)):
        _show(target, survey, show_all, Screen(sys.stdout))
    if problem is not None:
        raise problem


def _list_runs(places: Sequence[str], as_json: bool) -> None:
    summaries: dict[str, RunSummary] = {}
    for place in places:
        root = local_directory(open_storage(place))
        for path in find_runs(root) if root is not None else ():
            location = os.path.normpath(os.path.join(place, os.path.relpath(path, root)))  # noqa: PTH118
            summaries.setdefault(str(path), summarize_run(location, LocalStorage(path)))
    if not summaries:
        raise NoCheckpointError(
            f"there is no run in {', '.join(places)}",
            hint="Name the directory that a job saves into, or a directory that holds runs.",
        )
    if as_json:
        write_json(sys.stdout, "list", {"runs": [summary.fields() for summary in summaries.values()]})
    else:
        show_runs(Screen(sys.stdout), list(summaries.values()))


def _show(target: RunTarget, survey: Survey, show_all: bool, screen: Screen) -> None:
    shown = survey.found if show_all else tuple(survey.of(State.LIVING))
    if screen.is_terminal:
        by, opening = "", survey.opening
        if opening is not None:
            age = age_text(time.time() - opening.opened_at_unix_seconds)
            by = f"   generation {opening.generation}, opened {age} by process {opening.process} on {opening.host}"
        screen.say((target.location, STRONG), (by, FAINT))
        _show_page(survey, shown, screen)
    else:
        _show_plain(survey, shown, screen)
    _remark(survey, show_all)


def _remark(survey: Survey, show_all: bool) -> None:
    """Writes damage and hidden rows to the error stream, so that a pipe gets the table alone."""
    sys.stdout.flush()
    remarks = Screen(sys.stderr)
    # A directory that was lost is missing in two files for each worker, and there may be thousands.
    for damages in (survey.catalog.faults, *(one.damages for one in survey.found)):
        for damage in damages[:_SHOWN_DAMAGES]:
            remarks.say(("damaged ", BAD), damage.message)
        if len(damages) > _SHOWN_DAMAGES:
            more = f"and {len(damages) - _SHOWN_DAMAGES} more places (--json names them all)"
            remarks.say(("damaged ", BAD), more)
    if show_all:
        return
    hidden = []
    if off_line := len(survey.of(State.OFF_LINE)):
        hidden.append(f"{counted(off_line, 'step')} off the current lineage")
    if unfinished := len(survey.of(State.UNFINISHED)):
        hidden.append(f"{unfinished} unfinished")
    if lost := len(survey.of(State.LOST)):
        hidden.append(f"{counted(lost, 'step')} without a manifest")
    if aside := len(survey.of(State.SET_ASIDE)):
        hidden.append(f"{aside} being removed")
    if spare := survey.of(State.SPARE):
        hidden.append(f"a spare file of {size_text(spare[0].size_bytes)}")
    if hidden:
        remarks.say((f"not shown: {', '.join(hidden)} (--all shows them)", FAINT))


def make_document(url: str, survey: Survey, error: HoldfastError | None = None) -> dict[str, Any]:
    """**Pure.** The JSON document of a run, and what is wrong with it."""
    living = survey.of(State.LIVING)
    opening = survey.opening
    opened = None
    if opening is not None:
        opened = {
            "host": opening.host,
            "process": opening.process,
            **time_fields("opened_at", opening.opened_at_unix_seconds),
        }
    return {
        "run": url,
        "generation": survey.catalog.generation,
        "opened": opened,
        "newest_step": survey.newest.name.step if survey.newest and survey.newest.name else None,
        "extremes": {
            metric: {"lowest_step": lowest.step if lowest else None, "highest_step": highest.step if highest else None}
            for metric, (lowest, highest) in find_extremes(living).items()
        },
        "steps": [found_fields(one) for one in living],
        "off_line": [found_fields(one) for one in survey.of(State.OFF_LINE)],
        "unfinished": [found_fields(one) for one in survey.of(State.UNFINISHED)],
        "lost": [found_fields(one) for one in survey.of(State.LOST)],
        "set_aside": [found_fields(one) for one in survey.of(State.SET_ASIDE)],
        "spare": [found_fields(one) for one in survey.of(State.SPARE)],
        "damaged_records": [problem_fields(fault) for fault in survey.catalog.faults],
        "error": holdfast_error_fields(error) if error else None,
    }


LOWEST: Final = "▼"
HIGHEST: Final = "▲"
_GAP: Final = 2
_MARKS_WIDTH: Final = 14
_STATE_MARKS: Final = {
    State.OFF_LINE: "off line",
    State.UNFINISHED: "unfinished",
    State.LOST: "manifest missing",
    State.SET_ASIDE: "being removed",
    State.SPARE: "spare",
}


def _show_plain(survey: Survey, shown: Sequence[Found], screen: Screen) -> None:
    """Writes the table for other programs: no cell is empty or holds a space, so it can be taken apart by them."""
    extremes = find_extremes(survey.of(State.LIVING))
    titles = ["STEP", "GENERATION", "STATE", "COMMITTED", "BYTES", "WORKERS", "DIRECTORY", "MARKS"]
    metric_titles = [unspaced(metric) for metric in extremes]
    rows: list[list[Words]] = []
    for one in shown:
        manifest = one.manifest
        metrics = manifest.metrics if manifest else {}
        marks = ["newest"] if one is survey.newest else []
        marks += ["damaged"] if one.damages else []
        marks += ["may_be_in_progress"] if one.may_be_in_progress else []
        marks += ["referred_to"] if one.referred_by else []
        marks += [f"refers_to:{name.directory}" for name in one.refers_to]
        for metric, (lowest, highest) in extremes.items():
            marks += [f"lowest:{metric}"] if manifest and one.name == lowest else []
            marks += [f"highest:{metric}"] if manifest and one.name == highest else []
        rows.append(
            [
                str(one.name.step) if one.name else "-",
                str(one.name.generation) if one.name else "-",
                one.state.value,
                (iso_text(manifest.committed_at_unix_seconds) if manifest else None) or "-",
                str(one.size_bytes),
                str(manifest.world_size) if manifest else "-",
                unspaced(one.directory),
                unspaced(",".join(marks)) or "-",
                *(figure_text(metrics[metric]) if metric in metrics else "-" for metric in extremes),
            ]
        )
    figures = {"STEP", "GENERATION", "BYTES", "WORKERS", *metric_titles}
    screen.table([*titles, *metric_titles], rows, figures=figures)


def _show_page(survey: Survey, shown: Sequence[Found], screen: Screen) -> None:
    """Writes the table for a person, without the metrics that do not fit on a line, which are named below it."""
    now = time.time()
    with_generation = len({one.name.generation for one in shown if one.name}) > 1
    with_references = any(one.refers_to for one in shown)
    titles = ["step", *(["gen"] if with_generation else []), "committed", "size"]
    titles += ["referred", "workers"] if with_references else ["workers"]
    rows: list[list[Words]] = []
    for one in shown:
        style = STRONG if one is survey.newest else PLAIN if one.state is State.LIVING else FAINT
        row: list[Words] = [(str(one.name.step) if one.name else "-", style)]
        row += [(str(one.name.generation) if one.name else "-", FAINT)] if with_generation else []
        row += [
            when_text(one.manifest.committed_at_unix_seconds if one.manifest else None, now),
            size_text(one.size_bytes),
        ]
        row += [(size_text(one.referred_bytes) if one.refers_to else "-", FAINT)] if with_references else []
        row.append((str(one.manifest.world_size) if one.manifest else "-", FAINT))
        rows.append(row)
    extremes = find_extremes(survey.of(State.LIVING))
    used = _MARKS_WIDTH + sum(_widest([title, *(row[place] for row in rows)]) for place, title in enumerate(titles))
    figures = set(titles) - {"committed"}
    left_out = list(extremes)
    for metric, (lowest, highest) in extremes.items():
        cells = [_metric_cell(one, metric, lowest, highest) for one in shown]
        metric_width = max(terminal_width(metric), *(terminal_width(text) for text, _, _ in cells))
        used += metric_width + 2 * _GAP
        if used > screen.width:
            break
        left_out.remove(metric)
        # A mark stands on the right of its figure, so figures and title are aligned here.
        titles.append(" " * (metric_width - terminal_width(metric)) + metric)
        for row, (text, mark, style) in zip(rows, cells, strict=True):
            row.append((f"{text:>{metric_width}} {mark}", style))
    for row, one in zip(rows, shown, strict=True):
        row.append(_mark(survey, one))
    screen.table([*titles, ""], rows, figures=figures)
    if left_out:
        screen.say((f"no room for {', '.join(left_out)}", FAINT))


def _mark(survey: Survey, one: Found) -> Words:
    if one.state is State.LOST:
        return (_STATE_MARKS[State.LOST], BAD)
    if one.damages:
        return ("newest, damaged" if one is survey.newest else "damaged", BAD)
    if one is survey.newest:
        return ("newest", GOOD)
    if one.may_be_in_progress and one.state is State.UNFINISHED:
        return ("being written?", NOTABLE)
    return (_STATE_MARKS.get(one.state, "referred to" if one.referred_by else ""), FAINT)


def _metric_cell(one: Found, metric: str, lowest: object, highest: object) -> tuple[str, str, str]:
    figure = one.manifest.metrics.get(metric) if one.manifest else None
    if figure is None:
        return "-", "", FAINT
    if one.state is not State.LIVING:
        return figure_text(figure), "", FAINT
    return figure_text(figure), LOWEST if one.name == lowest else HIGHEST if one.name == highest else "", PLAIN


def _widest(cells: Sequence[Words]) -> int:
    return max(terminal_width(cell) for cell in cells) + _GAP
