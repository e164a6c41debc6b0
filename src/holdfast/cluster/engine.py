"""What holdfast asks of an engine that starts the workers of a job: its key-value store, as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias


class EngineStore(Protocol):
    """One connection to the store of an engine. One thread at a time uses it.

    A call may take as long as the engine likes, and raise whatever it raises: whoever calls has a deadline of its own.
    Keys and values have been looked at before.
    """

    def set(self, key: str, value: bytes) -> None:
        """Lets a key hold a value, and returns when the store has it."""
        ...

    def set_once(self, key: str, value: bytes) -> bytes:
        """Lets a key hold a value unless it holds one; returns what stands there then."""
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
