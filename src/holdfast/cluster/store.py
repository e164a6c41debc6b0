"""The workers of a job, over the store of the engine that started it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, TypeVar

from holdfast.cluster.connection_pool import ConnectionPool
from holdfast.cluster.membership import Joining
from holdfast.cluster.protocol import ANSWER_SECONDS, Connect, EngineStore, check_amount, check_key, check_value
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import DeadlineError, HoldfastError

_T = TypeVar("_T")

_CONNECTIONS_AHEAD: Final = 3


_numbers: dict[tuple[str, int], int] = {}
"""How often this worker has joined already. One thread uses it at a time: joining is collective and ordered."""


class JoinedCluster:
    """**Thread-safe.** One worker among those that have joined. See `Cluster` for its methods."""

    def __init__(
        self,
        connect: Connect,
        rank: int,
        world_size: int,
        *,
        host: str,
        prefix: str = "holdfast",
        node: str = "",
        timeout_seconds: float = JOIN_SECONDS,
    ) -> None:
        """**Collective.** **Blocks.** Waits until all workers have joined.

        `host` describes where the store is. Without a `node`, that is the name of the host.

        Raises:
            AbsentError: If workers are missing; the error names them.
            ClusterError: If the store does not respond.
        """
        self.rank = rank
        self.world_size = world_size
        self.node = node or socket.gethostname()
        self._pool = ConnectionPool(connect, host)
        try:
            self._pool.prestart(_CONNECTIONS_AHEAD)
            # Who joins twice meets those who join for the second time too.
            number = _numbers.get((prefix, rank), 0)
            joining = Joining(self._pool, f"{prefix}/{number}", rank, world_size, self.node, timeout_seconds)
            self.incarnation = joining.join()
            _numbers[prefix, rank] = number + 1
            self._prefix = f"{prefix}/{self.incarnation}"
            self.set(f"node/{rank}", self.node.encode())
        except BaseException:
            self._pool.close()
            raise

    def node_of(self, rank: int) -> str:
        """See `Cluster`."""
        if rank == self.rank:
            return self.node
        try:
            return (self.try_get(f"node/{rank}") or b"").decode()
        except HoldfastError:
            return ""  # It is asked for when something has failed, which matters more.

    def set(self, key: str, value: bytes) -> None:
        """See `Cluster`."""
        check_value(check_key(key), value)
        self._call("set", key, lambda store, full: store.set(full, value))

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `Cluster`."""
        check_value(check_key(key), value)
        return self._call("set_once", key, lambda store, full: store.set_once(full, value))

    def try_get(self, key: str) -> bytes | None:
        """See `Cluster`."""
        return self._call("try_get", check_key(key), lambda store, full: store.try_get(full))

    def wait_get(self, key: str, timeout_seconds: float) -> bytes:
        """See `Cluster`."""
        value = self._pool.wait_get(f"{self._prefix}/{check_key(key)}", timeout_seconds, f"wait_get {key}")
        if value is None:
            raise DeadlineError(f"{key} was not set within {timeout_seconds:g} s")
        return value

    def add(self, key: str, amount: int) -> int:
        """See `Cluster`."""
        check_amount(check_key(key), amount)
        return self._call("add", key, lambda store, full: store.add(full, amount))

    def delete(self, key: str) -> None:
        """See `Cluster`."""
        self._call("delete", check_key(key), lambda store, full: store.delete(full))

    def close(self) -> None:
        """See `Cluster`."""
        self._pool.close()

    def _call(self, name: str, key: str, work: Callable[[EngineStore, str], _T]) -> _T:
        full = f"{self._prefix}/{key}"
        return self._pool.call(lambda store: work(store, full), ANSWER_SECONDS, f"{name} {key}")
