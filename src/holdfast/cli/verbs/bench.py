"""`holdfast bench`: what a disk gives, what a save costs, and how often to save."""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING, Final

import click

from holdfast.cli.wording import parse_seconds, parse_size

if TYPE_CHECKING:
    from holdfast.bench.measure import Wish
    from holdfast.cli.bench_report import BenchReport
    from holdfast.cli.bench_subject import Subject

_THREADS: Final = 6
_MAX_THREADS: Final = 256
_ROUNDS: Final = 3
_MAX_ROUNDS: Final = 1000
_MIN_BYTES: Final = 100_000
"""Less says nothing of a disk, and is most often a size whose unit was forgotten."""


def _parse_measurable(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    size_bytes = parse_size(ctx, param, text)
    if size_bytes is not None and size_bytes < _MIN_BYTES:
        raise click.BadParameter(f"{text!r} is {size_bytes} B, too little to measure; write 500MB or 5GB.", ctx, param)
    return size_bytes


@click.command()
@click.argument("directory", metavar="DIRECTORY", type=click.Path())
@click.option(
    "--size",
    metavar="SIZE",
    callback=_parse_measurable,
    help="The state's size.  [default: that of the newest checkpoint there, or 1GB]",
)
@click.option(
    "--mtbf", metavar="TIME", callback=parse_seconds, help="The mean time between failures.  [default: 6h, as for Auto]"
)
@click.option(
    "--step-time",
    metavar="TIME",
    callback=parse_seconds,
    help="How long a training step takes; the advice is in steps then.",
)
@click.option(
    "--trial",
    metavar="SIZE",
    callback=_parse_measurable,
    help="How much to save in a trial.  [default: as much as is quickly done]",
)
@click.option(
    "--threads",
    type=click.IntRange(1, _MAX_THREADS),
    default=_THREADS,
    show_default=True,
    help="How many write and read, as for a manager.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, _MAX_ROUNDS),
    default=_ROUNDS,
    show_default=True,
    help="How often to measure; medians are shown.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(
    directory: str,
    size: int | None,
    mtbf: float | None,
    step_time: float | None,
    trial: int | None,
    threads: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Measure what a disk gives, what a save costs, and how often to save.

    DIRECTORY is the one that a job saves into, or any other on the same disk. What is written lies in a hidden
    directory of its own, which is removed at the end; a run that is there is not touched. It takes about 20 seconds.

    Sizes are written as 500MB, 1.5GB or 2GiB, and times with their unit, as 350ms, 30s, 90min, 24h or 7d.
    """
    from holdfast.bench.measure import Wish
    from holdfast.cli.bench_page import BenchPage
    from holdfast.cli.bench_subject import find_subject
    from holdfast.cli.exit_codes import ending_on
    from holdfast.cli.screen import NOTABLE, Screen, Styled, write_json
    from holdfast.policies.saving import DEFAULT_MTBF_SECONDS

    subject = find_subject(directory, size, trial)
    wish = Wish(subject.size_bytes, trial, threads, rounds)
    with ending_on(signal.SIGTERM, signal.SIGHUP):
        report = _measure(subject, wish, DEFAULT_MTBF_SECONDS if mtbf is None else mtbf, step_time)
    if as_json:
        write_json(sys.stdout, "bench", report.document())
        return
    screen = Screen(sys.stdout)
    if screen.is_terminal:
        BenchPage(screen, report).show()
    else:
        report.show_plain(screen)
    # On the error stream, so that a pipe gets the figures alone.
    sys.stdout.flush()
    remarks = Screen(sys.stderr)
    for notice in report.notices:
        remarks.prose(Styled("note: ", NOTABLE), notice.text)


def _measure(subject: Subject, wish: Wish, mtbf_seconds: float, step_seconds: float | None) -> BenchReport:
    from holdfast.bench.advice import advise
    from holdfast.bench.figures import reckon_costs
    from holdfast.bench.file_system import look_up
    from holdfast.bench.measure import measure
    from holdfast.bench.memory import available_bytes
    from holdfast.bench.place import open_place, sweep
    from holdfast.cli.bench_notices import Circumstances, find_notices
    from holdfast.cli.bench_progress import bench_progress
    from holdfast.cli.bench_report import BenchReport
    from holdfast.save import moves
    from holdfast.storage import digesting

    # The trial's own saves are no business of the person's: what ends them comes back as an error.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    swept = sweep(subject.root)
    # After that, so that what was swept counts as room.
    file_system = look_up(subject.root)
    memory_bytes = available_bytes()
    with open_place(subject.root) as place, bench_progress(sys.stderr) as watcher:
        plan, measured = measure(place, wish, watcher, available_bytes=memory_bytes, free_bytes=file_system.free_bytes)
    costs = reckon_costs(measured, subject.size_bytes)
    advice = advise(
        stall_seconds=costs["stall"].seconds.median,
        durable_seconds=costs["durable"].seconds.median,
        restore_seconds=costs.get("restore_cold", costs["restore_warm"]).seconds.median,
        mtbf_seconds=mtbf_seconds,
        step_seconds=step_seconds,
    )
    notices = find_notices(
        Circumstances(
            size_bytes=subject.size_bytes,
            has_checkpoint=subject.has_checkpoint,
            may_be_saving=subject.may_be_saving,
            file_system=file_system,
            available_bytes=memory_bytes,
            swept=swept,
            plan=plan,
            measured=measured,
            is_compiled=moves.NATIVE is not None and digesting.find_native() is not None,
        )
    )
    return BenchReport(subject, file_system, wish, plan, measured, costs, advice, mtbf_seconds, step_seconds, notices)
