"""Kills workers of saving jobs, again and again, and looks at what becomes of the others and of what they saved.

`python -m crash.joint`. In each round a job of a few forked processes goes on from the newest
checkpoint, trains and saves without a pause, each worker telling through a pipe what it was promised. At a random
moment one of them, the leader too, is killed with SIGKILL, or all are, or one is stopped with SIGSTOP as if it hung.
Then it must be that

* each of the others ends within the limit, with an error that names the dead worker,
* another job, of as many workers or of another number, restores the state of one step, exactly, on all workers,
* that step is the newest that any worker was promised, or a later one that was begun,
* that job saves, after which every checkpoint that is there is whole,
* a worker that was stopped, and goes on when that other job has taken over, commits nothing any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from crash.command import WrongStateError, check_whole, run_command, show_progress
from crash.forked import ForkedJob
from crash.toy_worker import LIVENESS_SECONDS, PATIENCE_SECONDS, ToyWorker
from file_engine import join_in_directory
from holdfast.catalog import StoredRun
from holdfast.cluster.protocol import Cluster
from holdfast.errors import FencedError, HoldfastError, PeerError, SaveFailedError
from holdfast.storage import LocalStorage

LIMIT_SECONDS: Final = 15.0
"""How long a survivor may take to end. It is ten times what it should, for machines that are busy."""

WAYS: Final = ("kill", "kill-all", "stop")

_ROUNDS_OF_STORE: Final = 5
"""So many rounds have the same store, which holds what earlier jobs have left there."""

Join: TypeAlias = Callable[[int, int], Cluster]
"""A worker gives its rank, and how many they are, and waits for the others."""

OpenStore: TypeAlias = Callable[[Path], contextlib.AbstractContextManager[Join]]
"""Where the workers of a few jobs meet: a store, which may have a directory of that name."""


@contextlib.contextmanager
def open_file_store(directory: Path) -> Iterator[Join]:
    """See `OpenStore`. This one needs no framework."""
    yield lambda rank, world_size: join_in_directory(directory, rank, world_size, timeout_seconds=PATIENCE_SECONDS)


class Tally(msgspec.Struct):
    """What happened over all rounds.

    Attributes:
        rounds: How many there were.
        leaders: In how many the leader died, or hung.
        hung: In how many a worker was stopped, and not killed.
        all_killed: In how many all were killed.
        in_save: In how many a worker was struck in the middle of a save.
        unfinished: In how many an unfinished save was left behind.
        unspoken: In how many the newest checkpoint was one that nobody had been promised.
        promised: How many promises were made.
        longest_seconds: The longest that a survivor took to end.
    """

    rounds: int = 0
    leaders: int = 0
    hung: int = 0
    all_killed: int = 0
    in_save: int = 0
    unfinished: int = 0
    unspoken: int = 0
    promised: int = 0
    longest_seconds: float = 0.0


class Strikes(msgspec.Struct, frozen=True):
    """What befalls the jobs.

    Attributes:
        span_seconds: Within how many seconds after all have joined a worker is struck.
        way: One of `WAYS`; empty for each now and then.
        victim: Who is struck: `leader`, `other`, or empty for any of them.
    """

    span_seconds: float = 1.0
    way: str = ""
    victim: str = ""

    def choose_way(self, dice: random.Random) -> str:
        """How to strike this time."""
        return self.way or dice.choices(WAYS, (6, 1, 3))[0]

    def choose_victim(self, world_size: int, dice: random.Random) -> int:
        """Whom to strike this time."""
        if self.victim == "leader":
            return 0
        return dice.randrange(1 if self.victim else 0, world_size)


def train_until_killed(
    directory: Path, join: Join, world_size: int, seed: int, rank: int, tell: Callable[[str], None]
) -> int:
    """What a worker does: saves each step, until it is killed or another one is."""
    dice = random.Random(seed)  # All workers throw the same.
    toy = ToyWorker(rank)
    try:
        cluster = join(rank, world_size)
        tell("joined")
        manager = toy.manager(directory, cluster, incremental=dice.random() < 0.5)
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        tell(f"restored {step}")
        while True:
            step += dice.choice((1, 1, 5))
            toy.train(step)
            tell(f"begin {step}")
            handle = manager.save(step)
            toy.train(step + 10_000_000)
            handle.wait_committed()
            tell(f"promise {step}")
    except HoldfastError as error:
        tell(f"failed {_guilty_rank(error)} {error!r}")
        return 3


def _guilty_rank(error: HoldfastError) -> int:
    """Who an error names; -1 for nobody."""
    cause = error.__cause__ if isinstance(error, SaveFailedError) else error
    if isinstance(cause, PeerError):
        return cause.rank
    return getattr(cause, "ranks", (-2 if isinstance(cause, FencedError) else -1,))[0]


def restore_and_save(directory: Path, join: Join, world_size: int, rank: int, tell: Callable[[str], None]) -> int:
    """What a worker of the next job does. One of the job before may be stopped, and still have the run open."""
    os.environ["HOLDFAST_TAKE_OVER"] = "1"
    toy = ToyWorker(rank)
    cluster = join(rank, world_size)
    with toy.manager(directory, cluster, incremental=False) as manager:
        restored = manager.restore()
        step = restored.step if restored is not None else 0
        if restored is not None:
            toy.check(step, has_own=restored.manifest.world_size == world_size)
            if restored.passed_over:
                raise WrongStateError(f"a committed checkpoint is damaged: {restored.passed_over}")
        tell(f"restored {step}")
        toy.train(step + 1)
        manager.save(step + 1).wait_committed()
    cluster.close()
    tell(f"saved {step + 1}")
    return 0


def play_round(directory: Path, join: Join, newest: int, dice: random.Random, strikes: Strikes, tally: Tally) -> int:
    """One round.

    Returns:
        The newest committed step.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    world_size = dice.choice((2, 3, 4))
    seed = dice.randrange(1 << 30)
    job = ForkedJob(world_size, lambda rank, tell: train_until_killed(directory, join, world_size, seed, rank, tell))
    stopped: int | None = None
    try:
        job.wait_told("joined")
        job.look(dice.random() * strikes.span_seconds)
        victim = strikes.choose_victim(world_size, dice)
        way = strikes.choose_way(dice)
        tally.leaders += victim == 0
        if way == "kill-all":
            tally.all_killed += 1
            for rank in range(world_size):
                job.send(rank, signal.SIGKILL)
            job.wait(set(range(world_size)), PATIENCE_SECONDS, "killed")
        else:
            stopped = victim if way == "stop" else None
            tally.hung += way == "stop"
            _check_survivors(job, victim, signal.SIGSTOP if way == "stop" else signal.SIGKILL, tally)
        tally.in_save += job.told[victim][-1][0] == "begin"
        promised = max([newest, *job.numbers("promise")])
        begun = max([promised, *job.numbers("begin")])
        tally.promised += len(job.numbers("promise"))
        tally.unfinished += bool(StoredRun(LocalStorage(directory)).look().unfinished)
        newest = _check_next_job(directory, join, dice.choice((1, world_size, world_size, 3)), promised, begun, tally)
        if stopped is not None:
            job.send(stopped, signal.SIGCONT)
            job.wait({stopped}, LIMIT_SECONDS, "a worker that was stopped and goes on")
            _check_line(directory, newest)
    finally:
        job.close()
    tally.rounds += 1
    return newest


