"""`python -m benchmarks.goodput`: how much of its time a job trains that is killed every few seconds.

Each way trains the same model for a while, in turns; the moments of the kills are drawn here, the same for all.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple

import click

from benchmarks.harness.turns import in_turn
from holdfast.catalog import StoredRun
from holdfast.catalog.ledger import TIMED, RunTimes, sum_up
from holdfast.storage import LocalStorage

_PROGRAM: Final = Path(__file__).with_name("program.py")
_WIDTH: Final = 2088
"""Four layers of this width are 209 MB with what AdamW keeps."""


class Way(NamedTuple):
    """A way to train on.

    Attributes:
        title: What it is, for the table.
        kind: The argument of the program.
        launcher: What starts it, and again after a kill; nothing for a loop that starts Python.
        unmeasured: How often it is killed before it is measured.
        workers: How many processes train.
    """

    title: str
    kind: str
    launcher: list[str]
    unmeasured: int = 0
    workers: int = 1


_RUN: Final = [sys.executable, "-m", "holdfast", "run"]
_TORCHRUN: Final = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    *("--max-restarts=100", "--no-python"),
]  # fmt: skip
WAYS: Final = {
    "run": Way("holdfast under `holdfast run`", "holdfast", _RUN),
    "overlap": Way("the same, with `overlap_copy`", "overlap", _RUN),
    "auto": Way("the same, with `overlap_copy` and `Auto()`", "auto", _RUN, unmeasured=10),
    "memory": Way("the same, with `HostMemory()`", "memory", _RUN),
    "memory-overlap": Way("the same, with `HostMemory()` and `overlap_copy`", "memory-overlap", _RUN),
    "no-spare": Way("holdfast, started afresh", "holdfast", [*_RUN, "--no-spare"]),
    "torch": Way("`torch.save`, started afresh", "torch", []),
    "dcp": Way("DCP, started afresh", "dcp", []),
    "worker": Way(
        "2 workers, `holdfast worker` under torchrun", "holdfast", [*_TORCHRUN, "holdfast", "worker"], workers=2
    ),
    "torchrun": Way("2 workers, torchrun alone", "holdfast", [*_TORCHRUN, sys.executable], workers=2),
}


class Figures(NamedTuple):
    """What one way came to in one turn; all but the last in seconds.

    Attributes:
        total: From the first step to the end.
        useful: The steps that were not done again, at the pace of this turn: the median of all but first steps.
        again: The steps that were done again, at that pace.
        back: From each death to the first new step.
        read: Each restore, after the first start.
        shares: How the whole time divides, as noted and as the run itself has recorded it; of holdfast alone.
    """

    total: float
    useful: float
    again: float
    back: list[float]
    read: list[float]
    shares: Mapping[str, tuple[float, float]] = MappingProxyType({})


def read_steps(notes: str) -> list[tuple[float, int]]:
    """**Pure.** Returns when each step was done, and its number."""
    lines = [line.split() for line in notes.splitlines()]
    return [(float(at), int(words[0])) for at, kind, *words in lines if kind == "step"]


def read_notes(notes: str, deaths: list[float], end: float) -> Figures:
    """**Pure.** Sums up what the programs of one way have noted, from the first of these deaths on.

    Args:
        notes: Their file.
        deaths: When they were killed.
        end: When the turn was over.
    """
    steps = read_steps(notes)
    lines = [line.split() for line in notes.splitlines()]
    reads = [float(words[0]) for at, kind, *words in lines if kind == "read" and float(at) > deaths[0]]
    furthest = max(step for at, step in steps if at <= deaths[0])
    counted = [step for at, step in steps if at > deaths[0]]
    done = len({step for step in counted if step > furthest})
    first = [min((at for at, _ in steps if at > death), default=end) for death in deaths]
    back = [at - death for at, death in zip(first, deaths, strict=True)]
    # The pace of a machine is another one from minute to minute; in most steps of a turn nothing is saved.
    pace = median(later - at for (at, _), (later, _) in pairwise(steps) if later not in first)
    return Figures(end - deaths[0], done * pace, (len(counted) - done) * pace, back, reads)


def compare(
    notes: str, deaths: list[float], begun: float, wall: float, times: RunTimes
) -> dict[str, tuple[float, float]]:
    """**Pure.** Compares what the programs of a whole turn have noted with what `holdfast stats` says of the run.

    Args:
        notes: Their file.
        deaths: When they were killed.
        begun: When the first one was started.
        wall: How long it was until the last one had ended, in seconds.
        times: The times that the run has recorded.

    Returns:
        The share of each in the time that passed, as noted and as recorded.
    """
    steps, known = read_steps(notes), times.shares
    first = [min((at for at, _ in steps if at > moment), default=moment) for moment in (begun, *deaths)]
    took = [(step, later - at, later in first) for (at, _), (later, step) in pairwise(steps)]
    # Of the first step after a death, what it took longer than others is time away.
    pace = median(seconds for _, seconds, is_first in took if not is_first)
    away = sum(max(at - moment - pace, 0.0) for at, moment in zip(first, (begun, *deaths), strict=True))
    # A step that was done again counts for as long as it took the first time.
    lasted = [(step, pace if is_first else seconds) for step, seconds, is_first in took]
    last = {step: number for number, (step, _) in enumerate(lasted)}
    again = sum(seconds for number, (step, seconds) in enumerate(lasted) if last[step] != number)
    recorded = {
        "away": known.away + known.setup + known.restore,
        "done again": known.lost,
        "training and saves": known.train + known.evaluate + known.data + known.save + known.leave,
        "in all": sum(known),
    }
    noted = {"away": away, "done again": again, "training and saves": wall - away - again, "in all": wall}
    return {name: (seconds / wall, recorded[name] / wall) for name, seconds in noted.items()}


def _make_environment(place: Path, workers: int = 1) -> dict[str, str]:
    # Without the last one, a restart by torchrun 2.13 may find addresses of dead workers.
    own = {
        "XDG_CACHE_HOME": str(place),
        "OMP_NUM_THREADS": str(2 // workers),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return os.environ | own | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def play(way: Way, place: Path, width: int, lives: list[float]) -> Figures:
    """**Blocks.** Lets one way train, and kills it after each of these times from its first step."""
    place.mkdir()
    lives = [*islice(cycle(lives), way.unmeasured), *lives]
    notes = place / "notes"
    notes.touch()
    words = [str(_PROGRAM), way.kind, str(place / "run"), str(notes), str(width)]
    environment = _make_environment(place, way.workers)

    def start() -> subprocess.Popen[bytes]:
        command = [*(way.launcher or [sys.executable]), *words]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    first, first_at = time.monotonic(), time.time()
    process = start()
    deaths: list[float] = []
    try:
        for life in lives:
            _wait_step(notes, process, len(deaths))
            time.sleep(life)
            begun = [line for line in notes.read_text().splitlines() if " begun " in line]
            deaths.append(time.monotonic())
            os.kill(int(begun[-1].split()[-1]), signal.SIGKILL)
            if not way.launcher:
                process.wait()
                process = start()
        _wait_step(notes, process, len(deaths))
        time.sleep(lives[0])
        end = time.monotonic()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    figures = read_notes(notes.read_text(), deaths[way.unmeasured :], end)
    if way.workers > 1 or way.kind in ("torch", "dcp"):
        return figures
    times = sum_up(StoredRun(LocalStorage(place / "run")).read_journal(*TIMED))
    return figures._replace(shares=compare(notes.read_text(), deaths, first, time.time() - first_at, times))


def _wait_step(notes: Path, process: subprocess.Popen[bytes], deaths: int) -> None:
    """**Blocks.** Waits for a step after so many deaths."""
    end_at = time.monotonic() + 120
    while True:
        lines = notes.read_text().splitlines()
        begun = [number for number, line in enumerate(lines) if " begun " in line]
        if len(begun) > deaths and any(" step " in line for line in lines[begun[-1] :]):
            return
        if process.poll() is not None or time.monotonic() > end_at:
            raise click.ClickException(f"it does not train: {process.returncode}, {lines[-3:]}")
        time.sleep(0.01)


def render(found: dict[str, list[Figures]]) -> str:
    """**Pure.** A table of all turns."""
    lines = [
        "| Way | From death to the next step (worst) | of which the read | Useful time | Away | Done again | Saves |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, turns in found.items():
        total = sum(one.total for one in turns)
        back, read = ([value for one in turns for value in getattr(one, field)] for field in ("back", "read"))
        useful, again = (sum(getattr(one, field) for one in turns) / total for field in ("useful", "again"))
        away = sum(back) / total
        shares = [f"{share:.0%}" for share in (useful, away, again, 1 - useful - away - again)]
        words = [WAYS[name].title, f"{median(back):.2f} s ({max(back):.2f} s)", f"{median(read):.2f} s", *shares]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def render_shares(found: dict[str, list[Figures]]) -> str:
    """**Pure.** A table of the shares that the run itself has recorded, beside those that the programs have noted."""
    lines = ["| Way | Time | Noted | `holdfast stats` | Apart |", "|---|---|---|---|---|"]
    for name, turns in found.items():
        for one in turns:
            for kind, (noted, recorded) in one.shares.items():
                apart = f"{abs(recorded - noted) * 100:.2f} points"
                lines.append(f"| {WAYS[name].title} | {kind} | {noted:.2%} | {recorded:.2%} | {apart} |")
    return "\n".join(lines)


@click.command()
@click.option("--scale", default=1.0, show_default=True, help="Make the model and the times smaller, for a look.")
@click.option("--rounds", default=1, show_default=True, help="How many turns each way has.")
@click.option(
    "--kills", default=6, show_default=True, help="How often it is killed in a turn; from the first one on it counts."
)
@click.option("--only", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only this; may be repeated.")
@click.option("--seed", default=1, show_default=True, help="Of the moments.")
def main(scale: float, rounds: int, kills: int, ways: tuple[str, ...], seed: int) -> None:
    """Kills a training program about every 15 seconds, for each way to save it and to start it again."""
    dice = random.Random(seed)
    found: dict[str, list[Figures]] = {name: [] for name in ways or WAYS}
    with tempfile.TemporaryDirectory(prefix="holdfast-goodput-") as place:
        for number in range(rounds):
            lives = [15 * scale * dice.uniform(0.7, 1.3) for _ in range(kills)]
            for name in in_turn(found, number):
                folder, width = Path(place, f"{name}-{number}"), max(int(_WIDTH * scale**0.5), 16)
                figures = play(WAYS[name], folder, width, lives)
                shutil.rmtree(folder)
                found[name].append(figures)
                click.echo(
                    f"{name}, turn {number}: useful {figures.useful / figures.total:.0%}, back in "
                    f"{median(figures.back):.2f} s, load {os.getloadavg()[0]:.1f}",
                    err=True,
                )
    click.echo(f"{render(found)}\n\n{render_shares(found)}")


if __name__ == "__main__":
    main()
