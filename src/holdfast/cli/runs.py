"""The runs below a directory, each in a line: its newest checkpoint, how many it has, and what they take."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from holdfast.catalog import Catalog, StoredRun, find_owner
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
from holdfast.cli.survey import Found, State, look_at_step, time_fields
from holdfast.errors import HoldfastError
from holdfast.events.kinds import size_text
from holdfast.format.records import Opening
from holdfast.storage import Storage

RunState: TypeAlias = Literal["running", "ok", "damaged", "lost", "empty", "unreadable"]

_MOST_LOOKS: Final = 3


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run.

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

    def fields(self) -> dict[str, Any]:
        """**Pure.** The run in a JSON document."""
        manifest = self.newest.manifest if self.newest else None
        committed = time_fields("committed_at", manifest.committed_at_unix_seconds) if manifest else {}
        return {
            "run": self.url,
            "state": self.state,
            "newest_step": self.newest.name.step if self.newest and self.newest.name else None,
            **(committed or dict.fromkeys(("committed_at_unix_seconds", "committed_at"))),
            "steps": self.steps,
            "size_bytes": self.size_bytes,
            "workers": manifest.world_size if manifest else None,
            "metrics": manifest.metrics if manifest else None,
            "host": self.opening.host if self.opening else None,
            "process": self.opening.process if self.opening else None,
            "problem": self.problem or None,
        }


def summarize_run(location: str, storage: Storage) -> RunSummary:
    """**Blocks.** Looks at a run: the names of its steps, the sizes of files, and the newest manifest alone."""
    try:
        for _ in range(_MOST_LOOKS):
            catalog = StoredRun(storage).look()
            newest = catalog.newest
            looked = look_at_step(storage, newest.directory, newest, State.LIVING) if newest else None
            if newest is None or looked is not None:
                break  # Else a job that goes on has removed it just now.
        directories = [name.directory for name in (*catalog.committed, *catalog.unfinished, *catalog.lost)]
        size_bytes = sum(
            entry.size_bytes for directory in (*directories, *catalog.trash) for entry in storage.list(directory)
        )
        opening = None
        if catalog.generation:
            with suppress(HoldfastError):
                opening = StoredRun(storage).opening(catalog.generation)
        return RunSummary(
            location,
            storage.url,
            _find_state(storage, catalog, looked),
            looked,
            len(catalog.living),
            size_bytes + (catalog.spare_bytes or 0),
            opening,
        )
    except HoldfastError as error:
        return RunSummary(location, storage.url, "unreadable", problem=error.message)


def _find_state(storage: Storage, catalog: Catalog, newest: Found | None) -> RunState:
    if catalog.faults or (newest is not None and newest.damages):
        return "damaged"
    if catalog.lost or catalog.unfinished:
        lost = StoredRun(storage).find_lost(catalog)
        if lost and (catalog.newest is None or lost[-1] > catalog.newest):
            return "lost"
    if find_owner(storage):
        return "running"
    return "ok" if newest is not None else "empty"


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
            when_text(at.committed_at_unix_seconds if (at := run.newest and run.newest.manifest) else None, now),
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
