"""An engine whose workers are threads of one process: for tests that need many workers and little time."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

import numpy as np
import pytest

import holdfast as hf
from holdfast.cluster.protocol import Cluster
from holdfast.cluster.store import JoinedCluster
from holdfast.process.latch import Latch

_T = TypeVar("_T")

_PATIENCE_SECONDS: Final = 120.0


@pytest.fixture(scope="module")
def numpy_is_known() -> None:
    """The first object of a library has its integration imported, which is no matter for threads."""
    with hf.CheckpointManager("memory://warm", hf.Checkpoint(array=np.zeros(1)), begin_anew=True) as manager:
        manager.save(1)


class MemoryEngine:
    """**Thread-safe.** A store in memory that can be cut off: then calls hang, as they do where the network is cut."""

    def __init__(self) -> None:
        # Guards the two dictionaries.
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._mended = Latch()
        self._mended.open()

    @property
    def keys(self) -> list[str]:
        """The keys that hold something, in order."""
        with self._lock:
            return sorted({*self._values, *self._counters})

    def cut(self) -> None:
        """Lets every further call hang until `mend`."""
        self._mended = Latch()

    def mend(self) -> None:
        """Lets the calls that hang go on, and those that come."""
        self._mended.open()

    def connect(self, timeout_seconds: float) -> MemoryEngine:
        """A connection, which is the store itself."""
        return self

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        self._pass()
        with self._lock:
            self._values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        self._pass()
        with self._lock:
            return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        self._pass()
        with self._lock:
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        self._pass()
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        self._pass()
        with self._lock:
            self._values.pop(key, None)
            self._counters.pop(key, None)

    def _pass(self) -> None:
        self._mended.wait(threading.TIMEOUT_MAX)


def run_workers(
    count: int, work: Callable[[Cluster], _T], engine: MemoryEngine | None = None, *, timeout_seconds: float = 30.0
) -> list[_T]:
    """**Blocks.** Does the same work as each worker of a job, each in a thread of its own.

    Args:
        count: How many workers there are.
        work: What each does with its cluster, which is closed behind it when all have ended.
        engine: Where they meet; a new one if None.
        timeout_seconds: How long each waits for the others when the job begins.

    Returns:
        What each has returned, by rank; the first error of any is raised.
    """
    engine = engine or MemoryEngine()
    # No other job in this process has joined under that name.
    prefix = f"memory-{os.urandom(8).hex()}"
    with ExitStack() as stack:

        def join(rank: int) -> _T:
            cluster = JoinedCluster(
                engine.connect,
                rank,
                count,
                host="this process",
                prefix=prefix,
                node=f"node-{rank}",
                timeout_seconds=timeout_seconds,
            )
            stack.callback(cluster.close)
            return work(cluster)

        return run_threads([partial(join, rank) for rank in range(count)])


def run_threads(jobs: Sequence[Callable[[], _T]], timeout_seconds: float = _PATIENCE_SECONDS) -> list[_T]:
    """**Blocks.** Does each job in a thread of its own.

    Raises:
        BaseException: The first error of any of them, once all have ended or the time is up.
        AssertionError: If some have not ended in time; it says where they are. They are left behind.
    """
    returned: dict[int, _T] = {}
    errors: list[BaseException] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def work(number: int) -> None:
        try:
            returned[number] = jobs[number]()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.put(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    end_at = time.monotonic() + timeout_seconds
    at_work = set(range(len(jobs)))
    while at_work:
        try:
            at_work.discard(ended.get(timeout=max(end_at - time.monotonic(), 0.0)))
        except queue.Empty:
            break
    stuck = "".join(f"\n\nthread {number} is at\n{_where(threads[number])}" for number in sorted(at_work))
    if errors:
        if stuck:
            errors[0].add_note(f"when the time was up:{stuck}")
        raise errors[0]
    if stuck:
        raise AssertionError(f"not all have ended within {timeout_seconds:g} s:{stuck}")
    return [returned[number] for number in range(len(jobs))]


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "its end"
