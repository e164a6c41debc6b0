"""Strikes a job of two workers with notices and faults, again and again, until it has come to its end all the same.

`python -m crash.leaving`. Two forked processes train together, waiting for each other in each step.
At a random moment one of them or both are asked to leave, or one is killed, is killed right after a notice, fails with
an error, or finds its disk full when it is to leave. Then they are started again. It must be that

* all end within the limit, whatever has struck one of them,
* all that were not killed leave with the same code if they were asked to, and a checkpoint is there if it is 42,
* the next ones go on from the newest checkpoint that was promised, or a later one,
* what they have learned at the end is what workers learn that nobody has struck.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import holdfast as hf
from crash.command import WrongStateError, run_command, show_progress
from crash.forked import ForkedJob
from file_engine import join_in_directory
from holdfast.catalog import StoredRun
from holdfast.errors import PeerError
from holdfast.events import Committed, Event, Leaving
from holdfast.preemption.config import EXIT_RESTART
from holdfast.storage import LocalStorage

WORKERS: Final = 2
LIVENESS_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 60.0
LIMIT_SECONDS: Final = 20.0
"""How long all may take to end. It is several times what they should, for machines that are busy."""

WAYS: Final = ("notice", "notices", "two notices", "killed", "killed after a notice", "error", "full disk")

_STEP_SECONDS: Final = 0.002
_FULL_BYTES: Final = 2000
_ASKED: Final = frozenset({"notice", "notices", "two notices", "full disk"})
_WRONG_CODES: Final = frozenset({1, 99})
_FAILED_CODE: Final = 3


class Learner:
    """What a worker learns; it depends on each step and on a random generator."""

    def __init__(self) -> None:
        self.value = 0.0
        self.steps = 0

    def learn(self) -> None:
        """One step."""
        self.value = (self.value + random.random()) * 1.0001
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """See `Checkpoint`."""
        return {"value": self.value, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Checkpoint`."""
        self.value, self.steps = state["value"], state["steps"]


def learn_undisturbed(rank: int, total: int) -> str:
    """What a worker has learned at the end when nobody strikes it."""
    random.seed(rank)
    learner = Learner()
    for _ in range(total):
        learner.learn()
    return learner.value.hex()


def train(directory: Path, store: Path, total: int, rank: int, tell: Callable[[str], None]) -> int:
    """What a worker does: a signal of its own, SIGALRM, makes it fail, and SIGHUP fills its disk."""
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  For the life of this process.
    sys.dont_write_bytecode = True  # On the full disk it would be cut off, and fail all later processes.
    random.seed(rank)
    learner = Learner()
    faults: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: faults.append(number))
    signal.signal(
        signal.SIGHUP,
        lambda number, frame: resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, resource.RLIM_INFINITY)),
    )
    cluster = join_in_directory(store, rank, WORKERS, timeout_seconds=PATIENCE_SECONDS)

    def tell_commit(event: Event) -> None:
        if isinstance(event, Committed) or (
            isinstance(event, Leaving) and event.exit_code == EXIT_RESTART and event.step
        ):
            tell(f"promise {event.step}")

    try:
        with hf.resumable(
            directory,
            learner=hf.PerWorker(learner),
            rng=hf.RNG(),
            save_every=hf.Steps(25),
            keep=hf.Latest(2),
            sinks=[tell_commit],
            cluster=cluster,
            liveness_seconds=LIVENESS_SECONDS,
            timeout_seconds=PATIENCE_SECONDS,
        ) as run:
            tell(f"begun {run.step}")
            for step in run.steps(total):
                learner.learn()
                # A step takes a while, so that blows strike within one and between two.
                time.sleep(_STEP_SECONDS)
                if faults:
                    raise ValueError("struck")
                cluster.set(f"at/{rank}", str(step).encode())
                # Nobody is more than a step ahead.
                while step > int(cluster.wait_get(f"at/{1 - rank}", PATIENCE_SECONDS)):
                    # The key holds a value already, and a store can wait for the first one only.
                    time.sleep(_STEP_SECONDS / 4)
    except SystemExit as leaving:
        return int(str(leaving.code))
    except PeerError as error:
        tell(f"peer {error.rank} {error.kind}")
        return _FAILED_CODE
    except ValueError:
        return _FAILED_CODE
    tell(f"learned {learner.steps} {learner.value.hex()}")
    return 0


