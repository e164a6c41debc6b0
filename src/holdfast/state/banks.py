"""Containers of very many arrays, whose look is remembered from one capture to the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final

import msgspec

from holdfast.format.scalars import Node
from holdfast.state.leaves import ArrayBackend, ArraySpec

LEAST_ARRAYS: Final = 32
"""Smaller containers are looked at array by array, which takes no longer."""


class Bank(msgspec.Struct, frozen=True):
    """A dict or a list of nothing but arrays of one library, as it looked when its state was last taken.

    It holds none of the arrays, so it keeps nothing alive.

    Attributes:
        keys: The keys of a dict in their order, or the length of a list.
        types: The arrays' classes.
        backend: Their library.
        glance: What `ArrayBackend.glance` said of them.
        names: Their leaves' names.
        specs: What they are.
        addresses: Where they lie.
        memories: What tells their memory from any other.
        node: What the container was written as.
    """

    keys: list[Any] | int
    types: frozenset[type]
    backend: ArrayBackend
    glance: object
    names: list[str]
    specs: list[ArraySpec]
    addresses: list[int]
    memories: list[Hashable]
    node: Node

    def try_arrays(self, container: dict[Any, Any] | list[Any]) -> list[Any] | None:
        """The arrays of a container that looks just like this one did, or None."""
        if keys_of(container) != self.keys:
            return None
        arrays = arrays_of(container)
        if not self.types.issuperset(map(type, arrays)) or try_glance(self.backend, arrays) != self.glance:
            return None
        return arrays


def keys_of(container: dict[Any, Any] | list[Any]) -> list[Any] | int:
    """**Pure.** What a container's parts are called."""
    return list(container) if isinstance(container, dict) else len(container)


def arrays_of(container: dict[Any, Any] | list[Any]) -> list[Any]:
    """**Pure.** The parts of a container."""
    return list(container.values()) if isinstance(container, dict) else list(container)


def try_glance(backend: ArrayBackend, arrays: Sequence[Any]) -> object:
    """What the library says of the arrays, or None where it has nothing to say."""
    try:
        return backend.glance(arrays)
    except Exception:  # noqa: BLE001  Whatever is wrong with an array comes out when it is looked at by itself.
        return None
