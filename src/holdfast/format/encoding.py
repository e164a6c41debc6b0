"""Encodes Python values as JSON so that they come back equal and of the same exact type. Pure.

Values that JSON represents exactly are stored as they are; everything else is an object with a tag, `{"$": tag, "v":
payload}`, some with an argument `k`. `Encoder` and `Decoder` (in `decoding.py`) walk the trees. By themselves they know
plain values; subclasses add others (arrays, objects with state). No type is found by its stored name unless the program
registered it, or a live value of that type is at the same path.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from holdfast.errors import UnsupportedValueError
from holdfast.format.codecs import FACTORY_NAMES, codec_for, is_namedtuple, is_plain_dataclass, name_of
from holdfast.format.scalars import (
    ENCODERS,
    Malformed,
    Node,
    encode_int,
    encode_numpy,
    encode_str,
    encode_zoneinfo,
    is_text,
    tagged,
)

MAX_DEPTH: Final = 64
"""The largest depth of nested values. Both walks then stay well within the interpreter's own limit."""

MAX_VALUES: Final = 10_000_000
"""The most values that are written at once. More take minutes and gigabytes, here and at each restore."""

_KINDS: Final = {"function": "a function", "type": "a class", "module": "a module", "generator": "a generator"}

_PLAINER: Final = "Store a plainer value instead."
_REGISTER: Final = (
    "Give the object state_dict() and load_state_dict(), or pass a small wrapper that has them: a restore then changes "
    "it in place. Or store plainer values. A value that the program reads from the checkpoint after each restore, and "
    "holds nowhere else, may have a codec: register_codec."
)


def path_part(key: Hashable, index: int) -> str:
    """**Pure.** Returns the name of a dict's key in a path; a key without a short plain form is named by its number."""
    if type(key) is str:
        part = key
    elif type(key) in (int, float, bool, type(None), tuple) and len(text := repr(key)) <= 64:
        part = text
    else:
        part = str(index)
    return escape(part)


def escape(part: str) -> str:
    """**Pure.** Returns a part of a path, with `~` and `/` escaped as in JSON pointers."""
    if "~" in part or "/" in part:
        part = part.replace("~", "~0").replace("/", "~1")
    return part if is_text(part) else part.encode("utf-8", "backslashreplace").decode()


