"""Kills workers of saving jobs, again and again, and looks at what becomes of the others and of what they saved.

`python -m holdfast.testing.joint_crash`. In each round a job of a few forked processes goes on from the newest
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
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.catalog import read_catalog
from holdfast.errors import FencedError, HoldfastError, PeerError, SaveFailedError
from holdfast.storage import LocalStorage
from holdfast.testing.command import WrongStateError, check_whole, run_command, show_progress
from holdfast.testing.file_engine import join_in_directory
from holdfast.testing.toy_worker import LIVENESS_SECONDS, PATIENCE_SECONDS, ToyWorker

LIMIT_SECONDS: Final = 15.0
"""How long a survivor may take to end. It is ten times what it should, for machines that are busy."""


WAYS: Final = ("kill", "kill-all", "stop")


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
        span_seconds: Within how many seconds after all have joined somebody is struck.
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


class Job:
    """Some forked processes, each with a pipe to tell what happens."""

    def __init__(self, world_size: int, work: Callable[[int, Callable[[str], None]], int]) -> None:
        """Starts them.

        Args:
            world_size: How many there are.
            work: What each does with its rank, and a function that tells a line. It returns the exit code.
        """
        self.world_size = world_size
        self.told: list[list[list[str]]] = [[] for _ in range(world_size)]
        self.codes: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}
        self._rests = [b""] * world_size
        self._pids: list[int] = []
        self._pipes: list[int] = []
        for rank in range(world_size):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _run_child(rank, writing, work)
            os.close(writing)
            self._pids.append(pid)
            self._pipes.append(reading)

    def send(self, rank: int, number: int) -> None:
        """Sends one of them a signal."""
        os.kill(self._pids[rank], number)

    def look(self, seconds: float) -> None:
        """**Blocks.** Reads what they tell, and notes who has ended, for so long, or until all have ended."""
        end_at = time.monotonic() + seconds
        while len(self.codes) < self.world_size:
            open_pipes = [self._pipes[rank] for rank in range(self.world_size) if rank not in self.codes]
            ready = select.select(open_pipes, [], [], min(max(end_at - time.monotonic(), 0.0), 0.02))[0]
            for rank in range(self.world_size):
                if rank not in self.codes and self._pipes[rank] in ready:
                    self._read(rank)
            if time.monotonic() >= end_at:
                break

    def wait(self, ranks: set[int], seconds: float, why: str) -> None:
        """**Blocks.** Waits until these have ended.

        Raises:
            WrongStateError: If one has not when the time is up.
        """
        end_at = time.monotonic() + seconds
        while not ranks <= self.codes.keys():
            self.look(0.05)
            if time.monotonic() >= end_at:
                left = sorted(ranks - self.codes.keys())
                raise WrongStateError(f"{why}: ranks {left} still run after {seconds:g} s; told: {self.tails()}")

    def wait_told(self, word: str) -> None:
        """**Blocks.** Waits until each has told something that begins with that word.

        Raises:
            WrongStateError: If one does not.
        """
        end_at = time.monotonic() + PATIENCE_SECONDS
        while not all(any(line[0] == word for line in lines) for lines in self.told):
            self.look(0.02)
            if self.codes or time.monotonic() >= end_at:
                raise WrongStateError(f"not all have come to {word!r}: {self.codes}, {self.tails()}")

    def numbers(self, word: str) -> list[int]:
        """The numbers of all lines that begin with that word."""
        return [int(line[1]) for lines in self.told for line in lines if line[0] == word]

    def tails(self) -> list[list[list[str]]]:
        """The last lines of each."""
        return [lines[-3:] for lines in self.told]

    def close(self) -> None:
        """Kills whoever still runs."""
        for rank in range(self.world_size):
            if rank not in self.codes:
                self.send(rank, signal.SIGKILL)
        self.wait(set(range(self.world_size)), PATIENCE_SECONDS, "killed")

    def _read(self, rank: int) -> None:
        data = os.read(self._pipes[rank], 65536)
        *lines, self._rests[rank] = (self._rests[rank] + data).split(b"\n")
        self.told[rank] += [line.decode().split(" ", 3) for line in lines]
        if not data:
            os.close(self._pipes[rank])
            self.codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self._pids[rank], 0)[1])
            self.ended_at[rank] = time.monotonic()


def _run_child(rank: int, writing: int, work: Callable[[int, Callable[[str], None]], int]) -> None:
    """Never returns: nothing of the parent may run in the child, no exit handlers and no flushing of its streams."""
    code = 99
    with contextlib.suppress(BaseException):
        try:
            code = work(rank, lambda line: _tell(writing, line))
        except BaseException:  # noqa: BLE001  The parent has to see it, whatever it is.
            _tell(writing, "wrong " + traceback.format_exc().replace("\n", " | "))
    os._exit(code)


def _tell(writing: int, line: str) -> None:
    os.write(writing, line.encode() + b"\n")


def train_until_killed(
    directory: Path, store: Path, world_size: int, seed: int, rank: int, tell: Callable[[str], None]
) -> int:
    """What a worker does: saves each step, until it is killed or another one is."""
    dice = random.Random(seed)  # All workers throw the same.
    toy = ToyWorker(rank)
    try:
        cluster = join_in_directory(store, rank, world_size, timeout_seconds=PATIENCE_SECONDS)
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


def restore_and_save(directory: Path, store: Path, world_size: int, rank: int, tell: Callable[[str], None]) -> int:
    """What a worker of the next job does."""
    toy = ToyWorker(rank)
    cluster = join_in_directory(store, rank, world_size, timeout_seconds=PATIENCE_SECONDS)
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


def play_round(directory: Path, store: Path, newest: int, dice: random.Random, strikes: Strikes, tally: Tally) -> int:
    """One round.

    Returns:
        The newest committed step.

    Raises:
        WrongStateError: If something is not as it must be.
    """
    world_size = dice.choice((2, 3, 4))
    seed = dice.randrange(1 << 30)
    job = Job(world_size, lambda rank, tell: train_until_killed(directory, store, world_size, seed, rank, tell))
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
        tally.unfinished += bool(read_catalog(LocalStorage(directory)).unfinished)
        newest = _check_next_job(directory, store, dice.choice((1, world_size, world_size, 3)), promised, begun, tally)
        if stopped is not None:
            job.send(stopped, signal.SIGCONT)
            job.wait({stopped}, LIMIT_SECONDS, "a worker that was stopped and goes on")
            _check_line(directory, newest)
    finally:
        job.close()
    tally.rounds += 1
    return newest


def _check_survivors(job: Job, victim: int, number: int, tally: Tally) -> None:
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


def _check_next_job(directory: Path, store: Path, world_size: int, promised: int, begun: int, tally: Tally) -> int:
    job = Job(world_size, lambda rank, tell: restore_and_save(directory, store, world_size, rank, tell))
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
    catalog = read_catalog(storage)
    if catalog.newest is None or catalog.newest.step != newest:
        raise WrongStateError(f"step {newest} was promised, the newest is {catalog.newest}")
    check_whole(storage, catalog)


def run(directory: Path, rounds: int, seed: int, strikes: Strikes) -> Tally:
    """Plays so many rounds, one after the other.

    Args:
        directory: A new directory for the run, and for the store where the workers meet.
        rounds: How many.
        seed: What the random moments follow from, as far as the machine lets them.
        strikes: What befalls the jobs.

    Raises:
        WrongStateError: At the first round in which something is not as it must be.
    """
    dice = random.Random(seed)
    tally = Tally()
    newest = 0
    for number in range(rounds):
        # Now and then the store is a new one; else it holds what earlier jobs have left there.
        store = directory / f"store-{number // 5}"
        newest = play_round(directory / "run", store, newest, dice, strikes, tally)
        show_progress(tally.rounds, rounds, "rounds")
    return tally


def main() -> None:
    """The command."""

    def play(directory: Path, options: argparse.Namespace) -> str:
        strikes = Strikes(options.span, options.way, options.victim)
        tally = run(directory, options.rounds, options.seed, strikes)
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
        "--span": {"type": float, "default": 1.0, "help": "seconds within which somebody is struck"},
        "--way": {"choices": WAYS, "default": "", "help": "how to strike; by default each now and then"},
        "--victim": {"choices": ("leader", "other"), "default": "", "help": "by default any worker"},
    }
    run_command("joint_crash", __doc__, known, play)


if __name__ == "__main__":
    main()
