"""The workers of a job, over the store of the engine that started it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from holdfast.cluster.connection_pool import ConnectionPool
from holdfast.cluster.polling import JOINING, JOINING_TURNS, STALE_JOIN_SECONDS
from holdfast.cluster.protocol import (
    ANSWER_SECONDS,
    Connect,
    EngineStore,
    check_amount,
    check_key,
    check_value,
    name_ranks,
)
from holdfast.deadlines import JOIN_SECONDS
from holdfast.errors import AbsentError, ClusterError, DeadlineError, HoldfastError

_WHAT: Final = "joining the other workers"

_HINT: Final = (
    "Every worker must open the cluster, or create its manager, at about the same time. Check whether that "
    "worker died earlier, and the last lines of its log. For a worker that saves on its own, pass "
    'cluster="alone".'
)


class _Joined(msgspec.Struct, frozen=True):
    """The record of a worker."""

    nonce: str
    node: str
    world_size: int


class Joining:
    """Lets workers find each other in a store that may still contain the records of an earlier start of the job.

    Engines restart workers without emptying the store, and not all of them tell which start it is. So each worker
    writes a nonce of its own. The leader invites the nonces that it finds, waits until a living worker has answered for
    each, and only then declares that the job has begun. Records of dead workers get no answer.

        join/RANK                a worker's nonce, and its node
        invite/NONCE             the leader's token, for the worker that wrote the nonce
        answer/TOKEN/RANK        the nonce, by the worker that has found the invitation
        begun/TOKEN              all have answered
    """

    def __init__(
        self, pool: ConnectionPool, prefix: str, rank: int, world_size: int, node: str, timeout_seconds: float
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._mine = _Joined(os.urandom(8).hex(), node, world_size)
        self._backoff = JOINING.spread(world_size)
        self._begun_at = self._end_at = 0.0

    def join(self) -> str:
        """**Blocks.** Waits for all workers.

        Returns:
            The token of this start of the job, equal on all workers.

        Raises:
            AbsentError: If workers are missing; the error names them.
            ClusterError: If the store fails, or another start of the job replaces this one.
        """
        self._begun_at = time.monotonic()
        self._end_at = self._begun_at + self._timeout_seconds
        key, value = self._key("join", self._rank), msgspec.json.encode(self._mine)
        # The store itself may have to come up yet.
        self._pool.call(lambda store: store.set(key, value), self._timeout_seconds, _WHAT)
        return self._follow() if self._rank else self._lead()

    # The leader.

    def _lead(self) -> str:
        token = self._mine.nonce
        invited: set[str] = set()
        answered: dict[int, str] = {}
        others = range(1, self._world_size)
        while True:
            for rank in others:
                self._invite(self._wait_nonce(rank), token, invited)
            for rank in others:
                if rank not in answered:
                    answered[rank] = self._wait_answer(rank, token, invited, answered)
            # A worker of an earlier start may have answered before its successor came.
            changed = [rank for rank in others if self._nonce_of(rank) != answered[rank]]
            self._check_nonce()
            if not changed:
                break
            for rank in changed:
                del answered[rank]
        self._set(self._key("begun", token), b"")
        for nonce in invited:
            self._delete(self._key("invite", nonce))
        for rank in others:
            self._delete(self._key("answer", token, rank))
        return token

    def _wait_nonce(self, rank: int) -> str:
        """Returns a worker's record, waiting until the deadline."""
        while (nonce := self._nonce_of(rank)) is None:
            if time.monotonic() > self._end_at:
                missing = [other for other in range(self._world_size) if self._nonce_of(other) is None]
                raise self._absent(missing or [rank])
            self._check_nonce()
            # What an earlier start of another size has left is there already, so that it has to look again.
            if self._wait(self._key("join", rank), JOINING_TURNS.shortest_seconds) is not None:
                # The value exists, but not from a worker of this start yet; a store does not report a second one.
                time.sleep(STALE_JOIN_SECONDS)
        return nonce

    def _invite(self, nonce: str, token: str, invited: set[str]) -> None:
        if nonce not in invited:
            self._set(self._key("invite", nonce), token.encode())
            invited.add(nonce)

    def _wait_answer(self, rank: int, token: str, invited: set[str], answered: dict[int, str]) -> str:
        """Returns the nonce that a living worker has answered for."""
        while True:
            nonce = self._wait_nonce(rank)
            self._invite(nonce, token, invited)
            answer = self._wait(self._key("answer", token, rank), JOINING_TURNS.shortest_seconds)
            if answer == nonce.encode():
                return nonce
            if answer is not None:
                # It was its predecessor that answered; a store does not tell when another one does.
                time.sleep(STALE_JOIN_SECONDS)
            self._check_nonce()
            if time.monotonic() > self._end_at:
                keys = {other: self._key("answer", token, other) for other in range(1, self._world_size)}
                raise self._absent(
                    [other for other, key in keys.items() if other not in answered and self._try_get(key) is None]
                    or [rank]
                )

    # The others.

    def _follow(self) -> str:
        invitation = self._key("invite", self._mine.nonce)
        token = b""
        while True:
            # Very many workers wait for the last one, and all ask the same store.
            turn_seconds = JOINING_TURNS.pause_seconds(time.monotonic() - self._begun_at)
            # Another leader may invite as long as none has begun: one of them is of an earlier start.
            newest = (self._try_get(invitation) if token else self._wait(invitation, turn_seconds)) or token
            if newest != token:
                token = newest
                self._set(self._key("answer", token.decode(), self._rank), self._mine.nonce.encode())
            if token and self._wait(self._key("begun", token.decode()), turn_seconds) is not None:
                self._check_nonce()
                return token.decode()
            if time.monotonic() > self._end_at:
                missing = [rank for rank in range(self._world_size) if self._nonce_of(rank) is None]
                raise self._absent(missing or [0])
            self._check_nonce()

    # The store.

    def _check_nonce(self) -> None:
        """Checks that this worker is still the one of its rank: a successor may have joined in its place."""
        if self._nonce_of(self._rank) != self._mine.nonce:
            raise ClusterError(
                f"another start of the job has replaced this one, rank {self._rank}",
                hint=(
                    "Either two jobs use the same address and port, or this process was taken for dead and should exit."
                ),
            )

    def _absent(self, ranks: list[int]) -> AbsentError:
        return AbsentError(
            f"{name_ranks(ranks)} of {self._world_size} did not join within {self._timeout_seconds:g} s",
            ranks=tuple(ranks),
            nodes=tuple(joined.node if (joined := self._joined(rank)) else "" for rank in ranks),
            hint=_HINT,
        )

    def _nonce_of(self, rank: int) -> str | None:
        joined = self._joined(rank)
        # One of another size was left there by an earlier start, and its successor will come.
        return joined.nonce if joined and joined.world_size == self._world_size else None

    def _joined(self, rank: int) -> _Joined | None:
        data = self._try_get(self._key("join", rank))
        return msgspec.json.decode(data, type=_Joined) if data is not None else None

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def _set(self, key: str, value: bytes) -> None:
        self._pool.call(lambda store: store.set(key, value), ANSWER_SECONDS, _WHAT)

    def _delete(self, key: str) -> None:
        self._pool.call(lambda store: store.delete(key), ANSWER_SECONDS, _WHAT)

    def _try_get(self, key: str) -> bytes | None:
        return self._pool.call(lambda store: store.try_get(key), ANSWER_SECONDS, _WHAT)

    def _wait(self, key: str, timeout_seconds: float) -> bytes | None:
        left_seconds = max(self._end_at - time.monotonic(), 0.0)
        # The leader waits for one worker after the other, and each of these waits is new.
        begun_at = self._begun_at if self._rank else None
        return self._pool.wait_get(key, min(timeout_seconds, left_seconds), _WHAT, self._backoff, begun_at)


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
