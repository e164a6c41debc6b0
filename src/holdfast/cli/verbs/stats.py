"""`holdfast stats` and `holdfast report`: show where the time of a run went, and write a page about it."""

from __future__ import annotations

import os
import time
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import click

from holdfast.catalog.ledger import TIMED, WORDS, RunTimes, StartTimes, sum_up
from holdfast.catalog.openers import find_owner
from holdfast.cli.completion import RunPath
from holdfast.cli.report import COUNT, SHARE, TIME, Column, Kind, Report, verb
from holdfast.cli.screen import FAINT, GOOD, STRONG, counted
from holdfast.cli.target import find_run, takes_tiers
from holdfast.errors import NoCheckpointError, UsageError
from holdfast.numbers import time_text
from holdfast.report.facts import read_facts
from holdfast.report.page import render_page

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
    times = sum_up(target.run.read_journal(*TIMED))
    report.fields = _make_document(target.storage.url, times)
    if not times.starts:
        report.error = NoCheckpointError(
            f"{target.location} has recorded no times",
            hint="A run of holdfast.resumable or of a framework records them at its first commit, or when it fails.",
        )
        return
    whole = sum(times.shares)
    if report.is_page:
        report.line((target.location, STRONG), (f"   {counted(len(times.starts), 'start')}, {time_text(whole)}", FAINT))
    rows = [_Row(name, seconds, whole) for name, seconds in times.shares._asdict().items()]
    report.table(
        [
            Column("where", lambda row: WORDS[row.name] if report.is_page else row.name),
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
        *(_make_seconds_column(name, 4) for name in ("evaluate", "data", "save", "leave")),
        Column("end", lambda one: one.end),
    ]


def _make_seconds_column(name: str, may_go: int) -> Column[StartTimes]:
    return Column(name, lambda one: getattr(one, name), SECONDS, may_go=may_go)


def _remark(report: Report, times: RunTimes, *, is_running: bool) -> None:
    """Says what a failure would cost, and how often a save would be best."""
    if is_running and times.interval_seconds is not None:
        since = max(time.time() - times.starts[-1].ended_at_unix_seconds, 0.0)
        back = f", and {time_text(times.return_seconds)} to be back" if times.return_seconds is not None else ""
        report.line(f"A failure now would cost {time_text(since)} of work{back}.")
    for text in filter(None, (times.describe_interval(), times.describe_slowest())):
        report.line(text)


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
        "workers": [one._asdict() for one in times.workers],
    }


@verb("report")
@click.argument("run", metavar="RUN", type=RunPath(takes_step=False))
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Where to write it, or - for the output; by default a file in this directory that is named for the run.",
)  # fmt: skip
@takes_tiers
def write_report(report: Report, run: str, output: Path | None, tiers: tuple[str, ...]) -> None:
    """Write a page about a run: one HTML file that needs no network, to look at, to print or to send.

    It shows the starts of the run with their saves, restarts and notices, where the time went, metrics, the durations
    and sizes of saves, the checkpoints with why they are kept, and all warnings and errors in order. It works on the
    files of a dead run alone, and in a bucket. With --tier it also says in which place each checkpoint is.
    """
    target = find_run(run, tiers)
    facts = read_facts(target.storage, target.location)
    if output == Path("-"):
        if report.is_json:
            raise UsageError("--json and -o - both write to the output", hint="Leave out one of them.")
        click.echo(render_page(facts))
        return
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in PurePath(target.location).name)
    path = output if output is not None else Path(f"{name.strip('.') or 'run'}-report.html")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(render_page(facts), encoding="utf-8", errors="replace")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    report.fields = {"run": target.storage.url, "file": str(path.absolute()), "size_bytes": path.stat().st_size}
    report.line((f"{path} shows {target.location}", GOOD))
