"""A number that several tasks may change, and that is saved with their workspace."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from holdfast.errors import UsageError


class Counter:
    """**Thread-safe.** A whole number in a workspace that tasks of a group may change at the same time."""

    def __init__(self, value: int = 0) -> None:
        self._value = value
        # Guards the value between reading and writing it.
        self._lock = threading.Lock()

    @property
    def value(self) -> int:
        """The number now."""
        return self._value

    def add(self, amount: int = 1) -> int:
        """Adds to the number, and returns what it is then."""
        with self._lock:
            self._value += amount
            return self._value

    def try_take(self) -> bool:
        """Takes one away; False, and nothing is taken, if none is left."""
        with self._lock:
            if self._value <= 0:
                return False
            self._value -= 1
            return True

    def state_dict(self) -> dict[str, Any]:
        """The number."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a stored number.

        Raises:
            UsageError: If the state is not that of a counter.
        """
        value = state.get("value")
        if type(value) is not int:
            raise UsageError(f"{value!r} is not the value of a counter")
        with self._lock:
            self._value = value

    def __repr__(self) -> str:
        return f"Counter({self._value})"
