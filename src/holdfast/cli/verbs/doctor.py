"""`holdfast doctor`: is a directory fit for checkpoints, what does a save cost there, and how often to save."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.wording import parse_seconds, parse_size

if TYPE_CHECKING:
    from holdfast.catalog import Catalog
    from holdfast.cli.screen import Screen
    from holdfast.cli.verbs.doctor_trial import Examination
    from holdfast.storage import LocalStorage

_DEFAULT_BYTES: Final = 10**9
_MIN_BYTES: Final = 100_000
"""Less says nothing of a disk, and is most often a size whose unit was forgotten."""

_WHY: Final = {
    "optimum": "At this interval saves and failures cost least together, by Young's formula as Daly refined it.",
    "overhead": "Young's formula gives {young}; but Auto keeps saves to one percent of the time.",
    "durable": "Young's formula gives {young}; but a save takes longer to be durable.",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        directory: The directory.
        size_bytes: The size of the state that is to be saved there.
        size_of_step: The checkpoint that it is the size of, or None.
        mtbf_seconds: The mean time between failures that is assumed.
        examined: What was looked at and measured, and what is reckoned from that.
        bound: What sets the interval, as for `Auto`.
    """

    directory: str
    size_bytes: int
    size_of_step: int | None
    mtbf_seconds: float
    examined: Examination
    bound: str

    @property
    def is_fit(self) -> bool:
        """Whether checkpoints are safe there, and fit."""
        return all(finding.status != "unfit" for finding in self.examined.findings)

    @property
    def save_every(self) -> str:
        """The policy as it is written in a program."""
        return f"hf.Seconds({self.examined.figures['interval_seconds']:.0f})"


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
    "--trial",
    metavar="SIZE",
    callback=_parse_measurable,
    help="How much to save in a trial.  [default: as much as is quickly done]",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
def command(directory: str, size: int | None, mtbf: float | None, trial: int | None, as_json: bool) -> None:
    """Say whether a directory is fit for checkpoints, what a save costs there, and how often to save.

    DIRECTORY is the one that a job saves into, or any other on the same disk. What is written lies in a hidden
    directory of its own, which is removed at the end; a run that is there is not touched. It takes a few seconds. The
    exit code is 0 if the directory is fit, and 5 if it is not.

    Sizes are written as 500MB, 1.5GB or 2GiB, and times with their unit, as 350ms, 30s, 90min, 24h or 7d.
    """
    from holdfast.cli.exit_codes import ending_on
    from holdfast.cli.screen import BAD, NOTABLE, Screen, Styled, write_json
    from holdfast.policies.saving import DEFAULT_MTBF_SECONDS

    with ending_on(signal.SIGTERM, signal.SIGHUP), _progress() as tell:
        report = _examine(directory, size, trial, mtbf or DEFAULT_MTBF_SECONDS, tell)
    if as_json:
        write_json(sys.stdout, "doctor", _document(report))
    else:
        screen = Screen(sys.stdout)
        show = _show if screen.is_terminal else _show_plain
        show(report, screen)
        # On the error stream, so that a pipe gets the figures alone.
        sys.stdout.flush()
        remarks = Screen(sys.stderr)
        for finding in report.examined.findings:
            if finding.hint:
                style = BAD if finding.status == "unfit" else NOTABLE
                remarks.prose(Styled(f"{finding.status}: ", style), f"{finding.name}: {finding.hint}")
    sys.exit(ExitCode.OK if report.is_fit else ExitCode.UNFIT)


def _examine(
    location: str, size_bytes: int | None, trial_bytes: int | None, mtbf_seconds: float, tell: Callable[[str], None]
) -> Report:
    from holdfast.catalog import read_catalog
    from holdfast.cli.verbs.doctor_trial import Examination, open_scratch
    from holdfast.policies import Auto, SaveMoment
    from holdfast.policies.expectation import expect_losses

    storage = _find_directory(location)
    catalog = read_catalog(storage)
    step = None
    if size_bytes is None:
        step, size_bytes = _find_newest_size(storage, catalog) or (None, max(_DEFAULT_BYTES, trial_bytes or 0))
    # The trial's own saves are no business of the person's: what ends them comes back as an error.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    with open_scratch(Path(storage.url)) as scratch:
        examined = Examination(scratch, size_bytes)
        tell("looking at the file system")
        examined.look(has_checkpoint=bool(catalog.committed))
        examined.measure(trial_bytes, tell)
    figures = examined.figures
    blocked, durable = figures["blocked_seconds"], figures["durable_seconds"]
    moment = SaveMoment(step=0, save_blocked_seconds=blocked, save_durable_seconds=durable)
    chosen = Auto(mtbf_seconds=mtbf_seconds).chosen(moment)
    interval = math.ceil(chosen.seconds)
    losses = expect_losses(
        interval,
        stall_seconds=blocked,
        durable_seconds=durable,
        restore_seconds=figures["restore_seconds"],
        mtbf_seconds=mtbf_seconds,
    )
    figures["young_seconds"] = math.sqrt(2 * blocked * mtbf_seconds)
    figures["interval_seconds"] = interval
    figures["per_failure_seconds"] = losses.per_failure_seconds
    figures["lost_share"] = losses.lost_share
    return Report(location, size_bytes, step, mtbf_seconds, examined, chosen.bound)


