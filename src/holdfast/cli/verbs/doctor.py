"""`holdfast doctor`: is a directory fit for checkpoints, what does a save cost there, and how often to save."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.wording import parse_seconds, parse_size

if TYPE_CHECKING:
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
    from holdfast.cli.verbs.doctor_trial import Examination, open_scratch
    from holdfast.policies.saving import DEFAULT_MTBF_SECONDS

    storage, step, size_bytes, has_checkpoint = _find_place(directory, size)
    # The trial's own saves are no business of the person's: what ends them comes back as an error.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    with ending_on(signal.SIGTERM, signal.SIGHUP), _progress() as tell, open_scratch(Path(storage.url)) as scratch:
        examined = Examination(scratch, size_bytes)
        tell("looking at the file system")
        examined.look(has_checkpoint=has_checkpoint)
        if examined.can_publish:
            examined.measure(trial, tell)
            examined.advise(mtbf or DEFAULT_MTBF_SECONDS)
    if as_json:
        write_json(sys.stdout, "doctor", _document(storage.url, step, examined))
    else:
        screen = Screen(sys.stdout)
        if screen.is_terminal:
            _show(directory, step, examined, screen)
        else:
            _show_plain(examined, screen)
        # On the error stream, so that a pipe gets the figures alone.
        sys.stdout.flush()
        remarks = Screen(sys.stderr)
        for finding in examined.findings:
            if finding.hint:
                style = BAD if finding.status == "unfit" else NOTABLE
                remarks.prose(Styled(f"{finding.status}: ", style), f"{finding.name}: {finding.hint}")
    sys.exit(ExitCode.OK if examined.is_fit else ExitCode.UNFIT)


def _find_place(location: str, size_bytes: int | None) -> tuple[LocalStorage, int | None, int, bool]:
    """The directory, the step that has the size of the state or None, that size, and whether there is a checkpoint."""
    from holdfast.catalog import read_catalog, read_manifest
    from holdfast.cli.survey import checkpoint_bytes
    from holdfast.errors import DamageError, NotFoundError

    storage = _find_directory(location)
    catalog = read_catalog(storage)
    for name in reversed(catalog.living) if size_bytes is None else ():
        with suppress(DamageError, NotFoundError):
            manifest = read_manifest(storage, name)
            return storage, name.step, max(checkpoint_bytes(manifest) + manifest.referred_bytes, 1), True
    return storage, None, size_bytes or _DEFAULT_BYTES, bool(catalog.committed)


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


def _save_every(examined: Examination) -> str | None:
    """The policy as it is written in a program; None where nothing could be saved."""
    seconds = examined.figures.get("interval_seconds")
    return None if seconds is None else f"hf.Seconds({seconds:.0f})"


def _document(url: str, step: int | None, examined: Examination) -> dict[str, Any]:
    return {
        "directory": url,
        "is_fit": examined.is_fit,
        "findings": [asdict(finding) for finding in examined.findings],
        "size_bytes": examined.size_bytes,
        "size_of_step": step,
        "figures": examined.figures,
        "save_every": _save_every(examined),
        "bound": examined.bound,
    }


def _show_plain(examined: Examination, screen: Screen) -> None:
    """Writes one table for other programs: no cell is empty or holds a space."""
    from holdfast.cli.screen import Column, Words
    from holdfast.cli.wording import figure_text

    rows: list[list[Words]] = [["directory", "fit" if examined.is_fit else "unfit"]]
    rows += [[finding.name.replace(" ", "_"), finding.status] for finding in examined.findings]
    for name, figure in examined.figures.items():
        rows.append([name, str(figure) if isinstance(figure, int) else figure_text(figure)])
    rows.append(["save_every", _save_every(examined) or "-"])
    screen.table([Column("NAME"), Column("VALUE")], rows)


def _show(location: str, step: int | None, examined: Examination, screen: Screen) -> None:
    from holdfast.cli.screen import BAD, FAINT, GOOD, NOTABLE, STRONG, Column, Styled, Words
    from holdfast.cli.wording import rough_text, size_text

    figures = examined.figures
    styles = {"ok": GOOD, "note": NOTABLE, "unfit": BAD}
    rows: list[list[Words]] = [
        [Styled(finding.status, styles[finding.status]), finding.name, Styled(finding.text, FAINT)]
        for finding in examined.findings
    ]
    verdict = Styled("fit for checkpoints", GOOD) if examined.is_fit else Styled("not fit for checkpoints", BAD)
    screen.say(Styled(location, STRONG), "   ", verdict)
    screen.table([Column("")] * 3, rows, indent=2)
    if not examined.can_publish:
        return
    origin = f" as in step {step}," if step is not None else ""
    trial = size_text(figures["trial_bytes"])
    screen.say()
    screen.prose(f"what a save of {size_text(examined.size_bytes)} costs,", f"{origin} by saves of {trial}")
    write, read = (f"{size_text(figures[f'{way}_bytes_per_second'])}/s" for way in ("write", "read"))
    rows = [
        ["training waits", rough_text(figures["blocked_seconds"]), ""],
        ["durable after", rough_text(figures["durable_seconds"]), Styled(write, FAINT)],
        ["a restore takes", rough_text(figures["restore_seconds"]), Styled(f"{read}, every byte checked", FAINT)],
    ]
    screen.table([Column("")] * 3, rows, indent=2)
    screen.say()
    screen.prose(f"how often to save, with a failure every {rough_text(figures['mtbf_seconds'])}")
    screen.say(Styled(f"  save_every={_save_every(examined)}", f"bold {GOOD}"))
    screen.prose(_WHY[examined.bound].format(young=rough_text(figures["young_seconds"])), indent=2)
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
