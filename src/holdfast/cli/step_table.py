"""The table of a run's steps. Pure, but for the calendar of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, PLAIN, STRONG, Column, Styled, Words, terminal_width
from holdfast.cli.survey import Found, State, Survey, find_extremes
from holdfast.cli.wording import age_text, figure_text, iso_text, local_time_text, size_text

LOWEST: Final = "▼"
HIGHEST: Final = "▲"
_GAP: Final = 2
_MARKS_WIDTH: Final = 14
_LONG_AGO_SECONDS: Final = 2 * 86400
_STATE_MARKS: Final = {
    State.OFF_LINE: "off line",
    State.UNFINISHED: "unfinished",
    State.LOST: "manifest missing",
    State.SET_ASIDE: "being removed",
    State.SPARE: "spare",
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table that can be shown.

    Attributes:
        columns: Its columns.
        rows: Its cells, row by row.
        metrics_left_out: The metrics that a terminal has no room for.
    """

    columns: list[Column]
    rows: list[list[Words]]
    metrics_left_out: tuple[str, ...] = ()


def plain_sheet(survey: Survey, shown: Sequence[Found]) -> Sheet:
    """**Pure.** The table for other programs: no cell is empty or holds a space, so it can be taken apart by them."""
    extremes = find_extremes(survey.of(State.LIVING))
    titles = ("STEP", "GENERATION", "STATE", "COMMITTED", "BYTES", "WORKERS", "DIRECTORY", "MARKS")
    figures = ("STEP", "GENERATION", "BYTES", "WORKERS")
    columns = [Column(title, is_figure=title in figures) for title in titles]
    columns += [Column(_unspaced(metric), is_figure=True) for metric in extremes]
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
                _unspaced(one.directory),
                _unspaced(",".join(marks)) or "-",
                *(figure_text(metrics[metric]) if metric in metrics else "-" for metric in extremes),
            ]
        )
    return Sheet(columns, rows)


def terminal_sheet(survey: Survey, shown: Sequence[Found], *, width: int, now_unix_seconds: float) -> Sheet:
    """The table for a person.

    Args:
        survey: The run.
        shown: What of it to show.
        width: How many characters fit on a line; metrics that do not fit are left out.
        now_unix_seconds: The time that ages are counted to.
    """
    with_generation = len({one.name.generation for one in shown if one.name}) > 1
    columns = [Column("step", is_figure=True)]
    columns += [Column("gen", is_figure=True)] if with_generation else []
    with_references = any(one.refers_to for one in shown)
    columns += [Column("committed"), Column("size", is_figure=True)]
    columns += [Column("referred", is_figure=True)] if with_references else []
    columns += [Column("workers", is_figure=True)]
    rows: list[list[Words]] = []
    for one in shown:
        style = STRONG if one is survey.newest else PLAIN if one.state is State.LIVING else FAINT
        row: list[Words] = [Styled(str(one.name.step) if one.name else "-", style)]
        row += [Styled(str(one.name.generation) if one.name else "-", FAINT)] if with_generation else []
        row += [_when(one, now_unix_seconds), size_text(one.size_bytes)]
        row += [Styled(size_text(one.referred_bytes) if one.refers_to else "-", FAINT)] if with_references else []
        row.append(Styled(str(one.manifest.world_size) if one.manifest else "-", FAINT))
        rows.append(row)
    left_out = _add_metrics(columns, rows, survey, shown, width)
    columns.append(Column(""))
    for row, one in zip(rows, shown, strict=True):
        row.append(_mark(survey, one))
    return Sheet(columns, rows, left_out)


def _when(one: Found, now_unix_seconds: float) -> str:
    """How long ago it was where that is easy to grasp, else the day and the minute."""
    if one.manifest is None:
        return "-"
    age_seconds = now_unix_seconds - one.manifest.committed_at_unix_seconds
    if -60 <= age_seconds < _LONG_AGO_SECONDS:
        return age_text(age_seconds)
    return local_time_text(one.manifest.committed_at_unix_seconds)[:16]


def _mark(survey: Survey, one: Found) -> Styled:
    if one.state is State.LOST:
        return Styled(_STATE_MARKS[State.LOST], BAD)
    if one.damages:
        return Styled("newest, damaged" if one is survey.newest else "damaged", BAD)
    if one is survey.newest:
        return Styled("newest", GOOD)
    if one.may_be_in_progress and one.state is State.UNFINISHED:
        return Styled("being written?", NOTABLE)
    return Styled(_STATE_MARKS.get(one.state, "referred to" if one.referred_by else ""), FAINT)


def _add_metrics(
    columns: list[Column], rows: list[list[Words]], survey: Survey, shown: Sequence[Found], width: int
) -> tuple[str, ...]:
    """Adds columns of metrics while they fit; gives those that do not."""
    extremes = find_extremes(survey.of(State.LIVING))
    used = _MARKS_WIDTH + sum(
        _widest([column.title, *(row[place] for row in rows)]) for place, column in enumerate(columns)
    )
    metrics = list(extremes)
    for place, metric in enumerate(metrics):
        cells = [_metric_cell(one, metric, *extremes[metric]) for one in shown]
        # The figures leave room for a mark on their right, so the title does.
        title = metric + " " * _GAP
        used += _widest([title, *cells])
        if used > width:
            return tuple(metrics[place:])
        columns.append(Column(title, is_figure=True))
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return ()


def _metric_cell(one: Found, metric: str, lowest: object, highest: object) -> Styled:
    figure = one.manifest.metrics.get(metric) if one.manifest else None
    if figure is None:
        return Styled("-" + " " * _GAP, FAINT)
    is_living = one.state is State.LIVING
    symbol = LOWEST if is_living and one.name == lowest else HIGHEST if is_living and one.name == highest else " "
    return Styled(f"{figure_text(figure)} {symbol}", PLAIN if is_living else FAINT)


def _widest(cells: Sequence[Words]) -> int:
    return max(terminal_width(cell) for cell in cells) + _GAP


def _unspaced(text: str) -> str:
    return text.replace(" ", "_")
