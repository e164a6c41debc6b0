"""What stands in a tree of live values. Such a tree may share its parts, and may even contain itself."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias, cast

from holdfast.format.codecs import is_plain_dataclass
from holdfast.format.encoding import path_part
from holdfast.format.scalars import ENCODERS
from holdfast.state.adapters import Adapter, Readable
from holdfast.state.leaves import ArrayBackend, Sharder
from holdfast.state.registry import adapter_of, backend_of_type, is_made_of_tensors, sharder_of_type

_Trail: TypeAlias = tuple[Any, Hashable, int] | None
"""The way to a value: that of what holds it, and its key and number there. A path is made only where one is needed."""


def find_stateful(root: object, path: str) -> Iterator[tuple[str, object, Adapter | None]]:
    """Objects in a tree of values: those with an adapter, and those that only want to be prepared."""
    for trail, value, handler in _walk(root, is_sought=lambda _: False):
        yield _path(path, trail), value, cast("Adapter | None", handler)


def may_change_when_read(root: object) -> bool:
    """Whether reading the state of an object, or of one in a tree of values, may change it."""
    found = find_stateful(root, "")
    return any(adapter is not None and adapter.readable(part) is Readable.WHEN_SAVED for _, part, adapter in found)


def state_paths(live: object, path: str) -> list[str]:
    """Where in a live value arrays and objects with state stand."""
    return [_path(path, trail) for trail, _, handler in _walk(live) if handler is not None]


def find_array(live: object) -> object:
    """The first plain array in a value, or None."""
    return next((value for _, value, _ in _walk(live) if backend_of_type(type(value)) is not None), None)


def holds_state(live: object) -> bool:
    """Whether there are arrays or objects with state in a live value, or it is one."""
    return any(handler is not None for _, _, handler in _walk(live))


def immutable_arrays_in(root: object) -> list[object]:
    """The arrays in a tree of values that cannot be changed, each once; not those within objects with state."""
    found = (value for _, value, handler in _walk(root, is_sought=_is_fixed) if not isinstance(handler, Adapter | None))
    return list({id(value): value for value in found}.values())


def parts_of(value: object) -> list[tuple[Hashable, Any]]:
    """What a container of values holds, each part with its key, place or field; nothing for other values."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, collections.deque)):
        names = getattr(value, "_fields", None)
        return list(zip(names or range(len(value)), value, strict=True))
    if is_plain_dataclass(type(value)):
        fields = dataclasses.fields(cast(Any, value))
        return [(field.name, getattr(value, field.name, None)) for field in fields]
    if is_made_of_tensors(type(value)):
        return [(name, getattr(value, name)) for name in cast(Any, value).__tensor_flatten__()[0]]
    return []


def _walk(
    root: object, *, is_sought: Callable[[ArrayBackend | Sharder], bool] = lambda _: True
) -> Iterator[tuple[_Trail, object, Adapter | ArrayBackend | Sharder | None]]:
    """Objects with state, those that want to be prepared (these with None), and arrays, in their order.

    Each container is looked into once, at the first place where it stands.

    Args:
        root: Where to begin.
        is_sought: Whether the arrays of a library are asked for.
    """
    # By identity. The containers are kept, or another one might get the identity of one that is gone.
    seen: dict[int, object] = {}
    ahead: list[tuple[_Trail, Any]] = [(None, root)]
    while ahead:
        trail, value = ahead.pop()
        cls = type(value)
        if cls in ENCODERS or id(value) in seen:
            continue
        library = backend_of_type(cls) or sharder_of_type(cls)
        if library is not None:
            if is_sought(library):
                yield trail, value, library
            continue
        adapter = adapter_of(value)
        if adapter is not None:
            yield trail, value, adapter
            continue
        seen[id(value)] = value
        if not isinstance(value, type) and callable(getattr(value, "prepare_for_checkpoint", None)):
            yield trail, value, None
        # Most parts are values or arrays, of which there may be very many.
        types = _types_of_parts(value)
        others = {
            cls
            for cls in types
            if cls not in ENCODERS and ((library := backend_of_type(cls)) is None or is_sought(library))
        }
        if others:
            parts = enumerate(parts_of(value))
            ahead += reversed([((trail, key, i), part) for i, (key, part) in parts if type(part) in others])


def _is_fixed(library: ArrayBackend | Sharder) -> bool:
    return getattr(library, "is_immutable", False)


def _types_of_parts(value: Any) -> set[type]:
    if isinstance(value, dict):
        return set(map(type, value.values()))
    if isinstance(value, (list, tuple, collections.deque)):
        return set(map(type, value))
    return {type(part) for _, part in parts_of(value)}


def _path(root: str, trail: _Trail) -> str:
    parts = []
    while trail is not None:
        trail, key, index = trail
        parts.append(path_part(key, index))
    return "/".join([root, *reversed(parts)])
