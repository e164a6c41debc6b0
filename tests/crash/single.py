"""Kills a saving process again and again, and looks each time at what it left: `python -m crash.single`.

Each round forks a child that goes on from the newest checkpoint, trains (its arrays follow from the step; some change
seldom) and saves without a pause, telling through a pipe which steps it was promised. Most children save incrementally.
At a random moment it is killed with SIGKILL. Then the parent restores and checks that

* what comes back is exactly the state of one step,
* that step is the newest that was promised, or a later one that was begun,
* the next save works, and afterwards nothing is left of the killed one,
* every checkpoint that is there is whole, with all that it refers to, and there are not too many.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crash.command import WrongStateError, check_whole, run_command, show_progress
from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.manager import CheckpointManager
from holdfast.policies import Latest
from holdfast.save.incremental import MAX_KEPT_STEPS
from holdfast.storage import open_storage

ARRAYS = ((1, 1), (1000, 1), (30_000, 1), (30_000, 7), (200_000, 50), (5000, 1_000_000))
"""The length of each array, and for how many steps it stays as it is."""

_KEPT = 2
_INCREMENTAL_SHARE = 0.7


@dataclass
class Tally:
    """What happened over all rounds.

    Attributes:
        kills: How many children were killed.
        in_save: How many of them left an unfinished save behind.
        unspoken: How many left a checkpoint that they had not spoken of yet.
        promised: How many steps were promised in all.
        referring: How many checkpoints that came back lie in part with earlier ones.
        spares: How many children left a file in whose room the next save was to be written.
    """

    kills: int = 0
    in_save: int = 0
    unspoken: int = 0
    promised: int = 0
    referring: int = 0
    spares: int = 0


class Toy:
    """State that follows from a step: any mixture of two steps is told from both."""

    def __init__(self) -> None:
        import numpy as np

        self.arrays: dict[str, Any] = {
            f"a{number}": np.zeros(length, np.int64) for number, (length, _) in enumerate(ARRAYS)
        }
        self.counter = {"step": 0}

    def train(self, step: int) -> None:
        """Sets the state of a step, in place."""
        for number, array in enumerate(self.arrays.values()):
            array[:] = _value_of(step, number)
        self.counter["step"] = step

    def check(self, step: int) -> None:
        """Makes sure that the state is that of the step and no other.

        Raises:
            WrongStateError: If it is not.
        """
        for number, (name, array) in enumerate(self.arrays.items()):
            if not (array == _value_of(step, number)).all():
                raise WrongStateError(f"{name} is not that of step {step}")
        if self.counter != {"step": step}:
            raise WrongStateError(f"the counter is {self.counter}, the step is {step}")

    def manager(self, directory: Path | str, *, incremental: bool = False) -> CheckpointManager:
        """A manager that keeps two checkpoints."""
        checkpoint = Checkpoint(arrays=self.arrays, counter=self.counter)
        return CheckpointManager(directory, checkpoint, keep=Latest(_KEPT), incremental=incremental, cluster="alone")


def _value_of(step: int, number: int) -> int:
    """What an array holds at a step; of each array, values of different stretches of steps differ."""
    return step // ARRAYS[number][1] * 1000 + number


def train_until_killed(directory: Path | str, promises: int, seed: int) -> None:
    """What a child does: goes on from the newest checkpoint and saves each step, until it is killed."""
    dice = random.Random(seed)
    toy = Toy()
    manager = toy.manager(directory, incremental=dice.random() < _INCREMENTAL_SHARE)
    restored = manager.restore()
    step = restored.step if restored is not None else 0
    while True:
        step += dice.choice((1, 1, 1, 5))
        toy.train(step)
        os.write(promises, f"begin {step}\n".encode())
        handle = manager.save(step)
        if dice.random() < 0.3:
            # What comes next must not get into the checkpoint.
            toy.train(step + 10_000_000)
        handle.wait_committed(60)
        os.write(promises, f"promise {step}\n".encode())
        if dice.random() < 0.1:
            toy.train(step)
            manager.save(step, replace=True).wait_committed(60)


def kill_once(directory: Path | str, dice: random.Random, span_seconds: float) -> tuple[int, int, int]:
    """Runs one child and kills it.

    Returns:
        The last step that it was promised, the last that it began (0 if none), and how many were promised.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing of the parent may run in the child: no exit handlers, no flushing of its streams.
        with contextlib.suppress(BaseException):
            os.close(reading)
            train_until_killed(directory, writing, dice.randrange(1 << 30))
        os._exit(99)
    os.close(writing)
    deadline = time.monotonic() + dice.random() * span_seconds
    told = b""
    open_ended = True
    while open_ended and (left := deadline - time.monotonic()) > 0:
        if select.select([reading], [], [], left)[0]:
            data = os.read(reading, 65536)
            open_ended = bool(data)
            told += data
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while data := os.read(reading, 65536):
        told += data
    os.close(reading)
    if not os.WIFSIGNALED(status):
        raise WrongStateError(f"the child ended by itself, with status {status}")
    promised = begun = count = 0
    for line in told.decode().splitlines():
        word, step = line.split()
        if word == "promise":
            promised, count = int(step), count + 1
        begun = int(step)
    return promised, begun, count


