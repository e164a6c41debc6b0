"""What one capture leaves for the next, so that what has not changed is not looked at again array by array."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Final

import msgspec

from holdfast.format.scalars import Node
from holdfast.state.leaves import ArrayBackend, ArraySpec

LEAST_ARRAYS: Final = 32
"""Smaller containers are looked at array by array, which takes no longer."""


class CachedContainer(msgspec.Struct, frozen=True):
    """A container of nothing but arrays of one library, as it looked when its state was last taken.

    It is a dict or a list of arrays, or of dicts of arrays, as optimizers have for each parameter. It holds none of the
    arrays, so it keeps nothing alive.

    Attributes:
        keys: Its keys, as `keys_of` gives them.
        count: How many values it has, those of its dicts among them.
        types: The arrays' classes.
        backend: Their library.
        fingerprint: What `ArrayBackend.fingerprint` said of them.
        names: Their leaves' names.
        specs: What they are.
        addresses: Where they lie.
        memories: What tells their memory from any other.
        node: What the container was written as.
    """

    keys: object
    count: int
    types: frozenset[type]
    backend: ArrayBackend
    fingerprint: object
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
        if not self.types.issuperset(map(type, arrays)) or try_fingerprint(self.backend, arrays) != self.fingerprint:
            return None
        return arrays


def keys_of(container: dict[Any, Any] | list[Any]) -> object:
    """**Pure.** What a container's parts are called, and those of the dicts in it: equal for two only if all are."""
    outer = list(container) if isinstance(container, dict) else len(container)
    parts = _parts_of(container)
    if dict not in set(map(type, parts)):
        return outer
    return outer, [list(part) if type(part) is dict else None for part in parts]


def arrays_of(container: dict[Any, Any] | list[Any]) -> list[Any]:
    """**Pure.** The parts of a container; where one is a dict, its parts."""
    parts = _parts_of(container)
    if dict not in set(map(type, parts)):
        return list(parts)
    return [leaf for part in parts for leaf in (part.values() if type(part) is dict else (part,))]


def dicts_in(container: dict[Any, Any] | list[Any], node: Node) -> Iterator[Node]:
    """**Pure.** The nodes of the dicts in a container, whose own node is given."""
    nodes = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (own for part, own in zip(_parts_of(container), nodes, strict=True) if type(part) is dict)


def _parts_of(container: dict[Any, Any] | list[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def try_fingerprint(backend: ArrayBackend, arrays: Sequence[Any]) -> object:
    """What the library says of the arrays, or None where it has nothing to say."""
    try:
        return backend.fingerprint(arrays)
    except Exception:  # noqa: BLE001  Whatever is wrong with an array comes out when it is looked at by itself.
        return None


class CaptureCache:
    """The long containers of the objects that are captured again and again.

    Attributes:
        containers: By path, each as it looked at the last capture.
    """

    def __init__(self) -> None:
        self.containers: dict[str, CachedContainer] = {}
