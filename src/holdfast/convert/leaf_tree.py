"""Converts the state of a checkpoint's objects to plain trees that refer to leaves, for other formats. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.errors import HoldfastError
from holdfast.format.codecs import Codec
from holdfast.format.decoding import UNFILLED, Decoder, SubclassNode, find_tags
from holdfast.format.encoding import escape, path_part
from holdfast.format.scalars import Node

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys, indices and fields on the way to a value; the first is the object's name."""

_ITS_OWN: Final = frozenset({"per_worker", "rng"})
_ATOMS: Final = frozenset({type(None), bool, int, float, str, bytes, complex})
_KEYS: Final = frozenset({type(None), bool, int, float, str, bytes})
_MOST_BITS: Final = 2000


class ArrayRef(msgspec.Struct, frozen=True):
    """An array of the state. Arrays that share memory have one leaf."""

    leaf: str


class ObjectState(msgspec.Struct, frozen=True):
    """The state of an object."""

    kind: str
    state: Any


class CodedValue(msgspec.Struct, frozen=True):
    """A value that has a codec, such as a `torch.dtype`."""

    tag: str
    value: Any


class LeftOut(msgspec.Struct, frozen=True):
    """Something that is not in the output, and why."""

    path: str
    reason: str


class _NotExportable(msgspec.Struct, frozen=True):
    reason: str


_OMITTED: Final = _NotExportable("")


class _TreeDecoder(Decoder):
    """Decodes stored state, whether this program knows the types or not."""

    def __init__(self) -> None:
        super().__init__(lambda tag: Codec(object, tag, _same, lambda value: CodedValue(tag, value)))

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        return ArrayRef(leaf)

    def stateful(self, kind: str, state: Node, live: Any, path: str, depth: int) -> Any:
        if kind in _ITS_OWN:
            return _NotExportable("it differs per worker")
        return ObjectState(kind, self.decode(state, UNFILLED, path, depth))

    def coded(self, codec: Codec, payload: Node, live: Any, path: str, depth: int) -> Any:
        if any(tag in ("array", "tensor_subclass") for tag, _ in find_tags(payload)):
            return _NotExportable(f"it is a {codec.tag}")
        return super().coded(codec, payload, live, path, depth)

    def subclass(self, name: str, stored: SubclassNode, live: Any, path: str, depth: int) -> Any:
        return _NotExportable(f"it is a {name.rpartition(':')[2]}")

    def unknown_type(self, name: str, live: Any, path: str) -> Any:
        return _NotExportable(f"it is a {name.rpartition(':')[2]}")

    def _tagged(self, node: Node, live: Any, path: str, depth: int) -> Any:
        if node["$"] in ("namedtuple", "dataclass", "pytree") and type(node.get("v")) is dict:
            return self.mapping(node["v"], UNFILLED, path, depth + 1)
        if node["$"] == "live":
            return _NotExportable("it belongs to the program")
        return super()._tagged(node, UNFILLED, path, depth)


def _same(value: Any) -> Any:
    return value


def join_objects(parts: Iterable[Mapping[str, Node]]) -> dict[str, Node]:
    """**Pure.** Combines the objects of all workers: some have objects that others lack, such as pipeline stages."""
    joined: dict[str, Node] = {}
    for objects in parts:
        for name, node in objects.items():
            joined[name] = _join(joined[name], node) if name in joined else node
    return joined


def _join(one: Node, other: Node) -> Node:
    if type(one) is not dict or type(other) is not dict or one == other:
        return one
    if "$" not in one and "$" not in other:
        return {
            key: _join(one[key], other[key]) if key in one and key in other else one.get(key, other.get(key))
            for key in {**one, **other}
        }
    if one.get("$") == other.get("$") == "object" and one.get("k") == other.get("k") and one.get("k") not in _ITS_OWN:
        return {**one, "v": _join(one.get("v"), other.get("v"))}
    return one