def _find_directory(location: str) -> LocalStorage:
    from holdfast.errors import NoCheckpointError, UsageError
    from holdfast.storage import LocalStorage, open_storage

    storage = open_storage(location)
    if not isinstance(storage, LocalStorage):
        raise UsageError(
            f"{location} is no directory of this machine", hint="Only what is mounted on it can be examined."
        )
    root = Path(storage.url)
    if os.path.isdir(root):  # noqa: PTH112  It gives False, not an error, where we may not look.
        return storage
    if os.path.lexists(root):
        raise NoCheckpointError(f"{location} is not a directory", hint="Name the directory that the job saves into.")
    above = next(place for place in root.parents if os.path.isdir(place))  # noqa: PTH112
    raise NoCheckpointError(
        f"there is no directory {location}",
        hint=f"Make it first (mkdir -p), or name one on the same disk that exists, such as {above}.",
    )


def _find_newest_size(storage: LocalStorage, catalog: Catalog) -> tuple[int, int] | None:
    """The newest step whose manifest can be read, and the size of its state, wherever it lies."""
    from holdfast.catalog import read_manifest
    from holdfast.cli.survey import checkpoint_bytes
    from holdfast.errors import DamageError, NotFoundError

    for name in reversed(catalog.living):
        try:
            manifest = read_manifest(storage, name)
        except (DamageError, NotFoundError):
            continue
        return name.step, max(checkpoint_bytes(manifest) + manifest.referred_bytes, 1)
    return None


def _document(report: Report) -> dict[str, Any]:
    return {
        "directory": str(Path(report.directory).absolute()),
        "is_fit": report.is_fit,
        "findings": [asdict(finding) for finding in report.examined.findings],
        "size_bytes": report.size_bytes,
        "size_of_step": report.size_of_step,
        "figures": report.examined.figures,
        "mtbf_seconds": report.mtbf_seconds,
        "save_every": report.save_every,
        "bound": report.bound,
    }


def _show_plain(report: Report, screen: Screen) -> None:
    """Writes one table for other programs: no cell is empty or holds a space."""
    from holdfast.cli.screen import Column, Words
    from holdfast.cli.wording import figure_text

    rows: list[list[Words]] = [["directory", "fit" if report.is_fit else "unfit"]]
    rows += [[finding.name.replace(" ", "_"), finding.status] for finding in report.examined.findings]
    for name, figure in report.examined.figures.items():
        rows.append([name, str(figure) if isinstance(figure, int) else figure_text(figure)])
    rows.append(["save_every", report.save_every])
    screen.table([Column("NAME"), Column("VALUE")], rows)


def _show(report: Report, screen: Screen) -> None:
    from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, STRONG, Column, Styled, Words
    from holdfast.cli.wording import rough_text, size_text

    figures = report.examined.figures
    styles = {"ok": GOOD, "note": NOTABLE, "unfit": BAD}
    rows: list[list[Words]] = [
        [Styled(finding.status, styles[finding.status]), finding.name, Styled(finding.text, FAINT)]
        for finding in report.examined.findings
    ]
    verdict = Styled("fit for checkpoints", GOOD) if report.is_fit else Styled("not fit for checkpoints", BAD)
    screen.say(Styled(report.directory, STRONG), "   ", verdict)
    screen.table([Column("")] * 3, rows, indent=2)
    origin = f" as in step {report.size_of_step}," if report.size_of_step is not None else ""
    trial = size_text(figures["trial_bytes"])
    screen.say()
    screen.prose(f"what a save of {size_text(report.size_bytes)} costs,", f"{origin} by saves of {trial}")
    write, read = (f"{size_text(figures[f'{way}_bytes_per_second'])}/s" for way in ("write", "read"))
    rows = [
        ["training waits", rough_text(figures["blocked_seconds"]), ""],
        ["durable after", rough_text(figures["durable_seconds"]), Styled(write, FAINT)],
        ["a restore takes", rough_text(figures["restore_seconds"]), Styled(f"{read}, every byte checked", FAINT)],
    ]
    screen.table([Column("")] * 3, rows, indent=2)
    screen.say()
    screen.prose(f"how often to save, with a failure every {rough_text(report.mtbf_seconds)}")
    screen.say(Styled(f"  save_every={report.save_every}", f"bold {GOOD}"))
    screen.prose(_WHY[report.bound].format(young=rough_text(figures["young_seconds"])), indent=2)
    lost, failure = f"{100 * figures['lost_share']:.2g} %", rough_text(figures["per_failure_seconds"])
    screen.prose(f"Saves and failures then take {lost} of the time, and one failure costs {failure}.", indent=2)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Shows on the error stream what is being done, if that is a terminal; gone afterwards."""
    if not sys.stderr.isatty():
        yield lambda label: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(style="cyan"), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("")
        yield lambda label: progress.update(task, description=label, refresh=True)
