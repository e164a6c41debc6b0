"""`holdfast stats`: shows where the time of a run went, over all of its starts."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

import click

from holdfast.catalog.ledger import RunTimes, StartTimes, sum_up
from holdfast.catalog.openers import find_owner
from holdfast.cli.completion import RunPath
from holdfast.cli.report import COUNT, SHARE, TIME, Column, Kind, Report, verb
from holdfast.cli.screen import FAINT, STRONG, counted
from holdfast.cli.target import find_run
from holdfast.errors import NoCheckpointError
from holdfast.events.kinds import Clocked, Committed, time_text

_WORDS: Final = {
    "train": "training",
    "data": "waiting for data",
    "save": "stopped by saves",
    "restore": "restores",
    "setup": "imports and set-up",
    "leave": "last saves",
    "lost": "work lost with a process",
    "away": "between starts",
}

SECONDS: Final = Kind(time_text, lambda seconds: f"{seconds:.3f}", True)


class _Row(NamedTuple):
    """A line of the table."""

    name: str
    seconds: float
    whole: float


@verb("stats")
@click.argument("run", metavar="RUN", type=RunPath(takes_step=False))
@click.option("--starts", "shows_starts", is_flag=True, help="Also show each start of the run.")
def command(report: Report, run: str, shows_starts: bool) -> None:
    """Show where the time of a run went: training, saves, restores, lost work, and the time between its starts.

    The times are those that the run itself has recorded, of worker 0, with each commit and at its end: what a process
    did after its last commit is work lost, or time between starts. A journal goes back some ten thousand saves.
    """
    target = find_run(run)
    times = sum_up(target.run.read_journal(Clocked, Committed))
    report.fields = _make_document(target.storage.url, times)
    if not times.starts:
        report.error = NoCheckpointError(
            f"{target.location} has recorded no times",
            hint="A run of holdfast.resumable or of a framework records them, from its first commit on.",
        )
        return
    whole = sum(times.shares)
    if report.is_page:
        report.line((target.location, STRONG), (f"   {counted(len(times.starts), 'start')}, {time_text(whole)}", FAINT))
    rows = [_Row(name, seconds, whole) for name, seconds in times.shares._asdict().items()]
    report.table(
        [
            Column("where", lambda row: _WORDS[row.name] if report.is_page else row.name),
            Column("time", lambda row: row.seconds, SECONDS, plain="SECONDS"),
            Column("share", lambda row: f"{row.seconds / max(row.whole, 1e-9):.1%}", SHARE),
        ],
        [row for row in rows if row.seconds or not report.is_page],
    )
    if report.is_page:
        _remark(report, times, is_running=bool(find_owner(target.storage)))
    if shows_starts:
        report.line()
        report.table(_start_columns(), times.starts)


def _start_columns() -> list[Column[StartTimes]]:
    return [
        Column("begun", lambda one: one.begun_at_unix_seconds, TIME),
        Column("from step", lambda one: one.first_step, COUNT),
        Column("to step", lambda one: one.step, COUNT),
        Column("repeated", lambda one: one.repeated_steps, COUNT, may_go=3),
        *(_make_seconds_column(name, 2) for name in ("away", "lost", "setup", "restore", "train")),
        *(_make_seconds_column(name, 4) for name in ("data", "save", "leave")),
        Column("end", lambda one: "left" if one.is_whole else "died, or goes on"),
    ]


def _make_seconds_column(name: str, may_go: int) -> Column[StartTimes]:
    return Column(name, lambda one: getattr(one, name), SECONDS, may_go=may_go)


def _remark(report: Report, times: RunTimes, *, is_running: bool) -> None:
    """Says what a failure would cost, and how often a save would be best."""
    if is_running and times.interval_seconds is not None:
        since = max(time.time() - times.starts[-1].ended_at_unix_seconds, 0.0)
        back = f", and {time_text(times.return_seconds)} to be back" if times.return_seconds is not None else ""
        report.line(f"A failure now would cost {time_text(since)} of work{back}.")
    best = times.best_interval_seconds
    if best is not None and times.save_seconds is not None:
        now = f"; on average it was every {time_text(times.interval_seconds)}" if times.interval_seconds else ""
        report.line(
            f"A save stops training for {time_text(times.save_seconds)}, and a failure is expected every "
            f"{time_text(times.failure_seconds)}: a save every {time_text(best)} costs the least{now}."
        )


def _make_document(url: str, times: RunTimes) -> dict[str, Any]:
    return {
        "run": url,
        "seconds": times.shares._asdict(),
        "wall_seconds": sum(times.shares),
        "save_seconds": times.save_seconds,
        "interval_seconds": times.interval_seconds,
        "best_interval_seconds": times.best_interval_seconds,
        "return_seconds": times.return_seconds,
        "failure_seconds": times.failure_seconds,
        "starts": [one._asdict() for one in times.starts],
    }
