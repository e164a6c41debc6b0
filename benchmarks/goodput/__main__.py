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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import click

from benchmarks.harness.turns import in_turn

_PROGRAM: Final = Path(__file__).with_name("program.py")
_WIDTH: Final = 2088
"""Four layers of this width are 209 MB with what AdamW keeps."""


class Way(NamedTuple):
    """A way to train on.

    Attributes:
        title: What it is, for the table.
        kind: The argument of the program.
        options: Those of `holdfast run`; None for a loop that starts Python.
    """

    title: str
    kind: str
    options: list[str] | None


WAYS: Final = {
    "run": Way("holdfast under `holdfast run`", "holdfast", []),
    "overlap": Way("the same, `Auto()` and `overlap_copy`", "overlap", []),
    "no-spare": Way("holdfast, started afresh", "holdfast", ["--no-spare"]),
    "torch": Way("`torch.save`, started afresh", "torch", None),
    "dcp": Way("DCP, started afresh", "dcp", None),
}


class Figures(NamedTuple):
    """What one way came to in one turn; all but the last in seconds.

    Attributes:
        total: From the first step to the end.
        useful: The steps that were not done again, at the pace of a step.
        again: The steps that were done again, at that pace.
        back: From each death to the first new step.
        read: Each restore, after the first start.
        step: The median of a step.
    """

    total: float
    useful: float
    again: float
    back: list[float]
    read: list[float]
    step: float


def read_notes(notes: str, deaths: list[float], end: float) -> Figures:
    """**Pure.** Sums up what the programs of one way have noted.

    Args:
        notes: Their file.
        deaths: When they were killed.
        end: When the turn was over.
    """
    steps: list[tuple[float, int]] = []
    reads: list[float] = []
    for line in notes.splitlines():
        at, kind, *words = line.split()
        if kind == "step":
            steps.append((float(at), int(words[0])))
        elif kind == "read":
            reads.append(float(words[0]))
    spans = [later - at for (at, step), (later, next_step) in pairwise(steps) if next_step == step + 1]
    pace = median(spans)
    first = steps[0][0]
    done = len({step for _, step in steps if step > steps[0][1]})
    back = [min((at for at, _ in steps if at > death), default=end) - death for death in deaths]
    return Figures(end - first, done * pace, (len(steps) - 1 - done) * pace, back, reads[1:], pace)


def play(way: Way, place: Path, width: int, lives: list[float]) -> Figures:
    """**Blocks.** Lets one way train, and kills it after each of these times from its first step."""
    place.mkdir()
    notes = place / "notes"
    notes.touch()
    words = [str(_PROGRAM), way.kind, str(place / "run"), str(notes), str(width)]
    environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache"), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, *words]
    if way.options is not None:
        command = [sys.executable, "-m", "holdfast", "run", *way.options, *words]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    process = start()
    deaths: list[float] = []
    try:
        for life in lives:
            _wait_step(notes, process, len(deaths))
            time.sleep(life)
            program = process.pid if way.options is None else _find_program(process.pid, words)
            deaths.append(time.monotonic())
            os.kill(program, signal.SIGKILL)
            if way.options is None:
                process.wait()
                process = start()
            with notes.open("a") as file:
                file.write(f"{deaths[-1]:.4f} death\n")
        _wait_step(notes, process, len(deaths))
        time.sleep(lives[0])
        end = time.monotonic()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return read_notes(notes.read_text(), deaths, end)


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


def _find_program(supervisor: int, words: list[str]) -> int:
    """Finds the program among the children of a supervisor: it shows as a plain start."""
    shown = "\0".join([sys.executable, *words]).encode()
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if Path(f"/proc/{child}/cmdline").read_bytes().startswith(shown):
            return int(child)
    raise click.ClickException("there is no program to kill")


def render(found: dict[str, list[Figures]]) -> str:
    """**Pure.** A table of all turns."""
    lines = [
        "| Way | Useful time | From death to the first new step (worst) | of which the read | Steps done again "
        "| The rest: saves and starts |",
        "|---|---|---|---|---|---|",
    ]
    for name, turns in found.items():
        total = sum(one.total for one in turns)
        back, read = ([value for one in turns for value in getattr(one, field)] for field in ("back", "read"))
        useful, again = (sum(getattr(one, field) for one in turns) / total for field in ("useful", "again"))
        away = sum(back) / total
        lines.append(
            f"| {WAYS[name].title} | {useful:.0%} | {median(back):.2f} s ({max(back):.2f} s) | {median(read):.2f} s "
            f"| {again:.0%} | {away:.0%} away, {max(1 - useful - again - away, 0):.0%} stalls |"
        )
    return "\n".join(lines)


@click.command()
@click.option("--scale", default=1.0, show_default=True, help="Make the model and the times smaller, for a look.")
@click.option("--rounds", default=2, show_default=True, help="How many turns each way has.")
@click.option("--kills", default=3, show_default=True, help="How often it is killed in a turn.")
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
                folder = Path(place, f"{name}-{number}")
                figures = play(WAYS[name], folder, max(int(_WIDTH * scale**0.5), 16), lives)
                shutil.rmtree(folder)
                found[name].append(figures)
                click.echo(
                    f"{name}, turn {number}: useful {figures.useful / figures.total:.0%}, back in "
                    f"{median(figures.back):.2f} s, load {os.getloadavg()[0]:.1f}",
                    err=True,
                )
    click.echo(render(found))


if __name__ == "__main__":
    main()
