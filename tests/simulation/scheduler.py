"""Runs the tasks of simulated processes, exactly one at a time, in an order that follows from a seed.

A task is a thread, so it runs the real code. It gives up its turn at each call of a storage, and nowhere else.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch


class Killed(BaseException):
    """The process has died. Nothing that handles errors goes on after its own death."""


class ViolationError(AssertionError):
    """What must never be was found."""


@dataclass(eq=False)
class Process:
    """A simulated process.

    Attributes:
        name: For the trace.
        is_dead: True once it was killed: each of its calls raises `Killed`.
        can_die: False for one that is never killed.
        is_calm: True if its calls meet no faults.
        has_read_wrong_bytes: True once a read was answered with wrong bytes.
        generation: The generation that it has opened; 0 for none.
        machine: Where it runs, if that matters.
    """

    name: str
    is_dead: bool = False
    can_die: bool = True
    is_calm: bool = False
    has_read_wrong_bytes: bool = False
    generation: int = 0
    machine: str = ""


def _take(lock: threading.Lock) -> threading.Lock:
    lock.acquire()
    return lock


@dataclass(eq=False)
class Task:
    """A thread of a process.

    Attributes:
        wakes_at: It does not run before this time of the scheduler, unless nothing else can.
        waits_for: The task whose end it waits for, or None.
        looked_at: When it last listed the generations of each place.
    """

    process: Process
    name: str
    turn: threading.Lock = field(default_factory=lambda: _take(threading.Lock()))
    wakes_at: int = 0
    waits_for: Task | None = None
    is_done: bool = False
    looked_at: dict[object, int] = field(default_factory=dict)

    def can_run(self, now: int) -> bool:
        """Returns True if it can have the turn."""
        return not self.is_done and self.wakes_at <= now and (self.waits_for is None or self.waits_for.is_done)


class Scheduler:
    """Gives the turn to one task after another.

    Attributes:
        dice: All chance comes from here.
        now: The number of calls so far.
        task: The one that has the turn.
        trace: Each call, as the name of its task and what it is.
        happen: Called at each call; it may kill processes.
        is_late: True while a request is done that its sender has given up.
        failure: The first `ViolationError`, or an error that no code under test may raise.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now = 0
        self.task = Task(Process("world", can_die=False, is_calm=True), "world")
        self.trace: list[tuple[str, str]] = []
        self.happen: Callable[[], object] = lambda: None
        self.is_late = False
        self.failure: BaseException | None = None
        self._tasks = [self.task]
        # In some runs tasks go on for long, in others they take turns; and some sleep while others do much.
        self._stay = self.dice.choice((0.0, 0.5, 0.8, 0.95))
        self._nap = self.dice.choice((0.0, 0.01, 0.05))

    def start(self, process: Process, name: str, body: Callable[[], object]) -> Task:
        """Adds a task, which has its first turn later."""
        task = self.enlist(process, name)

        threading.Thread(target=self.run_as, args=(task, body), name=task.name, daemon=True).start()
        return task

    def enlist(self, process: Process, name: str) -> Task:
        """Adds a task whose thread comes to its turn by itself."""
        task = Task(process, f"{process.name}.{name}")
        self._tasks.append(task)
        return task

    def run_as(self, task: Task, body: Callable[[], object]) -> None:
        """Runs a task in this thread, from its first turn to its end. What it must not raise ends the simulation."""
        task.turn.acquire()
        try:
            if not (self.failure or task.process.is_dead):
                body()
        except Killed:
            pass
        except BaseException as error:
            self.fail(error)
        task.is_done = True
        self._pass_on(self._choose())

    def pause(self, what: str) -> None:
        """A scheduling point, before something that other processes could notice.

        Raises:
            Killed: If the process is dead, or the simulation is over.
        """
        task = self.task
        if self.failure or task.process.is_dead:
            raise Killed
        self.now += 1
        self.trace.append((task.name, what))
        self.happen()
        if not task.process.is_dead and self.dice.random() >= self._stay:
            if self._nap and self.dice.random() < self._nap:
                task.wakes_at = self.now + int(self.dice.expovariate(0.01))
            self._let_others(task)
        if self.failure or task.process.is_dead:
            raise Killed

    def join(self, other: Task) -> None:
        """Waits for the end of a task."""
        task = self.task
        task.waits_for = other
        if not other.is_done:
            self._let_others(task)
        task.waits_for = None
        if self.failure or task.process.is_dead:
            raise Killed

    def rest(self, calls: int) -> None:
        """Lets others go on, for that many calls."""
        self.pause("rests")
        self.task.wakes_at = self.now + calls
        self._let_others(self.task)
        if self.failure or self.task.process.is_dead:
            raise Killed

    def drain(self) -> None:
        """Waits for the end of all other tasks, also if the simulation has failed."""
        while others := [task for task in self._tasks if task is not self.task and not task.is_done]:
            task, self.task.waits_for = self.task, others[0]
            self._let_others(task)
            task.waits_for = None

    def kill(self, process: Process) -> None:
        """Kills a process: its tasks end at their next turn."""
        self.note(f"{process.name} dies")
        process.is_dead = True
        for task in self._tasks:
            if task.process is process:
                task.wakes_at, task.waits_for = 0, None

    def note(self, what: str) -> None:
        """Adds a line to the trace that is no call."""
        self.trace.append(("*", " ".join(what.split())))

    def fail(self, error: BaseException) -> None:
        """Ends the simulation."""
        if self.failure is None:
            self.failure = error
            self.note(f"{type(error).__name__}: {error}")
        for task in self._tasks:
            task.wakes_at, task.waits_for = 0, None

    def _let_others(self, task: Task) -> None:
        following = self._choose()
        if following is not task:
            self._pass_on(following)
            task.turn.acquire()

    def _pass_on(self, following: Task | None) -> None:
        if following is not None:
            self.task = following
            following.turn.release()

    def _choose(self) -> Task | None:
        self._tasks = [task for task in self._tasks if not task.is_done]
        ready = [task for task in self._tasks if task.can_run(self.now)]
        if not ready:
            asleep = [task for task in self._tasks if task.waits_for is None or task.waits_for.is_done]
            if not asleep:
                return None
            ready = [min(asleep, key=lambda task: task.wakes_at)]
            self.now = max(self.now, ready[0].wakes_at)
        return ready[0] if len(ready) == 1 else self.dice.choice(ready)


@contextmanager
def chance_from(scheduler: Scheduler) -> Iterator[None]:
    """Lets random bytes, clocks and pauses of the program follow from the seed too, for the block."""
    bits = random.Random(scheduler.dice.getrandbits(64))

    def sleep(seconds: float) -> None:
        if seconds > 0:  # Without, only the system's own threads take turns.
            scheduler.pause("sleeps")

    with (
        patch.object(os, "urandom", bits.randbytes),
        patch.object(time, "sleep", sleep),
        patch.object(time, "time", lambda: 1_800_000_000.0 + scheduler.now),
    ):
        yield
