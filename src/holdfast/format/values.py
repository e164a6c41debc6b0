"""Python values as JSON, and back, equal and of the same exact type. Pure.

What JSON says exactly stands for itself; everything else is an object with a tag, `{"$": tag, "v": payload}`, some
with an argument `k`. `Encoder` and `Decoder` walk the trees. By themselves they know plain values; what more there may
be in a tree (arrays, objects with state) is added by deriving from them. No type is found by its stored name unless
the program registered it, or a live value of that type stands at the same place.
"""

from __future__ import annotations

from typing import Any

from holdfast.format.codecs import register_codec, register_type
from holdfast.format.decoding import ABSENT, UNFILLED, Decoder
from holdfast.format.encoding import MAX_DEPTH, Encoder
from holdfast.format.scalars import Node

__all__ = [
    "ABSENT",
    "MAX_DEPTH",
    "UNFILLED",
    "Decoder",
    "Encoder",
    "Node",
    "decode_value",
    "encode_value",
    "register_codec",
    "register_type",
]


def encode_value(value: Any, path: str = "value") -> Node:
    """**Pure.** A tree of plain values as JSON.

    Args:
        value: The tree.
        path: What errors call it.

    Raises:
        UnsupportedValueError: If something in it has no codec, contains itself, or is nested too deep.
    """
    return Encoder().encode(value, path)


def decode_value(node: Node, live: Any = UNFILLED, path: str = "value") -> Any:
    """**Pure.** The value that `encode_value` was given.

    Args:
        node: The JSON.
        live: A value of the same form, for the types that only the program knows.
        path: What errors call it.

    Raises:
        FormatError: If the JSON is not what `encode_value` writes.
        UnsupportedValueError: If a type or a codec is not known to this process.
    """
    return Decoder().decode(node, live, path)
