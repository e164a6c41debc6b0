"""The interfaces of a job's workers, and of the key-value store of the engine that starts them.

A worker that has joined has a rank, and shares a store of small values with the others. A key consists of parts
separated by `/`, each of letters, digits, `.`, `_` and `-`; each start of the job has keys of its own. A key has either
a value or a counter, never both.

Every method raises `UsageError` for a malformed or too large key or value, `ClusterError` if the store does not
respond, for example because the process that hosts it is gone, and `ClosedError` after `close`. Every method is
thread-safe, and a wait in one thread blocks no other. None waits longer than its deadline, or `ANSWER_SECONDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, runtime_checkable

from holdfast.errors import UsageError

MAX_KEY_BYTES: Final = 200
MAX_VALUE_BYTES: Final = 1 << 20

MAX_COUNT: Final = 1 << 31
"""The limit of a counter, above and below zero: some stores cannot read larger numbers."""

ANSWER_SECONDS: Final = 10.0
"""How long a store may take to respond. A store that takes longer is taken for dead."""

_KEY: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@runtime_checkable
class Cluster(Protocol):
    """The workers of one job."""

    @property
    def rank(self) -> int:
        """The rank of this worker, from 0. Rank 0 is the leader."""
        ...

    @property
    def world_size(self) -> int:
        """The number of workers."""
        ...

    @property
    def node(self) -> str:
        """The node of this worker: equal for workers on one machine."""
        ...

    @property
    def incarnation(self) -> str:
        """Identifies this start of the job: equal on all its workers, different after a restart of them."""
        ...

    def node_of(self, rank: int) -> str:
        """**Thread-safe.** Returns the node of another worker, for people to read; empty if it is unknown."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """**Thread-safe.** Sets or replaces the value of a key; when this returns, all can read it."""
        ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """**Thread-safe.** Sets the value of a key, unless it has one.

        Returns:
            The value that the key has now: this one, or the one that it had before.
        """
        ...

    def try_get(self, key: str) -> bytes | None:
        """**Thread-safe.** Returns the value of a key, or None if it has none now."""
        ...

    def wait_get(self, key: str, timeout_seconds: float) -> bytes:
        """**Blocks.** **Thread-safe.** Returns the value of a key, once it has one.

        Raises:
            DeadlineError: If it has none within that time.
        """
        ...

    def add(self, key: str, amount: int) -> int:
        """**Thread-safe.** Adds to a counter, which starts at 0; adding 0 reads it.

        Returns:
            The sum.
        """
        ...

    def delete(self, key: str) -> None:
        """**Thread-safe.** Deletes a value or a counter; does nothing if there is none. No worker may wait for it."""
        ...

    def close(self) -> None:
        """Leaves the store, without waiting; calls in other threads may fail. A second call does nothing."""
        ...


class EngineStore(Protocol):
    """One connection to the store of an engine. One thread at a time uses it.

    A call may take any time, and raise any error: the caller has its own deadline. Keys and values were checked before.
    """

    def set(self, key: str, value: bytes) -> None:
        """Sets the value of a key, and returns when the store has it."""
        ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """Sets the value of a key unless it has one; returns the value that it has then."""
        ...

    def try_get(self, key: str) -> bytes | None:
        """Returns the value of a key, or None."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum."""
        ...

    def delete(self, key: str) -> None:
        """Deletes a value or a counter, if there is one."""
        ...


Connect: TypeAlias = Callable[[float], EngineStore]
"""Creates another connection, within a number of seconds, for which it may wait for the store to start."""


def check_key(key: str) -> str:
    """**Pure.** Returns the key if it is valid; else raises `UsageError`."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UsageError(
            f"{key!r} is not a valid key of the cluster's store",
            hint="Use letters, digits, '.', '_' and '-', with '/' between parts.",
        )
    if len(key) > MAX_KEY_BYTES:
        raise UsageError(f"a key may have at most {MAX_KEY_BYTES} bytes, got {len(key)}: {key[:40]}...")
    return key


def check_value(key: str, value: bytes) -> bytes:
    """**Pure.** Returns the value if the store can hold it; else raises `UsageError`."""
    if not isinstance(value, bytes):
        raise UsageError(f"{key}: a value must be bytes, got {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(
            f"{key}: a value may have at most {MAX_VALUE_BYTES} bytes, got {len(value)}",
            hint="The cluster's store is for small records; write large data to a file.",
        )
    return value


def check_amount(key: str, amount: int) -> int:
    """**Pure.** Returns the amount if every store can add it; else raises `UsageError`."""
    if not isinstance(amount, int) or isinstance(amount, bool) or not -MAX_COUNT < amount < MAX_COUNT:
        raise UsageError(f"{key}: the amount must be a whole number below {MAX_COUNT}, got {amount!r}")
    return amount


_NAMED_RANKS: Final = 8


def name_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """**Pure.** Returns the workers in words: `rank 3`, or `ranks 3, 4 and 7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:_NAMED_RANKS]]
    if len(ranks) > len(shown):
        return f"ranks {', '.join(shown)} and {len(ranks) - len(shown)} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
