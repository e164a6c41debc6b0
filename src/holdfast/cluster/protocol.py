"""What holdfast asks of the workers of one job, and of the key-value store of the engine that starts them.

A worker that has joined has a rank, and shares a store of small values with the others. A key is made of parts with
`/` between them, each of letters, digits, `.`, `_` and `-`; all keys of one start of the job are its own. A key holds
either a value or a counter, never both.

Every method raises `UsageError` for a key or a value that is not of that form or too large, `ClusterError` when the
store does not answer, as when the process that hosts it is gone, and `ClosedError` after `close`. Every method is
thread-safe, and a wait in one thread blocks no other. None of them waits longer than its deadline, or
`ANSWER_SECONDS` where it names none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias, runtime_checkable

from holdfast.errors import UsageError

MAX_KEY_BYTES: Final = 200
MAX_VALUE_BYTES: Final = 1 << 20

MAX_COUNT: Final = 1 << 31
"""A counter stays below this, above and below zero: there are stores that cannot read a larger one again."""

ANSWER_SECONDS: Final = 10.0
"""How long a store may take to answer what it need not wait for. One that takes longer is taken for dead."""

_KEY: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@runtime_checkable
class Cluster(Protocol):
    """The workers of one job."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0. Rank 0 is the leader."""
        ...

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        ...

    @property
    def node(self) -> str:
        """Where this worker runs: equal for workers on one machine."""
        ...

    @property
    def incarnation(self) -> str:
        """Names this start of the job: equal on all its workers, different after a restart of them."""
        ...

    def node_of(self, rank: int) -> str:
        """**Thread-safe.** Where another worker runs, for people to read; empty if that cannot be found out now."""
        ...

    def set(self, key: str, value: bytes) -> None:
        """**Thread-safe.** Lets a key hold a value, whatever it held before; when this returns, all can read it."""
        ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """**Thread-safe.** Lets a key hold a value, unless it holds one.

        Returns:
            What the key holds now: this value, or the one that was there before.
        """
        ...

    def try_get(self, key: str) -> bytes | None:
        """**Thread-safe.** The value of a key, or None if it holds none now."""
        ...

    def wait_get(self, key: str, timeout_seconds: float) -> bytes:
        """**Blocks.** **Thread-safe.** The value of a key, once it holds one.

        Raises:
            DeadlineError: If it holds none within that time.
        """
        ...

    def add(self, key: str, amount: int) -> int:
        """**Thread-safe.** Adds to a counter, which is 0 before it is first added to; 0 may be added, to read it.

        Returns:
            The sum.
        """
        ...

    def delete(self, key: str) -> None:
        """**Thread-safe.** Forgets a value or a counter; harmless if there is none. No worker may be waiting for it."""
        ...

    def close(self) -> None:
        """Leaves the store, without waiting; calls in other threads may fail. Harmless twice."""
        ...


class EngineStore(Protocol):
    """One connection to the store of an engine. One thread at a time uses it.

    A call may take as long as the engine likes, and raise any error: the caller has a deadline of its own.
    Keys and values have been looked at before.
    """

    def set(self, key: str, value: bytes) -> None:
        """Lets a key hold a value, and returns when the store has it."""
        ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """Lets a key hold a value unless it holds one; returns the value that it holds then."""
        ...

    def try_get(self, key: str) -> bytes | None:
        """The value of a key, or None."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns the sum."""
        ...

    def delete(self, key: str) -> None:
        """Forgets a value or a counter, if there is one."""
        ...


Connect: TypeAlias = Callable[[float], EngineStore]
"""Makes one more connection, within a number of seconds, for which it may wait for the store to come up."""


def check_key(key: str) -> str:
    """**Pure.** The key, if it is one; else raises `UsageError`."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UsageError(
            f"{key!r} is not a valid key of the cluster's store",
            hint="Use letters, digits, '.', '_' and '-', with '/' between parts.",
        )
    if len(key) > MAX_KEY_BYTES:
        raise UsageError(f"a key may have at most {MAX_KEY_BYTES} bytes, got {len(key)}: {key[:40]}...")
    return key


def check_value(key: str, value: bytes) -> bytes:
    """**Pure.** The value, if the store can hold it; else raises `UsageError`."""
    if not isinstance(value, bytes):
        raise UsageError(f"{key}: a value must be bytes, got {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise UsageError(
            f"{key}: a value may have at most {MAX_VALUE_BYTES} bytes, got {len(value)}",
            hint="The cluster's store is for small records; write large data to a file.",
        )
    return value


def check_amount(key: str, amount: int) -> int:
    """**Pure.** The amount, if every store can add it; else raises `UsageError`."""
    if not isinstance(amount, int) or isinstance(amount, bool) or not -MAX_COUNT < amount < MAX_COUNT:
        raise UsageError(f"{key}: the amount must be a whole number below {MAX_COUNT}, got {amount!r}")
    return amount