class Encoder:
    """Writes trees of values as JSON. Derive from it and override `special` for more than plain values."""

    def __init__(self) -> None:
        self._tally = _Tally()
        # By identity and depth: the value, which is kept so that its identity stays its own; its node; its size.
        self._written: dict[tuple[int, int], tuple[Any, Node, int]] = {}

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """Returns the node of a value of a type that has no codec, or None."""
        return None

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """Returns the node of a value.

        Raises:
            UnsupportedValueError: If it has none.
        """
        cls = type(value)
        scalar = ENCODERS.get(cls)
        if scalar is not None:
            try:
                node = scalar(value)
            except Malformed as error:
                raise unsupported(path, str(error), error.hint) from None
            if depth <= MAX_DEPTH or not isinstance(node, dict):
                return node
        if depth > MAX_DEPTH:
            raise unsupported(path, f"a value nested more than {MAX_DEPTH} levels deep", "Make the tree flatter.")
        tally = self._tally
        written = self._written.get((id(value), depth))
        if written is not None:
            tally.add(written[2], path)
            return written[1]
        if id(value) in tally.open:
            raise unsupported(path, "a value that contains itself", "Store each part once, without cycles.")
        tally.open.add(id(value))
        values_before = tally.values
        try:
            container = _CONTAINERS.get(cls)
            if container is not None:
                node = container(self, value, path, depth + 1)
            else:
                node = self._encode_other(cls, value, path, depth + 1)
        finally:
            tally.open.remove(id(value))
        self._written[id(value), depth] = (value, node, tally.values - values_before)
        return node

    def encode_apart(self, value: Any, path: str, depth: int) -> Node:
        """Returns the node of a value that was made for this, from containers that may be reused."""
        outer, self._written = self._written, {}
        try:
            return self.encode(value, path, depth)
        finally:
            self._written = outer

    def coded(self, made: Any, path: str, depth: int) -> Node:
        """Returns the node of a codec's result."""
        return _Plain(self).encode(made, path, depth)

    def count(self, values: int, path: str) -> None:
        """Counts values that are written in another way.

        Raises:
            UnsupportedValueError: If there are too many in total.
        """
        self._tally.add(values, path)

    def plain(self) -> Encoder:
        """An encoder for places without arrays or objects: keys and elements of sets."""
        return _Plain(self)

    def _encode_other(self, cls: type, value: Any, path: str, depth: int) -> Node:
        codec = codec_for(cls)
        if codec is not None:
            return tagged("codec", self.coded(codec.encode(value), path, depth), codec.tag)
        node = self.special(value, path, depth)
        if node is None:
            node = self.of_program(cls, value, path, depth)
        if node is None:
            name = name_of(cls).removeprefix("builtins:").replace(":", ".")
            raise unsupported(path, _KINDS.get(name, f"a value of type {name}"), _PLAINER if name in _KINDS else "")
        return node

    def of_program(self, cls: type, value: Any, path: str, depth: int) -> Node | None:
        """Returns the node of an enum, a dataclass, a namedtuple, a NumPy scalar or a time zone; None for all else."""
        if isinstance(value, enum.Flag):
            return tagged("flag", self.encode(value.value, path, depth), name_of(cls))
        if isinstance(value, enum.Enum):
            return tagged("enum", encode_str(value.name), name_of(cls))
        if is_namedtuple(cls):
            return tagged("namedtuple", self._fields(cls._fields, value, path, depth), name_of(cls))  # type: ignore[attr-defined]
        if is_plain_dataclass(cls):
            names = [field.name for field in dataclasses.fields(cls)]
            return tagged("dataclass", self._fields(names, value, path, depth), name_of(cls))
        try:
            return encode_numpy(value) or encode_zoneinfo(value)
        except Malformed as error:
            raise unsupported(path, str(error), error.hint) from None

    def _fields(self, names: Iterable[str], value: Any, path: str, depth: int) -> Node:
        nodes: dict[str, Node] = {}
        for name in names:
            self._tally.add(1, path)
            if not hasattr(value, name):
                raise unsupported(f"{path}/{name}", "a field that was never set", "Set it, or give it a default.")
            nodes[name] = self.encode(getattr(value, name), f"{path}/{name}", depth)
        return nodes

    def parts(self, values: Sequence[Any], path_of: Callable[[int], str], depth: int) -> list[Node]:
        """Returns the nodes of the parts of one container; `path_of` returns the path of one, by its position."""
        nodes: list[Node] = []
        for place, value in enumerate(values):
            cls = type(value)
            if cls is bool or (cls is int and -(1 << 63) <= value < 1 << 63):
                nodes.append(value)
            else:
                nodes.append(self.encode(value, path_of(place), depth))
        return nodes

    def encode_list(self, value: Collection[Any], path: str, depth: int) -> list[Node]:
        """Returns the nodes of a sequence's elements."""
        self._tally.add(len(value), path)
        return self.parts(list(value), lambda place: f"{path}/{place}", depth)

    def encode_dict(self, value: dict[Any, Any], path: str, depth: int) -> Node:
        """Returns a dict's node: a JSON object if the keys allow it, otherwise pairs."""
        for key in value:
            if type(key) is not str or key[:1] == "$" or not is_text(key):
                return tagged("dict", self.encode_pairs(value, path, depth))
        self._tally.add(len(value), path)
        keys = list(value)
        nodes = self.parts(list(value.values()), lambda place: f"{path}/{escape(keys[place])}", depth)
        return dict(zip(keys, nodes, strict=True))

    def encode_pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Node]:
        """Returns the keys and values of any mapping, in its order."""
        self._tally.add(2 * len(value), path)
        keys = self.plain()
        pairs = []
        for index, (key, part) in enumerate(value.items()):
            at = f"{path}/{path_part(key, index)}"
            pairs.append([keys.encode(key, at, depth), self.encode(part, at, depth)])
        return pairs

    def encode_set(self, value: Collection[Any], path: str, depth: int) -> list[Node]:
        """Returns the elements in an order that depends on nothing but them."""
        nodes = self.plain().encode_list(value, path, depth)
        return sorted(nodes, key=lambda node: json.dumps(node, sort_keys=True))