def strike(job: ForkedJob, way: str, dice: random.Random) -> set[int]:
    """Strikes workers; gives those that were killed."""
    victim = dice.randrange(WORKERS)
    match way:
        case "notice":
            job.send(victim, signal.SIGTERM)
        case "notices":
            for rank in range(WORKERS):
                job.send(rank, signal.SIGTERM)
        case "two notices":
            job.send(victim, signal.SIGTERM)
            job.look(0.2)
            if 1 - victim not in job.codes:
                job.send(1 - victim, signal.SIGUSR1)
        case "killed":
            job.send(victim, signal.SIGKILL)
            return {victim}
        case "killed after a notice":
            job.send(victim, signal.SIGTERM)
            job.look(0.1)
            if victim not in job.codes:
                job.send(victim, signal.SIGKILL)
                return {victim}
        case "error":
            job.send(victim, signal.SIGALRM)
        case "full disk":
            job.send(victim, signal.SIGHUP)
            job.send(1 - victim, signal.SIGTERM)
    return set()


def play_life(directory: Path, store: Path, total: int, way: str | None, dice: random.Random, newest: int) -> ForkedJob:
    """Starts the workers, strikes them in that way unless it is None, and waits until they have ended.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    job = ForkedJob(WORKERS, lambda rank, tell: train(directory, store, total, rank, tell))
    try:
        job.wait_told("begun")
        begun = set(job.numbers("begun"))
        if len(begun) != 1 or min(begun) < newest:
            raise WrongStateError(f"the workers began with step {begun}, and step {newest} was promised")
        killed: set[int] = set()
        if way is not None:
            job.look(dice.random() * 0.4)
            if not job.codes:
                killed = strike(job, way, dice)
        limit_seconds = LIMIT_SECONDS + (0.0 if way is not None else PATIENCE_SECONDS + total * _STEP_SECONDS * 20)
        job.wait(set(range(WORKERS)), limit_seconds, f"after {way}")
    finally:
        job.close()
    codes = {code for rank, code in job.codes.items() if rank not in killed}
    if codes & _WRONG_CODES:
        raise WrongStateError(f"after {way}: {job.codes}, {job.tails()}")
    if way in _ASKED and len(codes) != 1:
        raise WrongStateError(f"after {way} the workers left with different codes: {job.codes}, {job.tails()}")
    return job


def run(directory: Path, faults: int, seed: int) -> Counter[str]:
    """Strikes so many times, and lets the job come to its end.

    Args:
        directory: A new directory to work in.
        faults: How many times.
        seed: What the random moments follow from, as far as the machine lets them.

    Returns:
        How often what has struck, and how often workers left with which code.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    dice = random.Random(seed)
    tally: Counter[str] = Counter()
    total = 60 * faults
    newest = 0
    for number in range(faults + 1):
        way = None if number == faults else WAYS[number] if number < len(WAYS) else dice.choice(WAYS)
        job = play_life(directory / "run", directory / f"store-{number // 5}", total, way, dice, newest)
        catalog = StoredRun(LocalStorage(directory / "run")).look()
        newest = catalog.newest.step if catalog.newest is not None else 0
        if newest < max([0, *job.numbers("promise")]):
            raise WrongStateError(f"step {max(job.numbers('promise'))} was promised, and the newest is {newest}")
        tally.update([way or "end", *(f"exit code {code}" for code in job.codes.values())])
        show_progress(number, faults, "faults")
    learned = {rank: line for rank in range(WORKERS) for line in job.told[rank] if line[0] == "learned"}
    expected = {rank: ["learned", str(total), learn_undisturbed(rank, total)] for rank in range(WORKERS)}
    if learned != expected:
        raise WrongStateError(f"the end is {learned}, and should be {expected}")
    return tally


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        tally = run(directory, options.faults, options.seed)
        told = ", ".join(f"{what}: {count}" for what, count in sorted(tally.items()))
        return f"{options.faults} faults in SECONDS, and the end is the same. {told}."

    run_command("leaving", __doc__, {"--faults": {"type": int, "default": 50}}, play)


if __name__ == "__main__":
    main()
