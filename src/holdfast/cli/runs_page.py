"""The table of runs, for people and for other programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Final

from holdfast.cli.runs import RunState, RunSummary
from holdfast.cli.screen import (
    BAD,
    FAINT,
    GOOD,
    PLAIN,
    STRONG,
    Screen,
    Words,
    counted,
    figure_text,
    iso_text,
    terminal_width,
    unspaced,
    when_text,
)
from holdfast.events.kinds import size_text

_STYLES: Final[dict[RunState, str]] = {
    "running": GOOD,
    "ok": PLAIN,
    "damaged": BAD,
    "lost": BAD,
    "empty": FAINT,
    "unreadable": BAD,
}
_GAP: Final = 2


def show_runs(screen: Screen, runs: Sequence[RunSummary]) -> None:
    """Writes one line for each run."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in _metrics_of(run)))
    if screen.is_terminal:
        _show_page(screen, runs, metrics)
    else:
        _show_plain(screen, runs, metrics)
    sys.stdout.flush()
    remarks = Screen(sys.stderr)
    for run in runs:
        if run.problem:
            remarks.say(("unreadable ", BAD), run.problem)
        for damage in run.newest.damages[:1] if run.newest else ():
            remarks.say(("damaged ", BAD), f"{run.location}: {damage.message}")


def _metrics_of(run: RunSummary) -> dict[str, float]:
    return dict(run.newest.manifest.metrics) if run.newest and run.newest.manifest else {}


def _step_of(run: RunSummary) -> str:
    return str(run.newest.name.step) if run.newest and run.newest.name else "-"


def _show_plain(screen: Screen, runs: Sequence[RunSummary], metrics: Sequence[str]) -> None:
    titles = ["RUN", "STEP", "COMMITTED", "STEPS", "BYTES", "WORKERS", "STATE"]
    rows: list[list[Words]] = []
    for run in runs:
        manifest = run.newest.manifest if run.newest else None
        own = _metrics_of(run)
        rows.append(
            [
                unspaced(run.location),
                _step_of(run),
                (iso_text(manifest.committed_at_unix_seconds) if manifest else None) or "-",
                str(run.steps),
                str(run.size_bytes),
                str(manifest.world_size) if manifest else "-",
                run.state,
                *(figure_text(own[metric]) if metric in own else "-" for metric in metrics),
            ]
        )
    metric_titles = [unspaced(metric) for metric in metrics]
    figures = {"STEP", "STEPS", "BYTES", "WORKERS", *metric_titles}
    screen.table([*titles, *metric_titles], rows, figures=figures)


def _show_page(screen: Screen, runs: Sequence[RunSummary], metrics: Sequence[str]) -> None:
    """Writes the table for a person, without the metrics that do not fit on a line, which are named below it."""
    now = time.time()
    titles = ["run", "step", "saved", "steps", "size", "state"]
    rows: list[list[Words]] = [
        [
            (run.location, STRONG),
            _step_of(run),
            _when(run, now),
            (str(run.steps), FAINT),
            size_text(run.size_bytes),
            (run.state, _STYLES[run.state]),
        ]
        for run in runs
    ]
    used = sum(
        _GAP + max(terminal_width(cell) for cell in (title, *(row[place] for row in rows)))
        for place, title in enumerate(titles)
    )
    left_out = list(metrics)
    for metric in metrics:
        cells = [figure_text(own[metric]) if metric in (own := _metrics_of(run)) else "-" for run in runs]
        used += _GAP + max(terminal_width(cell) for cell in (metric, *cells))
        if used > screen.width:
            break
        left_out.remove(metric)
        titles.append(metric)
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    screen.table(titles, rows, figures={"step", "steps", "size", *metrics})
    total = size_text(sum(run.size_bytes for run in runs))
    screen.say((f"{counted(len(runs), 'run')}, {total}", FAINT))
    if left_out:
        screen.say((f"no room for {', '.join(left_out)}", FAINT))


def _when(run: RunSummary, now: float) -> str:
    manifest = run.newest.manifest if run.newest else None
    return when_text(manifest.committed_at_unix_seconds if manifest else None, now)
