"""An engine whose workers are threads of one process: for tests that need many workers and little time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from holdfast.cluster.joined import JoinedCluster
from holdfast.cluster.protocol import Cluster
from holdfast.gate import Gate
from holdfast.testing.threads import run_threads

_T = TypeVar("_T")


class MemoryEngine:
    """**Thread-safe.** A store in memory that can be cut off: then calls hang, as they do where the network is cut."""

    def __init__(self) -> None:
        # Guards the two dictionaries.
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._mended = Gate()
        self._mended.open()

    @property
    def keys(self) -> list[str]:
        """The keys that hold something, in order."""
        with self._lock:
            return sorted({*self._values, *self._counters})

    def cut(self) -> None:
        """Lets every further call hang until `mend`."""
        self._mended = Gate()

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
