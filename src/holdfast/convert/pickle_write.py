"""Writes values as a pickle, for programs that read nothing else. Pure.

It uses protocol 2 and what torch's restricted reader (`weights_only=True`) allows. holdfast itself never unpickles.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

_MARK: Final = b"("
_SMALL_TUPLES: Final = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
_MAX_TEXT_BYTES: Final = (1 << 31) - 1
_MAX_INT_BYTES: Final = 255


class Global(msgspec.Struct, frozen=True):
    """A class or function that the reader must know."""

    module: str
    name: str


class FunctionCall(msgspec.Struct, frozen=True):
    """The result of a function of the reader's."""

    function: Global
    arguments: tuple[Any, ...]


class Instance(msgspec.Struct, frozen=True):
    """An object of a class of the reader's, created without its constructor.

    Its state is its attributes, or the argument of its `__setstate__`.
    """

    cls: Global
    state: Any


class Pairs(msgspec.Struct, frozen=True):
    """A dict whose keys need not be hashable here."""

    items: list[tuple[Any, Any]]


class Persistent(msgspec.Struct, frozen=True):
    """Data that is stored next to the pickle."""

    id: tuple[Any, ...]


def write_pickle(value: Any) -> bytes:
    """**Pure.** Returns the pickle of a tree of plain values, and of the classes above.

    Raises:
        TypeError: If it contains something else.
    """
    writer = _Writer()
    writer.add(value)
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        # Names and short texts that occur often, by their number in the reader's memo.
        self._kept: dict[Global | str, int] = {}

    def add(self, value: Any) -> None:
        write = _WRITERS.get(type(value))
        if write is None:
            raise TypeError(f"a {type(value).__qualname__} cannot be written to a pickle of plain values")
        write(self, value)

    def add_all(self, values: Iterable[Any]) -> None:
        self.parts.append(_MARK)
        for value in values:
            self.add(value)

    def add_int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self.parts.append(b"J" + struct.pack("<i", value))
            return
        size = (value.bit_length() >> 3) + 1
        encoded = value.to_bytes(size, "little", signed=True)
        if size > _MAX_INT_BYTES:
            raise TypeError(f"a number of {size} bytes cannot be written to a pickle that torch reads")
        self.parts.append(b"\x8a" + bytes([size]) + encoded)

    def add_text(self, value: str) -> None:
        if self._recall(value):
            return
        encoded = value.encode("utf-8", "surrogatepass")
        if len(encoded) > _MAX_TEXT_BYTES:
            raise TypeError("a text of more than 2 GiB cannot be written to a pickle")
        self.parts.append(b"X" + struct.pack("<I", len(encoded)) + encoded)
        if len(encoded) < 256:
            self._keep(value)

    def add_tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) in _SMALL_TUPLES:
            for part in value:
                self.add(part)
            self.parts.append(_SMALL_TUPLES[len(value)])
        else:
            self.add_all(value)
            self.parts.append(b"t")

    def add_list(self, value: list[Any]) -> None:
        self.parts.append(b"]")
        if value:
            self.add_all(value)
            self.parts.append(b"e")

    def add_pairs(self, items: Iterable[tuple[Any, Any]]) -> None:
        self.parts.append(b"}")
        self.add_all(part for item in items for part in item)
        self.parts.append(b"u")

    def add_global(self, value: Global) -> None:
        if not self._recall(value):
            self.parts.append(f"c{value.module}\n{value.name}\n".encode())
            self._keep(value)

    def add_call(self, value: FunctionCall) -> None:
        self.add_global(value.function)
        self.add_tuple(value.arguments)
        self.parts.append(b"R")

    def add_instance(self, value: Instance) -> None:
        self.add_global(value.cls)
        self.parts.append(b")\x81")
        self.add(value.state)
        self.parts.append(b"b")

    def add_persistent(self, value: Persistent) -> None:
        self.add_tuple(value.id)
        self.parts.append(b"Q")

    def _recall(self, value: Global | str) -> bool:
        number = self._kept.get(value)
        if number is not None:
            self.parts.append(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))
        return number is not None

    def _keep(self, value: Global | str) -> None:
        number = self._kept[value] = len(self._kept)
        self.parts.append(b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number))


_COMPLEX, _SET = Global("builtins", "complex"), Global("builtins", "set")
_ENCODE: Final = Global("_codecs", "encode")

_WRITERS: Final[dict[type, Callable[[_Writer, Any], None]]] = {
    type(None): lambda writer, _: writer.parts.append(b"N"),
    bool: lambda writer, value: writer.parts.append(b"\x88" if value else b"\x89"),
    int: _Writer.add_int,
    float: lambda writer, value: writer.parts.append(b"G" + struct.pack(">d", value)),
    complex: lambda writer, value: writer.add_call(FunctionCall(_COMPLEX, (value.real, value.imag))),
    str: _Writer.add_text,
    bytes: lambda writer, value: writer.add_call(FunctionCall(_ENCODE, (value.decode("latin-1"), "latin1"))),
    tuple: _Writer.add_tuple,
    list: _Writer.add_list,
    dict: lambda writer, value: writer.add_pairs(value.items()),
    Pairs: lambda writer, value: writer.add_pairs(value.items),
    set: lambda writer, value: writer.add_call(FunctionCall(_SET, (list(value),))),
    Global: _Writer.add_global,
    FunctionCall: _Writer.add_call,
    Instance: _Writer.add_instance,
    Persistent: _Writer.add_persistent,
}