def make_tree(
    objects: Mapping[str, Node], select: Callable[[str], bool] | None
) -> tuple[dict[str, Any], list[LeftOut]]:
    """**Pure.** Returns the state of objects as a tree of dicts, lists, scalars, `ObjectState` and `ArrayRef`.

    Returns what cannot be part of it as well.

    Raises:
        FormatError: If the state is malformed.
    """
    left: list[LeftOut] = []
    tree: dict[str, Any] = {}
    for name, node in objects.items():
        path = escape(name)
        value = _plain(_TreeDecoder().decode(node, UNFILLED, path), path, select, left)
        if value is not _OMITTED:
            tree[name] = value
    return tree, left


def _plain(value: Any, path: str, select: Callable[[str], bool] | None, left: list[LeftOut]) -> Any:
    """Returns the value with only those parts that other programs know; `_OMITTED` if nothing is left."""
    if select is not None and select(path):
        select = None
    if type(value) is ObjectState:
        state = _plain(value.state, path, select, left)
        return _OMITTED if state is _OMITTED else ObjectState(value.kind, state)
    if isinstance(value, dict):
        return _mapping(value, path, select, left)
    if type(value) in (list, tuple, collections.deque):
        parts = [_plain(part, f"{path}/{number}", select, left) for number, part in enumerate(value)]
        if select is not None:
            parts = [part for part in parts if part is not _OMITTED]
            return parts or _OMITTED
        parts = [None if part is _OMITTED else part for part in parts]
        return tuple(parts) if type(value) is tuple else parts
    if select is not None:
        return _OMITTED
    if type(value) is int and value.bit_length() > _MOST_BITS:
        value = _NotExportable(f"it is a number of {value.bit_length()} bits")
    if type(value) in _ATOMS or type(value) in (ArrayRef, CodedValue):
        return value
    if isinstance(value, (set, frozenset)) and all(type(part) in _KEYS for part in value):
        return set(value)
    if type(value) is bytearray:
        return bytes(value)
    if type(value).__module__ == "numpy" and type(value.item()) in _ATOMS:
        return value.item()
    left.append(LeftOut(path, value.reason if type(value) is _NotExportable else f"it is a {type(value).__qualname__}"))
    return _OMITTED


def _mapping(value: dict[Any, Any], path: str, select: Callable[[str], bool] | None, left: list[LeftOut]) -> Any:
    found: dict[Any, Any] = {}
    for number, (key, part) in enumerate(value.items()):
        at = f"{path}/{path_part(key, number)}"
        if type(key) not in _KEYS:
            if select is None or select(at):
                left.append(LeftOut(at, f"its key is a {type(key).__qualname__}"))
            continue
        kept = _plain(part, at, select, left)
        if kept is not _OMITTED:
            found[key] = kept
    return found if found or select is None else _OMITTED


def nest(entries: Iterable[tuple[KeyPath, Any]], malformed: Callable[[str], HoldfastError]) -> dict[Any, Any]:
    """**Pure.** Builds the dicts of values by their paths.

    If a path leads through another value, or two are the same, the error that `malformed` makes is raised.
    """
    root: dict[Any, Any] = {}
    for keys, value in entries:
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if type(place) is not dict:
                raise malformed(f"{'.'.join(map(str, keys))} passes through another entry")
        if keys[-1] in place:
            raise malformed(f"{'.'.join(map(str, keys))} appears twice")
        place[keys[-1]] = value
    return root


def list_arrays(value: Any, keys: KeyPath = ()) -> Iterator[tuple[KeyPath, ArrayRef]]:
    """**Pure.** Yields the arrays of a tree with their paths, in order."""
    if type(value) is ArrayRef:
        yield keys, value
    elif type(value) is ObjectState:
        yield from list_arrays(value.state, keys)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from list_arrays(part, (*keys, key))
    elif type(value) in (list, tuple):
        for number, part in enumerate(value):
            yield from list_arrays(part, (*keys, number))


def list_values(value: Any, keys: KeyPath = ()) -> Iterator[KeyPath]:
    """**Pure.** Yields the paths of values other than arrays: of each object that has some, those without an array."""
    if type(value) is ObjectState:
        value = value.state
    if not any(True for _ in list_arrays(value)):
        yield keys
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from list_values(part, (*keys, key))
    elif type(value) in (list, tuple):
        for number, part in enumerate(value):
            yield from list_values(part, (*keys, number))