def check_after(directory: Path | str, promised: int, begun: int, tally: Tally, *, incremental: bool = True) -> int:
    """Looks at what a kill left, saves once more, and looks again.

    Returns:
        The newest committed step.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    catalog = StoredRun(open_storage(directory)).look()
    tally.in_save += bool(catalog.unfinished)
    tally.spares += catalog.spare_bytes is not None
    toy = Toy()
    with toy.manager(directory, incremental=incremental) as manager:
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        if restored is not None:
            toy.check(step)
            tally.referring += bool(restored.manifest.references)
            if restored.passed_over:
                raise WrongStateError(f"a committed checkpoint is damaged: {restored.passed_over}")
        if not promised <= step <= max(begun, promised):
            raise WrongStateError(f"step {step} came back; promised was {promised}, begun was {begun}")
        tally.unspoken += step > promised
        toy.train(step + 1)
        manager.save(step + 1).wait_committed(60)
        manager.wait(60)
    catalog = StoredRun(open_storage(directory)).look()
    if catalog.newest is None or catalog.newest.step != step + 1:
        raise WrongStateError(f"step {step + 1} was promised, the newest is {catalog.newest}")
    if catalog.unfinished or catalog.trash or catalog.spare_bytes is not None:
        raise WrongStateError(f"left behind: {catalog.unfinished} {catalog.trash}, a spare of {catalog.spare_bytes}")
    # The one that was restored from is kept too, and each with what it refers to.
    if len(catalog.committed) > (_KEPT + 1) * (1 + _KEPT + MAX_KEPT_STEPS):
        raise WrongStateError(f"{len(catalog.committed)} checkpoints are kept")
    check_whole(open_storage(directory), catalog)
    return step + 1


def run(directory: Path | str, kills: int, seed: int, span_seconds: float) -> Tally:
    """Kills so many children, one after the other.

    Args:
        directory: The run's directory.
        kills: How many.
        seed: What the random moments follow from, as far as the machine lets them.
        span_seconds: Within how many seconds of its start a child is killed.

    Raises:
        WrongStateError: At the first round that leaves something that must not be.
    """
    dice = random.Random(seed)
    tally = Tally()
    newest = 0
    for _ in range(kills):
        promised, begun, count = kill_once(directory, dice, span_seconds)
        tally.kills += 1
        tally.promised += count
        incremental = dice.random() < _INCREMENTAL_SHARE
        newest = check_after(directory, max(promised, newest), begun, tally, incremental=incremental)
        show_progress(tally.kills, kills, "kills")
    return tally


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        tally = run(directory, options.kills, options.seed, options.span)
        return (
            f"{tally.kills} kills in SECONDS: nothing was lost. {tally.in_save} hit an unfinished save, "
            f"{tally.unspoken} left a whole checkpoint that nobody had been told of, {tally.promised} promises were "
            f"kept, {tally.referring} of the checkpoints that came back refer to earlier ones, {tally.spares} left a "
            "spare file."
        )

    span = {"type": float, "default": 0.25, "help": "seconds within which a child is killed"}
    run_command("single", __doc__, {"--kills": {"type": int, "default": 300}, "--span": span}, play)


if __name__ == "__main__":
    main()
