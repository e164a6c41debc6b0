"""Reads pickles as data. Nothing that stands in one is imported or called: a record of it is made. Pure.

A pickle is a program for a small machine, whose dangerous parts look up a name, call it, and set attributes. Here a
name stays a name (`Global`), and a call becomes a `Made`, which says what was to be called with what. Only plain
containers are built. What is built is bounded by the length of the pickle: every length in it is held against what is
left of it, what the machine keeps lies in a dict, whatever numbers the pickle chooses, and what it copies is counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, Final

from holdfast.convert.pickle_keys import Keys
from holdfast.convert.pickle_write import Global, Persistent
from holdfast.errors import FormatError

_HINT: Final = "Nothing of it was executed. If you trust the file, load and save it again as plain state_dicts."
_SHOWN: Final = 100
_ALWAYS: Final = 1 << 16


class Made:
    """An object that the writer of a pickle had made by a call.

    Attributes:
        function: What was to be called.
        arguments: What it was to be called with.
        state: What was to be set on the result; None if nothing was.
        is_known: Whether the function is one of those that the reader of the pickle allows.
    """

    __slots__ = ("arguments", "function", "is_known", "state")

    def __init__(self, function: Global, arguments: tuple[Any, ...], *, is_known: bool) -> None:
        self.function = function
        self.arguments = arguments
        self.state: Any = None
        self.is_known = is_known


def shown(value: Any) -> str:
    """**Pure.** A value from a pickle in a few words, for errors: what it holds has no bounds."""
    kind = type(value)
    if kind is Global:
        return f"{value.module[:_SHOWN]}.{value.name[:_SHOWN]}"
    if kind in (str, bytes):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    if value is None or kind in (bool, float) or (kind is int and value.bit_length() < 4 * _SHOWN):
        return repr(value)
    return f"a value of type {kind.__name__}"


def read_pickle(data: memoryview, allowed: Collection[Global], path: str, *, keep_unknown: bool = False) -> Any:
    """**Pure.** What a pickle describes, of protocol 2 or newer.

    Args:
        data: The pickle.
        allowed: What may be named in it, beside plain containers.
        path: Where it comes from, for errors.
        keep_unknown: True to give what is not allowed as a `Made` that is not known, in place of an error.

    Raises:
        FormatError: If it is malformed, or names what is not allowed.
    """
    machine = _Machine(data, frozenset(allowed), path, keep_unknown=keep_unknown)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise FormatError(f"{path}: this pickle is malformed, at byte {machine.place}: {error!r}", path=path) from error


class _Machine:
    def __init__(self, data: memoryview, allowed: frozenset[Global], path: str, *, keep_unknown: bool) -> None:
        self._data = data
        self._allowed = allowed
        self._path = path
        self._keep_unknown = keep_unknown
        self.place = 0
        self.stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._kept: dict[int, Any] = {}
        self._keys = Keys((Global, Made))
        self._copied = 0

    def run(self) -> Any:
        operations = _OPERATIONS
        data = self._data
        while True:
            code = data[self.place]
            self.place += 1
            if code == _STOP:
                return self.stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise ValueError(f"there is an instruction {code} that no such file needs")
            operation(self)

    def take(self, size_bytes: int) -> memoryview:
        begin = self.place
        if not 0 <= size_bytes <= len(self._data) - begin:
            raise ValueError(f"{size_bytes} bytes are announced, and {len(self._data) - begin} are left")
        self.place = begin + size_bytes
        return self._data[begin : self.place]

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def line(self) -> str:
        begin = end = self.place
        while self._data[end] != 10:
            end += 1
        self.place = end + 1
        return _text(self._data[begin:end])

    def mark(self) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self._marks.pop()
        return found

    def keep(self, number: int) -> None:
        self._kept[number] = self.stack[-1]

    def recall(self, number: int) -> None:
        self.stack.append(self._kept[number])

    def _memoize(self) -> None:
        self.keep(len(self._kept))

    def name(self, module: str, name: str) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is no text")
        found = Global(_RENAMED.get(module, module), name)
        if found not in self._allowed and found not in _BUILDERS and not self._keep_unknown:
            raise FormatError(
                f"{self._path}: it wants {shown(found)}, which is none of what such a file may hold",
                path=self._path,
                hint=_HINT,
            )
        self.stack.append(found)

    def call(self, function: Any, arguments: Any) -> None:
        if type(arguments) is not tuple:
            raise ValueError("a call without a list of arguments")
        build = _BUILDERS.get(function) if type(function) is Global else None
        if build is not None:
            self.stack.append(build(self, *arguments))
            return
        if type(function) is not Global:
            if not self._keep_unknown:
                raise ValueError("something is called that is no name")
            function = Global("", "?")
        self.stack.append(Made(function, arguments, is_known=function in self._allowed))

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.call(self.stack.pop(), arguments)

    def _new_by_name(self) -> None:
        names, arguments = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(names) is not dict:
            raise ValueError("an object without arguments")
        self.call(self.stack.pop(), (*arguments, names))

    def _build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) is Made:
            made.state = state
        elif type(made) is not dict:  # An OrderedDict may have attributes; torch puts versions there.
            raise ValueError("attributes are set on what has none")

    def _append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made and not target.is_known:
            return
        if type(target) is not list:
            raise ValueError("something is added to what is no list")
        target.extend(values)

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made and not target.is_known:
            return
        if type(target) is not dict or len(values) % 2:
            raise ValueError("something is set in what is no dict")
        for place in range(0, len(values), 2):
            target[self._keys.check(values[place])] = values[place + 1]

    def copy(self, length: int) -> None:
        """Counts what is copied: one part that stands in a pickle once can be named in it again and again."""
        self._copied += length
        if self._copied > len(self._data) + _ALWAYS:
            raise ValueError("more is copied in it than stands in it")

    def members(self, values: list[Any]) -> list[Any]:
        return [self._keys.check(value) for value in values]

    def _add_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError("something is added to what is no set")
        target.update(self.members(values))

    def _append_one(self) -> None:
        self._append([self.stack.pop()])

    def _set_one(self) -> None:
        value = self.stack.pop()
        self._set_items([self.stack.pop(), value])

    def _tuple_of(self, length: int) -> None:
        parts = tuple(self.stack[len(self.stack) - length :])
        if len(parts) != length:
            raise IndexError("too few values for a tuple")
        del self.stack[len(self.stack) - length :]
        self.stack.append(parts)

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def _persistent(self) -> None:
        found = self.stack.pop()
        if type(found) is not tuple:
            raise ValueError("what lies beside the pickle is named by no tuple")
        self.stack.append(Persistent(found))


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8", "surrogatepass")
    except UnicodeDecodeError as error:  # It holds the whole text.
        raise ValueError(f"a text is none: {error.reason}") from None


def _encode(machine: _Machine, text: Any, encoding: Any = "latin-1") -> bytes:
    if type(text) is not str or type(encoding) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"{shown(text)} as bytes in {shown(encoding)}")
    machine.copy(len(text))
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError(f"a text is none of bytes: {error.reason}") from None


def _ordered(machine: _Machine, pairs: Any = ()) -> dict[Any, Any]:
    if type(pairs) is dict:
        machine.copy(len(pairs))
        return dict(pairs)
    if type(pairs) not in (list, tuple) or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("a dict of what are no pairs")
    machine.copy(len(pairs))
    return dict(zip(machine.members([pair[0] for pair in pairs]), (pair[1] for pair in pairs), strict=True))


def _plain_set(machine: _Machine, values: Any = ()) -> set[Any]:
    if type(values) not in (list, tuple):
        raise ValueError("a set of what is no list")
    machine.copy(len(values))
    return set(machine.members(values))


def _plain_array(machine: _Machine, text: Any = b"", encoding: Any = "latin-1") -> bytearray:
    # A number would be a length, and memory be taken for it.
    if type(text) is str:
        return bytearray(_encode(machine, text, encoding))
    if type(text) is not bytes:
        raise ValueError("a bytearray of what are no bytes")
    machine.copy(len(text))
    return bytearray(text)


def _complex(machine: _Machine, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("a complex number of what are no numbers")
    return complex(real, imaginary)


_RENAMED: Final = {"__builtin__": "builtins"}

_BUILDERS: Final[dict[Global, Callable[..., Any]]] = {
    Global("collections", "OrderedDict"): _ordered,
    Global("collections", "Counter"): _ordered,
    Global("_codecs", "encode"): _encode,
    Global("builtins", "set"): _plain_set,
    Global("builtins", "bytearray"): _plain_array,
    Global("builtins", "complex"): _complex,
}
"""What is built here, by code of this module."""

_STOP: Final = ord(".")
_U1, _U2, _U4, _I4, _U8 = map(struct.Struct, ("<B", "<H", "<L", "<l", "<Q"))
_FLOAT: Final = struct.Struct(">d")

_Operation = Callable[[_Machine], object]


def _value(make: Callable[[_Machine], Any]) -> _Operation:
    def operate(machine: _Machine) -> None:
        found = make(machine)  # This may bring back another stack.
        machine.stack.append(found)

    return operate


def _whole(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


_BY_CODE: Final[dict[str, _Operation]] = {
    "\x80": lambda m: m.take(1),
    "\x95": lambda m: m.take(8),
    "(": _Machine.mark,
    "0": _Machine._pop,
    "1": _Machine.since_mark,
    "2": lambda m: m.stack.append(m.stack[-1]),
    "N": _value(lambda m: None),
    "\x88": _value(lambda m: True),
    "\x89": _value(lambda m: False),
    "J": _value(lambda m: m.number(_I4)),
    "K": _value(lambda m: m.number(_U1)),
    "M": _value(lambda m: m.number(_U2)),
    "\x8a": _value(lambda m: _whole(m.take(m.number(_U1)))),
    "\x8b": _value(lambda m: _whole(m.take(m.number(_I4)))),
    "G": _value(lambda m: m.number(_FLOAT)),
    "X": _value(lambda m: _text(m.take(m.number(_U4)))),
    "\x8c": _value(lambda m: _text(m.take(m.number(_U1)))),
    "\x8d": _value(lambda m: _text(m.take(m.number(_U8)))),
    "B": _value(lambda m: bytes(m.take(m.number(_U4)))),
    "C": _value(lambda m: bytes(m.take(m.number(_U1)))),
    "\x8e": _value(lambda m: bytes(m.take(m.number(_U8)))),
    "\x96": _value(lambda m: bytearray(m.take(m.number(_U8)))),
    "]": _value(lambda m: []),
    ")": _value(lambda m: ()),
    "}": _value(lambda m: {}),
    "\x8f": _value(lambda m: set()),
    "a": _Machine._append_one,
    "e": lambda m: m._append(m.since_mark()),
    "s": _Machine._set_one,
    "u": lambda m: m._set_items(m.since_mark()),
    "\x90": lambda m: m._add_items(m.since_mark()),
    "\x91": _value(lambda m: frozenset(m.members(m.since_mark()))),
    "t": _value(lambda m: tuple(m.since_mark())),
    "\x85": lambda m: m._tuple_of(1),
    "\x86": lambda m: m._tuple_of(2),
    "\x87": lambda m: m._tuple_of(3),
    "c": lambda m: m.name(m.line(), m.line()),
    "\x93": lambda m: m.name(m.stack.pop(-2), m.stack.pop()),
    "R": _Machine._reduce,
    "\x81": _Machine._reduce,
    "\x92": _Machine._new_by_name,
    "b": _Machine._build,
    "q": lambda m: m.keep(m.number(_U1)),
    "r": lambda m: m.keep(m.number(_U4)),
    "\x94": _Machine._memoize,
    "h": lambda m: m.recall(m.number(_U1)),
    "j": lambda m: m.recall(m.number(_U4)),
    "Q": _Machine._persistent,
}

_OPERATIONS: Final = {ord(code): operation for code, operation in _BY_CODE.items()}
