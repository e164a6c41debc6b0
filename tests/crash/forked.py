"""A job whose workers are forked: they begin at once, with all that is imported, and tell in pipes what happens."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
import traceback
from collections.abc import Callable

from crash.command import WrongStateError
from crash.toy_worker import PATIENCE_SECONDS


class ForkedJob:
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
        while silent := {rank for rank in range(self.world_size) if all(line[0] != word for line in self.told[rank])}:
            # One that has ended after it told the word is none to complain about: a job at its last step ends at once.
            if silent & self.codes.keys() or time.monotonic() >= end_at:
                raise WrongStateError(f"not all have come to {word!r}: {self.codes}, {self.tails()}")
            self.look(0.02)

    def check_told(self, *words: str) -> None:
        """Raises `WrongStateError` if one has told something that begins with one of these words."""
        if wrong := [told for lines in self.told for told in lines if told[0] in words]:
            raise WrongStateError(f"a worker failed: {wrong}")

    def kill_in_training(self, dice: random.Random, span_seconds: float) -> None:
        """**Blocks.** Kills one of them, or all, within that time from their restore; and then those that are left.

        Raises:
            WrongStateError: If one has failed before, or does not end.
        """
        self.wait_told("restored")
        self.look(dice.random() * span_seconds)
        self.check_told("failed", "wrong")
        ranks = set(range(self.world_size))
        victims = ranks if dice.random() < 0.5 else {dice.randrange(self.world_size)}
        for rank in victims - self.codes.keys():
            self.send(rank, signal.SIGKILL)
        self.look(dice.random() * 0.1)
        for rank in ranks - self.codes.keys():
            self.send(rank, signal.SIGKILL)
        self.wait(ranks, PATIENCE_SECONDS, "killed")
        self.check_told("wrong")

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
    # A worker is started with none of the handlers that its parent may have.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(BaseException):
        try:
            code = work(rank, lambda line: _tell(writing, line))
        except BaseException:
            _tell(writing, "wrong " + traceback.format_exc().replace("\n", " | "))
    os._exit(code)


def _tell(writing: int, line: str) -> None:
    os.write(writing, line.encode() + b"\n")
