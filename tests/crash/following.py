"""Kills slow readers of a run, and now and then its job, which keeps the newest step alone.

`python -m crash.following`. The job commits each of its steps; readers with names follow each of them, and read a step
twice. They and the job are killed with SIGKILL at random moments, and started again. It must be that

* no reader is given a step twice, over all of its starts,
* what a reader is given is what was saved, and is still there when it has read it,
* each committed step between the first and the last that a reader was given was given to it, or is named as missed,
* leases that the dead have left are removed a minute later, and no other is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

from crash.command import WrongStateError, run_command, show_progress
from holdfast.catalog.holds import LEASE_SECONDS, HoldWatch, read_holds
from holdfast.storage import LocalStorage

PROGRAM: Final = Path(__file__).parents[1] / "programs" / "following.py"
_IDLE_SECONDS: Final = 4.0
_SHARE_OF_JOB: Final = 0.1


class Reader:
    """A reader over all of its starts."""

    def __init__(self, run: Path, number: int, most_seconds: float, longest_seconds: float) -> None:
        self.name, self.told = f"reader{number}", run.with_name(f"reader{number}.txt")
        words = [PROGRAM, "read", run, self.name, most_seconds, _IDLE_SECONDS, self.told]
        self._command = [sys.executable, *map(str, words)]
        self._environment = {**os.environ, "LONGEST_SECONDS": str(int(longest_seconds))}
        self.told.touch()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, env=self._environment, stderr=subprocess.DEVNULL)

    def check(self, committed: list[tuple[int, int]]) -> int:
        """Returns how many steps it was given."""
        lines = [line.split(" ") for line in self.told.read_text().splitlines()]
        if wrong := [line for line in lines if line[0] in ("wrong", "gone")]:
            raise WrongStateError(f"{self.name}: {wrong[:3]}")
        given = [(int(line[1]), int(line[2])) for line in lines if line[0] == "given"]
        if twice := [key for key, count in Counter(given).items() if count > 1]:
            raise WrongStateError(f"{self.name} was given twice: {twice[:5]}")
        if given != sorted(given):
            raise WrongStateError(f"{self.name} was given steps out of order")
        missed = Counter(int(step) for line in lines if line[0] == "given" for step in line[3].split(",") if step)
        seen = {step for _, step in given} | missed.keys()
        unnamed = sorted({step for generation, step in committed if given[0] < (generation, step) < given[-1]} - seen)
        if unnamed:
            raise WrongStateError(f"{self.name} says nothing of {len(unnamed)} steps: {unnamed[:5]}")
        return len(given)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def play(run: Path, chosen: argparse.Namespace) -> str:
    chance, longest_seconds = random.Random(chosen.seed), 60 + chosen.commits * 0.2
    run.parent.mkdir(parents=True, exist_ok=True)
    told = run.with_name("committed.txt")
    told.touch()
    training = [sys.executable, str(PROGRAM), "train", str(run), str(chosen.commits), str(told)]
    environment = {**os.environ, "LONGEST_SECONDS": str(int(longest_seconds))}
    job = subprocess.Popen(training, env=environment)
    readers = [Reader(run, number, chosen.slow_seconds * (1 + number), longest_seconds) for number in range(3)]
    kills = job_kills = 0
    try:
        while (code := job.poll()) != 0:
            if code is not None:
                raise WrongStateError(f"the job has ended with {code}")
            time.sleep(chance.uniform(0.5, 1.5) * chosen.pause_seconds)
            if chance.random() < _SHARE_OF_JOB:
                kill(job)
                job_kills += 1
                job = subprocess.Popen(training, env=environment)
            else:
                victim = chance.choice(readers)
                kill(victim.process)
                victim.start()
                kills += 1
            show_progress(len(told.read_bytes().splitlines()), chosen.commits, "commits")
        for reader in readers:
            if (code := reader.process.wait(longest_seconds)) != 0:
                raise WrongStateError(f"{reader.name} has ended with {code}")
    finally:
        for process in (job, *(reader.process for reader in readers)):
            kill(process)
    committed = sorted({(int(generation), int(step)) for generation, step in map(str.split, told.open())})
    given = [reader.check(committed) for reader in readers]
    check_leases(run)
    return (
        f"{len(committed)} commits with {kills} kills of readers, which were given {', '.join(map(str, given))} steps, "
        f"and {job_kills} of the job, in SECONDS: no step twice, none gone while it was read, the missed ones named"
    )


def check_leases(run: Path) -> None:
    """Looks at the leases as a job does, at once and when their time is over."""
    storage = LocalStorage(run)
    watch = HoldWatch(storage)
    watch.look(0.0)
    watch.look(LEASE_SECONDS)
    if left := read_holds(storage) and not watch.leases:
        raise WrongStateError(f"leases went before their time: {left}")
    watch.look(LEASE_SECONDS + 1)
    if holds := read_holds(storage):
        raise WrongStateError(f"leases are left: {holds}")


OPTIONS: Final = {
    "--commits": {"type": int, "default": 10_000},
    "--slow-seconds": {"type": float, "default": 0.5, "help": "how long the fastest reader reads a step at most"},
    "--pause-seconds": {"type": float, "default": 1.0, "help": "about how long to wait before each kill"},
}

if __name__ == "__main__":
    run_command("following", __doc__ or "", OPTIONS, play)
