"""Stored values as a person reads them, without making the objects that they stand for. Pure.

Types are shown by the names under which they were stored; nothing is looked up by them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from holdfast.format.encoding import MAX_DEPTH, escape, path_part
from holdfast.format.scalars import DECODERS, Malformed, Node, decode_numpy

SHOWN_ELEMENTS: Final = 8
"""How many elements of a sequence are written out; the rest is counted."""

SHOWN_CHARACTERS: Final = 200
"""How much of one scalar is written out."""

_ATOMS: Final = frozenset({type(None), bool, int, float, str})
_BRACKETS: Final = {
    "tuple": ("(", ")"),
    "set": ("{", "}"),
    "frozenset": ("frozenset({", "})"),
    "deque": ("deque([", "])"),
    "slice": ("slice(", ")"),
}
_MAPPINGS: Final = frozenset({"dict", "OrderedDict", "Counter", "defaultdict"})
_FIELDS: Final = frozenset({"namedtuple", "dataclass"})
_WRAPPERS: Final = frozenset({"object", "codec"})


def parts_of(node: Node) -> list[tuple[str, Node]] | None:
    """**Pure.** What a container holds, each with its part of the path; None if the node is no container.

    The parts are named as at the save, so that paths here are those of errors, leaves and patterns.
    """
    if type(node) is list:
        return [(str(place), part) for place, part in enumerate(node)]
    if type(node) is not dict:
        return None
    if "$" not in node:
        return [(escape(str(key)), part) for key, part in node.items()]
    tag, payload = node["$"], node.get("v")
    if type(tag) is not str:
        return None
    if tag in _BRACKETS and type(payload) is list:
        return parts_of(payload)
    if tag in _MAPPINGS and type(payload) is list and all(_is_pair(pair) for pair in payload):
        return [(_key_part(key, place), part) for place, (key, part) in enumerate(payload)]
    if tag in _FIELDS and type(payload) is dict:
        return parts_of(payload) if "$" not in payload else None
    if tag == "tensor_subclass" and type(payload) is dict and type(payload.get("tensors")) is dict:
        return parts_of(payload["tensors"]) if "$" not in payload["tensors"] else None
    if tag in _WRAPPERS:
        return parts_of(payload)
    return None


def array_of(node: Node) -> str | None:
    """**Pure.** The leaf that a node refers to, or None if it refers to none."""
    if type(node) is dict and node.get("$") == "array" and type(node.get("v")) is str:
        return str(node["v"])
    return None


def count_values(node: Node, depth: int = 0) -> int:
    """**Pure.** How many values that hold no others lie in a node; arrays are not counted."""
    if array_of(node) is not None:
        return 0
    parts = parts_of(node) if depth <= MAX_DEPTH else None
    if parts is None:
        return 1
    return sum(count_values(part, depth + 1) for _, part in parts)


def find_nodes(objects: Mapping[str, Node], select: Callable[[str], bool] | None) -> Iterator[tuple[str, Node]]:
    """**Pure.** The nodes that were asked for with their paths; what lies within one of them is not given again.

    Args:
        objects: For each object its node.
        select: Whether a path is asked for; None for all objects.
    """

    def search(path: str, node: Node, depth: int) -> Iterator[tuple[str, Node]]:
        if select is None or select(path):
            yield path, node
        elif depth <= MAX_DEPTH:
            for part, child in parts_of(node) or ():
                yield from search(f"{path}/{part}", child, depth + 1)

    for name, node in objects.items():
        yield from search(name, node, 0)


def list_values(path: str, node: Node, depth: int = 0) -> Iterator[tuple[str, str]]:
    """**Pure.** The values in a node, each with its path and as text; a sequence of scalars stands on one line.

    Arrays stand for themselves elsewhere and are left out, unless one has another name than its path: it is shared.
    """
    leaf = array_of(node)
    if leaf is not None:
        if leaf != path:
            yield path, f"the array {leaf}"
        return
    parts = parts_of(node) if depth <= MAX_DEPTH else None
    if not parts or (_is_sequence(node) and all(_is_scalar(part) for _, part in parts)):
        yield path, describe(node, depth)
        return
    for part, child in parts:
        yield from list_values(f"{path}/{part}", child, depth + 1)


def _is_sequence(node: Node) -> bool:
    return type(node) is list or (type(node) is dict and node.get("$") in _BRACKETS)


def _is_scalar(node: Node) -> bool:
    return parts_of(node) is None and array_of(node) is None


def describe(node: Node, depth: int = 0) -> str:
    """**Pure.** A node as text, much as Python would write the value; long ones are cut."""
    if type(node) in _ATOMS:
        return _cut(_repr(node))
    if depth > MAX_DEPTH:
        return "..."
    if type(node) is list:
        return f"[{_elements(node, depth)}]"
    if type(node) is not dict or type(node.get("$", "")) is not str:
        return "?"
    if "$" not in node:
        return f"{{{_items(((repr(key), part) for key, part in node.items()), len(node), depth)}}}"
    return _tagged(node, depth)


def _tagged(node: dict[str, Any], depth: int) -> str:
    tag, payload, argument = node["$"], node.get("v"), node.get("k")
    kind = str(argument if tag in _FIELDS | _WRAPPERS | {"enum", "flag", "tensor_subclass"} else tag).replace(":", ".")
    parts = parts_of(node)
    if tag in _BRACKETS and parts is not None:
        opening, closing = _BRACKETS[tag]
        comma = "," if tag == "tuple" and len(parts) == 1 else ""
        return f"{opening}{_elements([part for _, part in parts], depth)}{comma}{closing}"
    if tag in _MAPPINGS and parts is not None and type(payload) is list:
        items = _items(((describe(key, depth + 1), part) for key, part in payload), len(payload), depth)
        return f"{{{items}}}" if tag == "dict" else f"{kind}({{{items}}})"
    if (tag in _FIELDS or tag == "tensor_subclass") and parts is not None:
        return f"{kind}({_items(parts, len(parts), depth, sign='=')})"
    if tag == "array":
        return f"<array {array_of(node) or '?'}>"
    if tag == "enum" and type(payload) is str:
        return f"{kind}.{payload}"
    if tag in _WRAPPERS | {"flag"}:
        return f"{kind}({describe(payload, depth + 1)})"
    return _cut(_scalar(tag, payload, argument))


def _scalar(tag: Any, payload: Node, argument: Node) -> str:
    try:
        if tag == "numpy":
            return repr(decode_numpy(payload, argument))
        if tag == "int":
            return f"-0x{payload[1:]}" if payload.startswith("-") else f"0x{payload}"
        return repr(DECODERS[tag](payload))
    except (Malformed, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        # What is malformed is shown as it is stored; a restore will refuse it and say why.
        return f"<{tag} {json.dumps(payload)}>"


def _elements(nodes: list[Node], depth: int) -> str:
    shown = [describe(part, depth + 1) for part in nodes[:SHOWN_ELEMENTS]]
    return ", ".join(shown + _more(len(nodes)))


def _items(items: Any, count: int, depth: int, *, sign: str = ": ") -> str:
    shown = [f"{key}{sign}{describe(part, depth + 1)}" for key, part in itertools.islice(items, SHOWN_ELEMENTS)]
    return ", ".join(shown + _more(count))


def _more(count: int) -> list[str]:
    return [f"... {count - SHOWN_ELEMENTS} more"] if count > SHOWN_ELEMENTS else []


def _repr(atom: Any) -> str:
    # Cut before it is quoted, since text may be of any length.
    return repr(atom[: SHOWN_CHARACTERS + 1]) if type(atom) is str else repr(atom)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _is_pair(node: Node) -> bool:
    return type(node) is list and len(node) == 2


def _key_part(key: Node, place: int) -> str:
    """As the encoder names it: short plain keys by their text, others by their number."""
    if type(key) in _ATOMS:
        return path_part(key, place)
    if type(key) is dict and key.get("$") == "tuple" and len(text := describe(key)) <= 64:
        return escape(text)
    return str(place)
