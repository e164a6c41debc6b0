"""Walks a tree of nodes without decoding it: children, arrays, paths, and values as text. Pure.

A node is stored JSON: a scalar, a list, an object, or a tagged value. Paths are those of the encoder, and so those of
errors, of leaves and of patterns. Values are written without creating the objects that they describe: types have the
names under which they were stored, and nothing is imported by those names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from holdfast.format.encoding import MAX_DEPTH, escape, path_part
from holdfast.format.scalars import DECODERS, Malformed, Node, decode_numpy

SEQUENCES: Final = {
    "tuple": ("(", ")"),
    "set": ("{", "}"),
    "frozenset": ("frozenset({", "})"),
    "deque": ("deque([", "])"),
    "slice": ("slice(", ")"),
}
"""Tags of containers whose parts have no names, with the text before and after the parts."""

MAPPINGS: Final = frozenset({"dict", "OrderedDict", "Counter", "defaultdict"})
"""Tags of containers whose parts are pairs of a key and a value."""

RECORDS: Final = frozenset({"namedtuple", "dataclass", "pytree"})
"""Tags of containers whose parts are fields."""

WRAPPERS: Final = frozenset({"object", "codec"})
"""Tags of values that have the parts of what they hold."""

SHOWN_ELEMENTS: Final = 8
"""Number of elements of a sequence that are in its text; the others are counted."""

SHOWN_CHARACTERS: Final = 200
"""Number of characters of one scalar that are in its text."""

SHOWN_BYTES: Final = 32
"""Number of bytes that are written out; longer values, and those that are not text, are counted."""

_PACKED: Final = ("bytes", "bytearray")
_TORCH_BYTES: Final = 5056
_PYTHON_WORDS: Final = 625
_ATOMS: Final = frozenset({type(None), bool, int, float, str})
_KEY_CHARACTERS: Final = 64


def list_children(node: Node) -> list[tuple[str, Node]] | None:
    """**Pure.** Returns the children of a container, each with its part of the path; None for any other node."""
    if type(node) is list:
        return [(str(place), part) for place, part in enumerate(node)]
    if type(node) is not dict:
        return None
    if "$" not in node:
        return [(escape(str(key)), part) for key, part in node.items()]
    tag, payload = node["$"], node.get("v")
    if type(tag) is not str:
        return None
    if tag in WRAPPERS or (tag in SEQUENCES and type(payload) is list):
        return list_children(payload)
    if tag in MAPPINGS and type(payload) is list and all(type(pair) is list and len(pair) == 2 for pair in payload):
        return [(_name_key(key, place), part) for place, (key, part) in enumerate(payload)]
    fields = payload if tag in RECORDS else None
    if tag == "tensor_subclass" and type(payload) is dict:
        fields = payload.get("tensors")
    return list_children(fields) if type(fields) is dict and "$" not in fields else None


def list_tagged(nodes: Iterable[Node]) -> Iterator[dict[str, Any]]:
    """**Pure.** Yields the tagged values in nodes, at any depth, even one too deep for a recursion."""
    ahead = list(nodes)
    while ahead:
        part = ahead.pop()
        if type(part) is list:
            ahead += part
        elif type(part) is dict:
            if "$" in part:
                yield part
            ahead += part.values()


def find_array(node: Node) -> str | None:
    """**Pure.** The leaf that a node refers to, or None if it refers to none."""
    if type(node) is dict and node.get("$") == "array" and type(node.get("v")) is str:
        return str(node["v"])
    return None


def is_sequence(node: Node) -> bool:
    """**Pure.** True if a node is a list, a tuple, a set, or another container whose parts have no names."""
    return type(node) is list or (type(node) is dict and node.get("$") in SEQUENCES)


def find_random(node: Node) -> str | None:
    """**Pure.** Returns the library whose random generator has the state that a node holds, or None.

    Such a state is recognized by its form, wherever it is stored.
    """
    if _count_bytes(node) == _TORCH_BYTES:
        return "torch"
    if type(node) is dict and "$" not in node:
        return "NumPy" if type(node.get("bit_generator")) is str else None
    is_row = type(node) is list or (type(node) is dict and node["$"] == "tuple")
    parts = [part for _, part in list_children(node) or ()] if is_row else []
    if len(parts) == 5 and parts[0] == "MT19937":
        return "NumPy"
    if len(parts) == 3 and parts[0] == 3:
        words = len(list_children(parts[1]) or ()) or _count_bytes(parts[1]) // 4
        return "Python" if words == _PYTHON_WORDS else None
    return None


def _count_bytes(node: Node) -> int:
    """Returns the length of a value of bytes; 0 for any other node."""
    is_packed = type(node) is dict and node.get("$") in _PACKED and type(node.get("v")) is str
    return len(node["v"]) // 4 * 3 - node["v"].count("=") if is_packed else 0


def count_values(node: Node, depth: int = 0) -> int:
    """**Pure.** Counts the values in a node that are not containers; arrays and live objects are not counted."""
    if find_array(node) is not None or (type(node) is dict and node.get("$") == "live"):
        return 0
    children = list_children(node) if depth <= MAX_DEPTH else None
    return 1 if children is None else sum(count_values(child, depth + 1) for _, child in children)


def find_nodes(objects: Mapping[str, Node], select: Callable[[str], bool] | None) -> Iterator[tuple[str, Node]]:
    """**Pure.** Yields the selected nodes with their paths; nodes inside a selected one are not repeated."""

    def search(path: str, node: Node, depth: int) -> Iterator[tuple[str, Node]]:
        if select is None or select(path):
            yield path, node
        elif depth <= MAX_DEPTH:
            for part, child in list_children(node) or ():
                yield from search(f"{path}/{part}", child, depth + 1)

    for name, node in objects.items():
        yield from search(name, node, 0)


def _name_key(key: Node, place: int) -> str:
    """Names a key as the encoder does: short plain keys by their text, others by their position."""
    if type(key) in _ATOMS:
        return path_part(key, place)
    if type(key) is dict and key.get("$") == "tuple" and len(text := describe(key)) <= _KEY_CHARACTERS:
        return escape(text)
    return str(place)


def list_values(path: str, node: Node, depth: int = 0) -> Iterator[tuple[str, str]]:
    """**Pure.** Yields the values in a node, each with its path and as text; a sequence of scalars is one value.

    Arrays are left out, unless the name of one differs from its path: that one is shared.
    """
    leaf = find_array(node)
    if leaf is not None:
        if leaf != path:
            yield path, f"the array {leaf}"
        return
    children = list_children(node) if depth <= MAX_DEPTH else None
    inner = [part for _, part in children or () if list_children(part) is not None or find_array(part) is not None]
    if not children or (is_sequence(node) and not inner) or find_random(node):
        yield path, describe(node, depth)
        return
    for part, child in children:
        yield from list_values(f"{path}/{part}", child, depth + 1)


def describe(node: Node, depth: int = 0) -> str:
    """**Pure.** A node as text, much as Python would write the value; long ones are cut."""
    if type(node) in _ATOMS:
        # Cut before it is quoted, since text may be of any length.
        return _cut(repr(node[: SHOWN_CHARACTERS + 1] if type(node) is str else node))
    if depth > MAX_DEPTH:
        return "..."
    if library := find_random(node):
        return f"<state of a random generator of {library}>"
    if type(node) is list:
        return f"[{_join((describe(part, depth + 1) for part in node), len(node))}]"
    if type(node) is not dict or type(node.get("$", "")) is not str:
        return "?"
    if "$" not in node:
        return f"{{{_join((f'{key!r}: {describe(part, depth + 1)}' for key, part in node.items()), len(node))}}}"
    return _describe_tagged(node, depth)


def _describe_tagged(node: dict[str, Any], depth: int) -> str:
    tag, payload, argument = node["$"], node.get("v"), node.get("k")
    kind = str(argument if tag in RECORDS | WRAPPERS | {"enum", "flag", "tensor_subclass"} else tag).replace(":", ".")
    children = list_children(node)
    if children is not None and tag in SEQUENCES:
        opening, closing = SEQUENCES[tag]
        comma = "," if tag == "tuple" and len(children) == 1 else ""
        return f"{opening}{_join((describe(part, depth + 1) for _, part in children), len(children))}{comma}{closing}"
    if children is not None and tag in MAPPINGS and type(payload) is list:
        pairs = (f"{describe(key, depth + 1)}: {describe(part, depth + 1)}" for key, part in payload)
        return f"{{{_join(pairs, len(payload))}}}" if tag == "dict" else f"{kind}({{{_join(pairs, len(payload))}}})"
    if children is not None and (tag in RECORDS or tag == "tensor_subclass"):
        return f"{kind}({_join((f'{name}={describe(part, depth + 1)}' for name, part in children), len(children))})"
    if tag == "array":
        return f"<array {find_array(node) or '?'}>"
    if tag == "live" and type(payload) is str:
        return _cut(f"<the program's {payload}>")
    if tag == "enum" and type(payload) is str:
        return f"{kind}.{payload}"
    if tag in WRAPPERS or tag == "flag":
        return f"{kind}({describe(payload, depth + 1)})"
    return _cut(_describe_scalar(tag, payload, argument))


def _describe_scalar(tag: str, payload: Node, argument: Node) -> str:
    try:
        if tag == "numpy":
            return repr(decode_numpy(payload, argument))
        if tag == "int":
            return f"-0x{payload[1:]}" if payload.startswith("-") else f"0x{payload}"
        value = DECODERS[tag](payload)
        is_long = tag in _PACKED and (len(value) > SHOWN_BYTES or not value.isascii())
        return f"<{len(value)} bytes>" if is_long else repr(value)
    except (Malformed, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        # What is malformed is written as it is stored; a restore will refuse it and say why.
        return f"<{tag} {json.dumps(payload)}>"


def _join(texts: Iterable[str], count: int) -> str:
    more = [f"... {count - SHOWN_ELEMENTS} more"] if count > SHOWN_ELEMENTS else []
    return ", ".join([*itertools.islice(texts, SHOWN_ELEMENTS), *more])


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
