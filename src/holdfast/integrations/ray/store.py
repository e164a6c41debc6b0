"""The key-value store through which the actors of a session agree: an actor of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray

from holdfast.cluster.protocol import Connect


class StoreActor:
    """Values and counters in the memory of one process. An actor does one call after the other, so each is atomic."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        self._values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        self._counters[key] = self._counters.get(key, 0) + amount
        return self._counters[key]

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        self._values.pop(key, None)
        self._counters.pop(key, None)


class RayStore:
    """A connection to a `StoreActor`. See `EngineStore`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        ray.get(self._actor.set.remote(key, value))

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        stands: bytes = ray.get(self._actor.set_once.remote(key, value))
        return stands

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        value: bytes | None = ray.get(self._actor.try_get.remote(key))
        return value

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        return int(ray.get(self._actor.add.remote(key, amount)))

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        ray.get(self._actor.delete.remote(key))


def connect_to(actor: Any) -> Connect:
    """How a process of a session reaches the store."""
    return partial(_connect, actor)


def _connect(actor: Any, timeout_seconds: float) -> RayStore:
    return RayStore(actor)
