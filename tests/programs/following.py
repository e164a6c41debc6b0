"""A job that commits each of its steps, and a slow reader that follows it: `following.py train|read RUN ...`."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import holdfast as hf
from holdfast.events import Committed, Event
from holdfast.format.names import StepName
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import open_storage


def tell(path: Path, *words: object) -> None:
    """One line, whole, also if the process is killed right after it."""
    with path.open("ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def train(run: Path, total: int, told: Path) -> None:
    def note(event: Event) -> None:
        if isinstance(event, Committed):
            tell(told, event.generation, event.step)

    state = {"step": np.zeros(500, np.int64)}
    with hf.resumable(run, state=state, save_every=1, keep=hf.Latest(1), sinks=[note], quiet=True) as training:
        for step in training.steps(total):
            state["step"][:] = step + 1
            time.sleep(0.001)


def read(run: Path, name: str, most_seconds: float, idle_seconds: float, told: Path) -> None:
    """Reads each step that it is given twice, with a rest in between, in which the step is not to go."""
    state = {"step": np.zeros(500, np.int64)}
    chance = random.Random()
    followed = hf.follow(run, every=True, name=name, timeout_seconds=idle_seconds, state=state)
    for one in followed:
        tell(told, "given", one.generation, one.step, ",".join(map(str, one.missed)))
        if not (state["step"] == one.step).all():
            tell(told, "wrong", one.generation, one.step, state["step"][0])
        time.sleep(chance.uniform(0, most_seconds))
        step = StepName(one.step, one.generation, int(Path(one.directory).name.partition(".a")[2] or 1))
        storage = open_storage(run)
        try:
            if damages := verify_data(storage, open_step(storage, step.directory, step)):
                tell(told, "wrong", one.generation, one.step, damages)
        except hf.errors.HoldfastError as error:
            tell(told, "gone", one.generation, one.step, type(error).__name__)
        tell(told, "ended", one.generation, one.step)


if __name__ == "__main__":
    # Its parent waits no longer than that.
    signal.alarm(int(os.environ.get("LONGEST_SECONDS", "100")))
    what, place, *arguments = sys.argv[1:]
    if what == "train":
        train(Path(place), int(arguments[0]), Path(arguments[1]))
    else:
        read(Path(place), arguments[0], float(arguments[1]), float(arguments[2]), Path(arguments[3]))
