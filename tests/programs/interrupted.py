"""Saves and pools of threads that signals interrupt: MODE [MORE]."""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.errors import UsageError
from holdfast.events import Committed, Event, Failed, Staged
from holdfast.process.worker_pool import WorkerPool
from holdfast.state.numpy_arrays import NumpyBackend
from holdfast.state.registry import register_backend
from holdfast.storage import MemoryStorage
from interrupts import Interrupted, interrupt_after


def interrupt_saves(directory: str, size: int) -> None:
    """Prints how many saves were interrupted."""
    # What is imported at the first save is imported by now: Python itself does not survive a torn import.
    with hf.CheckpointManager(directory + "-first", hf.Checkpoint(a=np.zeros(3))) as manager:
        manager.save(1)
        manager.restore()
    dice = random.Random(4)
    array = np.zeros(size)
    interrupted = 0
    events: list[Event] = []

    def steps_told(kind: type[Staged | Committed | Failed]) -> list[int | None]:
        return [event.step for event in events if isinstance(event, kind)]

    for life in range(12):
        manager = hf.CheckpointManager(
            directory, hf.Checkpoint(a=array), keep=hf.Latest(3), threads=3, sinks=[events.append]
        )
        manager.restore()
        for step in range(life * 100 + 1, life * 100 + 15):
            array[:] = step
            if interrupt_after(dice.uniform(1e-5, 2e-3 + size * 2e-9), lambda: manager.save(step)):  # noqa: B023
                interrupted += 1
                if not interrupted % 4:
                    manager.wait()
                    # What was called off is gone, no matter which thread had begun to write it.
                    debris = [path for path in Path(directory).glob("step-*") if not any(path.glob("manifest*"))]
                    assert not debris, debris
        manager.wait()
        for kept in manager.steps():
            found = np.zeros(size)
            hf.CheckpointManager(directory, hf.Checkpoint(a=found)).restore(kept)
            assert (found == kept).all(), (kept, np.unique(found))
        manager.close()
        assert steps_told(Staged) == steps_told(Committed), events
        assert not steps_told(Failed), events
    print(interrupted)


def wait_in_handler() -> None:
    """Prints how many calls of `wait` in a signal handler were refused, and how many waited."""
    dice = random.Random(1)
    refused = waited = 0

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal refused, waited
        try:
            manager.wait()
            waited += 1
        except UsageError:
            refused += 1
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 5e-4))

    faulthandler.dump_traceback_later(60, exit=True)
    with hf.CheckpointManager(MemoryStorage(), hf.Checkpoint(a=np.zeros(1000)), keep=hf.Latest(2)) as manager:
        signal.signal(signal.SIGALRM, wait)
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        for step in range(1, 2000):
            manager.save(step)
            manager.wait()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert manager.latest_step() == 1999
    print(refused, waited)


class Failing(np.ndarray[Any, Any]):
    """An array of a library of its own."""


class FailingLibrary(NumpyBackend):
    """Cannot copy its arrays while `fails` is set."""

    fails = False
    has_failed = False

    def describe(self, arrays: Any) -> Any:
        return super().describe([array.view(np.ndarray) for array in arrays])

    def copy_out(self, arrays: Any, image: Any, offsets_bytes: Any) -> None:
        if self.fails:
            self.has_failed = True
            raise RuntimeError("the library cannot copy it")
        super().copy_out(arrays, image, offsets_bytes)


def interrupt_after_failing_copy() -> None:
    """Prints how many saves ended with the copy's error, and how many were interrupted after it."""
    library = FailingLibrary()
    register_backend(Failing, library)
    calls = struck = 0

    def strike(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        if library.has_failed and event == "call":
            calls += 1
            if calls == struck:
                raise Interrupted

    outcomes = []
    state = {"plain": np.zeros(4_000_000), "strided": np.zeros((300, 200))[:, ::2].view(Failing)}
    for struck in range(30):
        manager = hf.CheckpointManager(MemoryStorage(), hf.Checkpoint(a=state), timeout_seconds=20, threads=3)
        manager.save(1).wait_committed()
        calls = 0
        library.fails, library.has_failed = True, False
        sys.setprofile(strike)
        try:
            manager.save(2)
        except (Interrupted, RuntimeError) as error:
            outcomes.append(type(error).__name__)
        sys.setprofile(None)
        library.fails = False
        if struck % 2:
            manager.save(3).wait_committed()
            assert [*manager.steps()] == [1, 3], manager.steps()
        manager.close()
        gc.collect()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(20)
                assert not thread.is_alive(), f"{thread.name} is left behind an interrupt at call {struck}"
    print(outcomes.count("RuntimeError"), outcomes.count("Interrupted"))


def interrupt_pools() -> None:
    """Prints how many lives of pools were interrupted, and how many threads there are in the end."""
    dice = random.Random(1)
    interrupted = 0
    for _ in range(2000):
        pool = WorkerPool(4, "pool")

        def live(pool: WorkerPool = pool) -> None:
            pool.start()
            for _ in range(4):
                pool.run([int] * 50)

        interrupted += interrupt_after(dice.uniform(1e-5, 2e-3), live)
        pool.close()
    # Threads of the last pool may still be on their way, and such a thread cannot be joined.
    end_at = time.monotonic() + 30
    while threading.active_count() > 1 and time.monotonic() < end_at:
        time.sleep(0.01)
    print(interrupted, threading.active_count())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["saves", directory, size]:
            interrupt_saves(directory, int(size))
        case ["wait in handler"]:
            wait_in_handler()
        case ["after failing copy"]:
            interrupt_after_failing_copy()
        case ["pools"]:
            interrupt_pools()
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
