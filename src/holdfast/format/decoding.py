"""Decodes JSON to Python values, guided by a live tree. Pure."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.errors import FormatError, UnsupportedValueError
from holdfast.format.codecs import FACTORIES, Codec, codec_tagged, is_namedtuple, is_plain_dataclass, type_named
from holdfast.format.encoding import MAX_DEPTH, path_part
from holdfast.format.nodes import list_tagged
from holdfast.format.scalars import DECODERS, ENCODERS, Malformed, Node, decode_int, decode_numpy

_ATOMS: Final = frozenset({type(None), bool, int, float, str})

_BROKEN: Final = (Malformed, ValueError, TypeError, OverflowError, ArithmeticError)


class Marker(enum.Enum):
    """Replaces a live value that does not exist."""

    ABSENT = "absent"
    """The live container is filled, but has no such part. As a decoded value: leave that part out."""
    UNFILLED = "unfilled"
    """There is no live container, or it is empty: anything may come."""


ABSENT: Final = Marker.ABSENT
UNFILLED: Final = Marker.UNFILLED


class SubclassNode(msgspec.Struct, frozen=True):
    """The stored form of a tensor whose class is made of other tensors.

    Attributes:
        tensors: The node of each of these, by name.
        context: The node of its other settings.
        shape: Its own shape.
        strides: Its own strides, in elements.
    """

    tensors: dict[str, Node]
    context: Node
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Decoder:
    """Makes values from JSON. Derive from it for more than plain values.

    A `live` argument is the live value at the same path, or one of the markers; only its types are used.
    """

    def __init__(self, find_codec: Callable[[str], Codec | None] = codec_tagged) -> None:
        self._find_codec = find_codec

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        """Returns the array for a reference to a leaf."""
        raise malformed(path, "unexpected reference to an array")

    def stateful(self, kind: str, state: Node, live: Any, path: str, depth: int) -> Any:
        """Returns the object for a stored state."""
        raise malformed(path, "unexpected state of an object")

    def subclass(self, name: str, stored: SubclassNode, live: Any, path: str, depth: int) -> Any:
        """Returns the tensor of a class that is made of other tensors."""
        raise malformed(path, "unexpected tensor")

    def coded(self, codec: Codec, payload: Node, live: Any, path: str, depth: int) -> Any:
        """Returns the value of a type that has a codec."""
        made = Decoder(self._find_codec).decode(payload, UNFILLED, path, depth)
        try:
            return codec.decode(made)
        except Exception as error:
            raise malformed(path, f"the codec {codec.tag!r} rejected the stored value: {error!r}") from error

    def parts(
        self, nodes: Sequence[Node], lives: Sequence[Any], path_of: Callable[[int], str], depth: int
    ) -> Iterable[Any]:
        """Returns the values of the parts of one container.

        Args:
            nodes: Their nodes.
            lives: For each of them, the live value at its position or a marker.
            path_of: Returns the path of one, by its position.
            depth: The depth of the nodes.
        """
        return (self.decode(node, lives[place], path_of(place), depth) for place, node in enumerate(nodes))

    def node(self, name: str, parts: Mapping[str, Node] | None, live: Any, path: str, depth: int) -> Any:
        """Returns the value of a class that a framework takes apart and rebuilds.

        Without parts it is a value of the program itself, such as a function.
        """
        raise malformed(path, "unexpected node of a framework's tree")

    def keeps(self, part: Any, path: str) -> bool:
        """Returns True if a part of the live tree stays although it is not stored; `path` is its path."""
        return False

    def unknown_type(self, name: str, live: Any, path: str) -> Any:
        """Returns the replacement for a stored value whose type cannot be found."""
        module, _, cls = name.rpartition(":")
        raise UnsupportedValueError(
            f"{path}: the stored type {name.replace(':', '.')} is not known in this process",
            path=path,
            hint=f"Call holdfast.register_type({cls}) before the restore, with {cls} from the module {module}; or pass "
            f"an object that already has a {cls} there. If the class has moved: holdfast.register_type({cls}, "
            f"name={name!r}).",
        )

    def other_fields(self, missing: list[str], extra: list[str], path: str) -> None:
        """Called when the fields of a class have changed since the save."""
        raise UnsupportedValueError(
            f"{path}: the fields of the class have changed since the save (new: {missing}, gone: {extra})",
            path=path,
            hint="Restore with the class as it was, or register a codec for it.",
        )

    def decode(self, node: Node, live: Any = UNFILLED, path: str = "value", depth: int = 0) -> Any:
        """Returns the value of a node.

        Raises:
            FormatError: If no encoder writes such a node.
            UnsupportedValueError: If a type or codec is not known to this process.
        """
        cls = type(node)
        if cls in _ATOMS:
            return node
        if depth > MAX_DEPTH:
            raise malformed(path, f"values are nested more than {MAX_DEPTH} levels deep")
        if cls is list:
            return self.sequence(node, live, path, depth + 1)
        if cls is not dict:
            raise malformed(path, "not a JSON value")
        if "$" in node:
            return self._tagged(node, live, path, depth + 1)
        for key in node:
            if type(key) is not str or key[:1] == "$":
                raise malformed(path, f"the key {key!r} is not allowed")
        return self.mapping(node, live, path, depth + 1)

    def sequence(self, nodes: Node, live: Any, path: str, depth: int) -> list[Any]:
        """Returns the elements of a list, a tuple or a deque."""
        if type(nodes) is not list:
            raise malformed(path, "expected a list")
        parts: Sequence[Any] = live if isinstance(live, (list, tuple, collections.deque)) else ()
        count = len(parts)
        beyond = ABSENT if count or live is ABSENT else UNFILLED
        lives = [parts[index] if index < count else beyond for index in range(len(nodes))]
        made = self.parts(nodes, lives, lambda index: f"{path}/{index}", depth)
        left = range(len(nodes), count)
        return [one for one in made if one is not ABSENT] + [
            parts[index] for index in left if self.keeps(parts[index], f"{path}/{index}")
        ]

    def mapping(self, nodes: Mapping[Any, Node], live: Any, path: str, depth: int) -> dict[Any, Any]:
        """Returns the items of a dict of any kind."""
        parts: Mapping[Any, Any] = live if isinstance(live, dict) else {}
        beyond = ABSENT if parts or live is ABSENT else UNFILLED
        lives = [parts.get(key, beyond) for key in nodes]
        keys = list(nodes)
        made = self.parts(list(nodes.values()), lives, lambda at: f"{path}/{path_part(keys[at], at)}", depth)
        values = {key: value for key, value in zip(keys, made, strict=True) if value is not ABSENT}
        if parts and not nodes.keys() >= parts.keys():
            for index, (key, part) in enumerate(parts.items()):
                if key not in nodes and self.keeps(part, f"{path}/{path_part(key, index)}"):
                    values[key] = part
        return values

    def _tagged(self, node: Node, live: Any, path: str, depth: int) -> Any:
        tag, payload, argument = node["$"], node.get("v"), node.get("k")
        if type(tag) is not str or "v" not in node or len(node) != 2 + ("k" in node):
            raise malformed(path, "a tagged value is malformed")
        if argument is not None and tag in _WITHOUT_ARGUMENT:
            raise malformed(path, "a tagged value has an unexpected argument")
        rebuild = REBUILDERS.get(tag)
        if rebuild is not None:
            return rebuild(self, payload, argument, live, path, depth)
        scalar = DECODERS.get(tag)
        try:
            if scalar is not None and argument is None:
                return scalar(payload)
            if tag == "numpy":
                return decode_numpy(payload, argument)
        except _BROKEN as error:
            if isinstance(error, Malformed) and error.hint:
                raise UnsupportedValueError(f"{path}: {error} cannot be restored", path=path, hint=error.hint) from None
            raise malformed(path, f"the payload of {tag!r} is malformed: {error}") from error
        raise malformed(path, f"the tag {tag!r} is unknown")

    def _pairs(self, payload: Node, live: Any, path: str, depth: int) -> dict[Any, Any]:
        if type(payload) is not list:
            raise malformed(path, "expected a list of pairs")
        plain = Decoder(self._find_codec)
        # The live keys say what types of the program keys are.
        examples = _examples(live if isinstance(live, dict) else ())
        nodes = {}
        for index, pair in enumerate(payload):
            if type(pair) is not list or len(pair) != 2:
                raise malformed(path, "expected a pair")
            key = plain.decode(pair[0], _example_of(pair[0], examples), f"{path}/{index}", depth)
            try:
                nodes[key] = pair[1]
            except TypeError as error:
                raise malformed(path, f"invalid key: {error}") from error
        if len(nodes) != len(payload):
            raise malformed(path, "a key appears twice")
        return self.mapping(nodes, live, path, depth)

    def _elements(self, payload: Node, live: Any, path: str, depth: int) -> frozenset[Any]:
        if type(payload) is not list:
            raise malformed(path, "expected a list")
        plain = Decoder(self._find_codec)
        examples = _examples(live if isinstance(live, (set, frozenset)) else ())
        values = [
            plain.decode(node, _example_of(node, examples), f"{path}/{index}", depth)
            for index, node in enumerate(payload)
        ]
        try:
            elements = frozenset(values)
        except TypeError as error:
            raise malformed(path, f"invalid element: {error}") from error
        if len(elements) != len(values):
            raise malformed(path, "an element appears twice")
        return elements

    def _type(self, name: Node, live: Any, path: str, is_kind: Callable[[type], bool]) -> type | None:
        if type(name) is not str:
            raise malformed(path, "expected the name of a type")
        # A module may have moved since; the class is then still called the same.
        cls: type | None = type(live)
        if not is_kind(type(live)) or type(live).__qualname__ != name.rpartition(":")[2]:
            cls = type_named(name)
        return cls if cls is not None and is_kind(cls) else None

    def _fields(
        self, cls: type, expected: Sequence[str], payload: Node, live: Any, path: str, depth: int
    ) -> dict[str, Any]:
        if type(payload) is not dict:
            raise malformed(path, "expected fields")
        missing = [f"{path}/{name}" for name in expected if name not in payload]
        extra = [f"{path}/{name}" for name in payload if name not in expected]
        if missing or extra:
            self.other_fields(missing, extra, path)
        beyond = ABSENT if live is ABSENT else UNFILLED
        values = {}
        for name in expected:
            part = getattr(live, name, UNFILLED) if type(live) is cls else beyond
            value = ABSENT if name not in payload else self.decode(payload[name], part, f"{path}/{name}", depth)
            if value is ABSENT and type(live) is cls:
                value = part
            if value is not ABSENT:
                values[name] = value
        return values

    def _rebuild_array(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        if type(payload) is not str or type(argument) is not str:
            raise malformed(path, "a reference to an array is malformed")
        return self.array(payload, argument, live, path)

    def _rebuild_object(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        if type(argument) is not str:
            raise malformed(path, "the state of an object is malformed")
        return self.stateful(argument, payload, live, path, depth)

    def _rebuild_codec(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        if type(argument) is not str:
            raise malformed(path, "expected the tag of a codec")
        codec = self._find_codec(argument)
        if codec is None:
            raise UnsupportedValueError(
                f"{path}: no codec with the tag {argument!r} is registered in this process",
                path=path,
                hint="Before restoring, call register_codec as the program that saved did.",
            )
        return self.coded(codec, payload, live, path, depth)

    def _rebuild_subclass(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        try:
            stored = msgspec.convert(payload, SubclassNode)
        except msgspec.ValidationError as error:
            raise malformed(path, f"a tensor subclass is malformed: {error}") from error
        if type(argument) is not str or len(stored.shape) != len(stored.strides) or min(stored.shape, default=0) < 0:
            raise malformed(path, "a tensor subclass is malformed")
        return self.subclass(argument, stored, live, path, depth)

    def _rebuild_node(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        if type(argument) is not str or type(payload) is not dict or "$" in payload:
            raise malformed(path, "a node of a framework's tree is malformed")
        return self.node(argument, payload, live, path, depth)

    def _rebuild_live(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        return self.node(payload if type(payload) is str else "", None, live, path, depth)

    def _rebuild_defaultdict(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        if argument is not None and (type(argument) is not str or argument not in FACTORIES):
            raise malformed(path, f"a defaultdict cannot have the factory {argument!r}")
        factory = None if argument is None else FACTORIES[argument]
        return collections.defaultdict(factory, self._pairs(payload, live, path, depth))

    def _rebuild_ordered(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        made: Any = collections.OrderedDict(self._pairs(payload, live, path, depth))
        if argument is not None:
            versions = self.decode(argument, getattr(live, "_metadata", UNFILLED), f"{path}/_metadata", depth)
            if versions is not ABSENT:
                made._metadata = versions
        return made

    def _rebuild_deque(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        values = self.sequence(payload, live, path, depth)
        try:
            limit = None if argument is None else decode_int(argument)
            made = collections.deque(values, limit)
        except _BROKEN as error:
            raise malformed(path, f"the length of a deque is malformed: {error}") from error
        if limit is not None and len(payload) > limit:
            raise malformed(path, "a deque is longer than its maximum")
        return made

    def _rebuild_slice(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        values = Decoder(self._find_codec).sequence(payload, UNFILLED, path, depth)
        if len(values) != 3:
            raise malformed(path, "a slice has three parts")
        return slice(*values)

    def _rebuild_enum(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        cls: Any = self._type(argument, live, path, lambda cls: issubclass(cls, enum.Enum))
        if cls is None:
            return self.unknown_type(argument, live, path)
        name = Decoder().decode(payload, UNFILLED, path, depth)
        if type(name) is not str or name not in cls.__members__:
            raise UnsupportedValueError(
                f"{path}: {cls.__qualname__} no longer has the member {name!r}",
                path=path,
                hint="Restore the member's name, or register a codec for the enum.",
            )
        return cls.__members__[name]

    def _rebuild_flag(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        cls = self._type(argument, live, path, lambda cls: issubclass(cls, enum.Flag))
        if cls is None:
            return self.unknown_type(argument, live, path)
        try:
            return cls(decode_int(payload))
        except _BROKEN as error:
            raise malformed(path, f"the flag is malformed: {error}") from error

    def _rebuild_namedtuple(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        cls: Any = self._type(argument, live, path, is_namedtuple)
        if cls is None:
            return self.unknown_type(argument, live, path)
        values = self._fields(cls, cls._fields, payload, live, path, depth)
        values = {**cls._field_defaults, **values}
        if len(values) != len(cls._fields):
            return ABSENT
        return tuple.__new__(cls, [values[name] for name in cls._fields])

    def _rebuild_dataclass(self, payload: Node, argument: Node, live: Any, path: str, depth: int) -> Any:
        cls: Any = self._type(argument, live, path, is_plain_dataclass)
        if cls is None:
            return self.unknown_type(argument, live, path)
        fields = dataclasses.fields(cls)
        values = self._fields(cls, [field.name for field in fields], payload, live, path, depth)
        # As copying and unpickling do, this goes round the constructor: arrays are not filled yet, and a constructor
        # might compute something from them.
        made = object.__new__(cls)
        if type(live) is cls:
            for name, value in getattr(live, "__dict__", {}).items():
                object.__setattr__(made, name, value)
        for field in fields:
            if field.name in values:
                object.__setattr__(made, field.name, values[field.name])
            elif field.default is not dataclasses.MISSING:
                object.__setattr__(made, field.name, field.default)
            elif field.default_factory is not dataclasses.MISSING:
                object.__setattr__(made, field.name, field.default_factory())
            else:
                return ABSENT
        return made


def _examples(live: Iterable[Any]) -> dict[str, Any]:
    """Returns one of the live values of each type that has a stored name, by that name."""
    return {type(value).__qualname__: value for value in live if type(value) not in ENCODERS}


def _example_of(node: Node, examples: Mapping[str, Any]) -> Any:
    name = node.get("k") if type(node) is dict and node.get("$") in NAMED else None
    return examples.get(name.rpartition(":")[2], UNFILLED) if type(name) is str else UNFILLED


NAMED: Final = frozenset({"namedtuple", "dataclass", "enum", "flag", "tensor_subclass"})
"""Tags of values whose argument names a type of the program."""


def find_tags(node: Node) -> Iterator[tuple[str, str | None]]:
    """**Pure.** Yields the tag and the argument of each tagged value in a node; arguments that are not text as None."""
    for part in list_tagged([node]):
        argument = part.get("k")
        if type(part["$"]) is str:
            yield part["$"], argument if type(argument) is str else None


def malformed(path: str, what: str) -> FormatError:
    """Returns the error for JSON that no encoder writes."""
    return FormatError(f"{path}: {what}", tensor=path)


_WITHOUT_ARGUMENT: Final = frozenset({"live", "slice", "dict", "Counter", "tuple", "set", "frozenset"})
"""Tags of containers that have no argument."""

REBUILDERS: Final[dict[str, Callable[[Decoder, Node, Node, Any, str, int], Any]]] = {
    "array": Decoder._rebuild_array,
    "object": Decoder._rebuild_object,
    "codec": Decoder._rebuild_codec,
    "tensor_subclass": Decoder._rebuild_subclass,
    "pytree": Decoder._rebuild_node,
    "live": Decoder._rebuild_live,
    "OrderedDict": Decoder._rebuild_ordered,
    "defaultdict": Decoder._rebuild_defaultdict,
    "deque": Decoder._rebuild_deque,
    "slice": Decoder._rebuild_slice,
    "enum": Decoder._rebuild_enum,
    "flag": Decoder._rebuild_flag,
    "namedtuple": Decoder._rebuild_namedtuple,
    "dataclass": Decoder._rebuild_dataclass,
    "dict": lambda d, payload, _, *where: d._pairs(payload, *where),
    "Counter": lambda d, payload, _, *where: collections.Counter(d._pairs(payload, *where)),
    "tuple": lambda d, payload, _, *where: tuple(d.sequence(payload, *where)),
    "set": lambda d, payload, _, *where: set(d._elements(payload, *where)),
    "frozenset": lambda d, payload, _, *where: d._elements(payload, *where),
}
"""For each tag of values that may contain others, how it is rebuilt."""