def _check_survivors(job: ForkedJob, victim: int, number: int, tally: Tally) -> None:
    """Strikes one worker, and makes sure that the others end in time and say because of whom."""
    struck_at = time.monotonic()
    job.send(victim, number)
    others = set(range(job.world_size)) - {victim}
    job.wait(others, LIMIT_SECONDS, f"rank {victim} was struck by signal {number}")
    for rank in sorted(others):
        tally.longest_seconds = max(tally.longest_seconds, job.ended_at[rank] - struck_at)
        last = job.told[rank][-1]
        if job.codes[rank] != 3 or last[:2] != ["failed", str(victim)]:
            raise WrongStateError(f"rank {rank} should have named rank {victim}: {job.codes[rank]} {last}")


def _check_next_job(directory: Path, join: Join, world_size: int, promised: int, begun: int, tally: Tally) -> int:
    job = ForkedJob(world_size, lambda rank, tell: restore_and_save(directory, join, world_size, rank, tell))
    try:
        job.wait(set(range(world_size)), PATIENCE_SECONDS, "the next job")
    finally:
        job.close()
    steps = set(job.numbers("restored"))
    if set(job.codes.values()) != {0} or len(steps) != 1:
        raise WrongStateError(f"the next job did not go on: {job.codes}, {job.tails()}")
    step = steps.pop()
    if not promised <= step <= begun:
        raise WrongStateError(f"step {step} came back; promised was {promised}, begun was {begun}")
    tally.unspoken += step > promised
    _check_line(directory, step + 1)
    return step + 1


def _check_line(directory: Path, newest: int) -> None:
    """Makes sure that a step is the newest, and that all that are there are whole."""
    storage = LocalStorage(directory)
    catalog = StoredRun(storage).look()
    if catalog.newest is None or catalog.newest.step != newest:
        raise WrongStateError(f"step {newest} was promised, the newest is {catalog.newest}")
    check_whole(storage, catalog)


def run(directory: Path, rounds: int, seed: int, strikes: Strikes, open_store: OpenStore = open_file_store) -> Tally:
    """Plays so many rounds, one after the other.

    Args:
        directory: A new directory for the run, and for the stores.
        rounds: How many.
        seed: What the random moments follow from, as far as the machine lets them.
        strikes: What befalls the jobs.
        open_store: Where the workers meet.

    Raises:
        WrongStateError: At the first round in which something is not as it must be.
    """
    dice = random.Random(seed)
    tally = Tally()
    newest = 0
    while tally.rounds < rounds:
        with open_store(directory / f"store-{tally.rounds}") as join:
            for _ in range(min(_ROUNDS_OF_STORE, rounds - tally.rounds)):
                newest = play_round(directory / "run", join, newest, dice, strikes, tally)
                show_progress(tally.rounds, rounds, "rounds")
    return tally


def main(open_store: OpenStore = open_file_store) -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        strikes = Strikes(options.span, options.way, options.victim)
        tally = run(directory, options.rounds, options.seed, strikes, open_store)
        return (
            f"{tally.rounds} rounds in SECONDS: nothing was lost. The leader was struck in {tally.leaders}, "
            f"{tally.hung} workers hung, {tally.all_killed} times all were killed; {tally.in_save} strikes came in the "
            f"middle of a save. {tally.unfinished} left an unfinished save, {tally.unspoken} a whole checkpoint that "
            f"nobody had been promised; {tally.promised} promises were kept. "
            f"The slowest survivor ended after {tally.longest_seconds:.1f} s, a worker that is silent for "
            f"{LIVENESS_SECONDS:g} s being taken for dead."
        )

    known: dict[str, dict[str, Any]] = {
        "--rounds": {"type": int, "default": 100},
        "--span": {"type": float, "default": 1.0, "help": "seconds within which a worker is struck"},
        "--way": {"choices": WAYS, "default": "", "help": "how to strike; by default each now and then"},
        "--victim": {"choices": ("leader", "other"), "default": "", "help": "by default any worker"},
    }
    run_command("joint", __doc__, known, play)


if __name__ == "__main__":
    main()