@dataclasses.dataclass(slots=True)
class _Tally:
    """The shared state of the encoders of one tree: the current values, and how many were written."""

    open: set[int] = dataclasses.field(default_factory=set)
    values: int = 0

    def add(self, count: int, path: str) -> None:
        """Counts values before they are written, or again if a part is repeated."""
        self.values += count
        if self.values > MAX_VALUES:
            raise unsupported(
                path,
                f"more than {MAX_VALUES:,} values at once",
                "Store arrays instead of long lists, or share less: a value that appears in two places is "
                "written twice.",
            )


class _Plain(Encoder):
    """Encodes where no array or object may be: keys, elements of sets, results of codecs."""

    def __init__(self, outer: Encoder) -> None:
        super().__init__()
        self._tally = outer._tally

    def plain(self) -> Encoder:
        """Itself."""
        return self


def _encode_defaultdict(encoder: Encoder, value: Any, path: str, depth: int) -> Node:
    factory = value.default_factory
    if factory is not None and (not isinstance(factory, Hashable) or factory not in FACTORY_NAMES):
        raise unsupported(
            path,
            f"a defaultdict with the factory {factory!r}",
            f"Use one of {', '.join(FACTORY_NAMES.values())} as its default_factory, or a plain dict.",
        )
    name = None if factory is None else FACTORY_NAMES[factory]
    return tagged("defaultdict", encoder.encode_pairs(value, path, depth), name)


def _encode_ordered(encoder: Encoder, value: Any, path: str, depth: int) -> Node:
    pairs = encoder.encode_pairs(value, path, depth)
    # The result of a torch module's state_dict() says in this attribute which versions of the modules wrote it.
    versions = getattr(value, "_metadata", None)
    noted = None if versions is None else encoder.plain().encode(versions, f"{path}/_metadata", depth)
    return tagged("OrderedDict", pairs, noted)


def _encode_slice(encoder: Encoder, value: Any, path: str, depth: int) -> Node:
    return tagged("slice", encoder.plain().encode_list((value.start, value.stop, value.step), path, depth))


_CONTAINERS: Final[dict[type, Callable[[Encoder, Any, str, int], Node]]] = {
    list: Encoder.encode_list,
    dict: Encoder.encode_dict,
    tuple: lambda e, value, path, depth: tagged("tuple", e.encode_list(value, path, depth)),
    collections.OrderedDict: _encode_ordered,
    collections.Counter: lambda e, value, path, depth: tagged("Counter", e.encode_pairs(value, path, depth)),
    collections.defaultdict: _encode_defaultdict,
    collections.deque: lambda e, value, path, depth: tagged(
        "deque", e.encode_list(value, path, depth), None if value.maxlen is None else encode_int(value.maxlen)
    ),
    set: lambda e, value, path, depth: tagged("set", e.encode_set(value, path, depth)),
    frozenset: lambda e, value, path, depth: tagged("frozenset", e.encode_set(value, path, depth)),
    slice: _encode_slice,
}


def unsupported(path: str, what: str, hint: str = "") -> UnsupportedValueError:
    """Returns the error for a value that cannot be stored."""
    return UnsupportedValueError(f"{path}: {what} cannot be stored", path=path, hint=hint or _REGISTER)
