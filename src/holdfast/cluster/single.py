"""One process by itself: the cluster of a job that has a single worker."""

from __future__ import annotations

import os
import socket
import threading
import time

from holdfast.cluster.polling import IN_MEMORY, poll
from holdfast.cluster.protocol import check_amount, check_key, check_value
from holdfast.errors import ClosedError, DeadlineError


class AloneCluster:
    """**Thread-safe.** A worker without others. Its store lies in its memory, so that it is always there."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.node = socket.gethostname()
        self.incarnation = os.urandom(8).hex()
        # Guards the two dictionaries.
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}
        self._closed = False

    def node_of(self, rank: int) -> str:
        """See `Cluster`."""
        return self.node

    def set(self, key: str, value: bytes) -> None:
        """See `Cluster`."""
        self._check_open()
        check_value(check_key(key), value)
        with self._lock:
            self._values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `Cluster`."""
        self._check_open()
        check_value(check_key(key), value)
        with self._lock:
            return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        """See `Cluster`."""
        self._check_open()
        with self._lock:
            return self._values.get(check_key(key))

    def wait_get(self, key: str, timeout_seconds: float) -> bytes:
        """See `Cluster`."""
        value = poll(lambda: self.try_get(key), IN_MEMORY, time.monotonic() + timeout_seconds)
        if value is None:
            raise DeadlineError(f"{key} was not set within {timeout_seconds:g} s")
        return value

    def add(self, key: str, amount: int) -> int:
        """See `Cluster`."""
        self._check_open()
        check_amount(check_key(key), amount)
        with self._lock:
            self._counters[key] = self._counters.get(key, 0) + amount
            return self._counters[key]

    def delete(self, key: str) -> None:
        """See `Cluster`."""
        self._check_open()
        check_key(key)
        with self._lock:
            self._values.pop(key, None)
            self._counters.pop(key, None)

    def close(self) -> None:
        """See `Cluster`."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the cluster was closed before this call")
