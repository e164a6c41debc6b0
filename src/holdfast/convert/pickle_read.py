"""Reads pickles as data. Nothing in a pickle is imported or called: a record of it is made. Pure.

A pickle is a program for a small machine, whose dangerous instructions look up a name, call it, and set attributes.
`pickletools` decodes the instructions and executes none. Here a name stays a name (`Global`), and a call becomes a
`PickledObject`, which records the function and its arguments. Only plain containers are built. Their size is bounded by
the length of the pickle: lengths in it are compared with what remains of it, the machine's memo is a dict, with any
numbers that the pickle chooses, and copies are counted.
"""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pickletools import genops
from types import NoneType
from typing import Any, Final

from holdfast.convert.pickle_write import Global, Persistent
from holdfast.errors import FormatError

MAX_KEY_DEPTH: Final = 8
"""The largest depth of tuples and frozen sets in a key."""

MAX_KEY_PARTS: Final = 100
"""How many values a key may consist of; a value that appears twice counts twice."""

MAX_KEY_LENGTH: Final = 1 << 16
"""The longest text in a key, in characters, or bytes."""

MAX_KEY_BITS: Final = 1024
"""The largest number in a key."""

MAX_EQUAL_HASHES: Final = 128
"""How many different keys may have the same hash. Each new one is compared with all of them."""

_HINT: Final = (
    "Nothing in the file was executed. If you trust the file, load it and save it again as plain state_dicts."
)
_SHOWN: Final = 100
_ALWAYS: Final = 1 << 16
_SMALL_BITS: Final = 63


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object that the writer of a pickle had made by a call.

    Attributes:
        function: The function.
        arguments: Its arguments.
        is_known: True if the reader of the pickle allows the function.
        state: The state to set on the result; None if there is none.
    """

    function: Global
    arguments: tuple[Any, ...]
    is_known: bool
    state: Any = None


def shown(value: Any) -> str:
    """**Pure.** Returns a value from a pickle in a few words, for errors: its content may be arbitrarily large."""
    kind = type(value)
    if kind is Global:
        return f"{value.module[:_SHOWN]}.{value.name[:_SHOWN]}"
    if kind in (str, bytes):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    if value is None or kind in (bool, float) or (kind is int and value.bit_length() < 4 * _SHOWN):
        return repr(value)
    return f"a value of type {kind.__name__}"


def read_pickle(data: bytes, allowed: Collection[Global], path: str, *, keep_unknown: bool = False) -> Any:
    """**Pure.** Returns what a pickle of protocol 2 or newer describes.

    With `keep_unknown`, anything that is not allowed becomes a `PickledObject` that is not known, instead of an error.

    Raises:
        FormatError: If it is malformed, or names something that is not allowed.
    """
    machine = _Machine(len(data), frozenset(allowed), path, keep_unknown=keep_unknown)
    try:
        return machine.run(data)
    # A warning is an error where a program asks for that: of odd escapes in a text, which no instruction below has.
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, Warning) as error:
        what = f"{type(error).__name__}: {str(error)[: 2 * _SHOWN]}"
        raise FormatError(f"{path}: this pickle is malformed, at byte {machine.place}: {what}", path=path) from error


class KeyChecker:
    """Checks which keys of a pickle may be hashed.

    Python hashes and compares keys in code that bounds neither the depth nor the repetitions: a few bytes of a pickle
    can make it overflow its stack, or run for ever. So a key is checked before it is hashed.
    """

    def __init__(self, also: Collection[type] = ()) -> None:
        """Prepares for the keys of one pickle.

        Objects of the types in `also` are hashed and compared at once, with everything in them.
        """
        self._plain = frozenset({NoneType, bool, float, *also})
        # By hash: the different keys that have it, among those whose hashes a writer can choose.
        self._equal: dict[int, list[Any]] = {}

    def check(self, key: Any) -> Any:
        """Returns the key, which can be hashed from now on.

        Raises:
            ValueError: If a file of this kind may not contain it.
        """
        kind = type(key)
        self._measure(key, MAX_KEY_PARTS, 0)
        if kind in (tuple, frozenset) or (kind is int and key.bit_length() > _SMALL_BITS):
            equal = self._equal.setdefault(hash(key), [])
            if key not in equal:
                equal.append(key)
            if len(equal) > MAX_EQUAL_HASHES:
                raise ValueError("too many keys have the same hash")
        return key

    def _measure(self, part: Any, left: int, depth: int) -> int:
        """Returns how many values may still follow after this one and its content."""
        kind = type(part)
        if kind in (tuple, frozenset):
            if depth >= MAX_KEY_DEPTH:
                raise ValueError(f"a key is nested more than {MAX_KEY_DEPTH} levels deep")
            for inner in part:
                left = self._measure(inner, left, depth + 1)
        elif kind in (str, bytes):
            if len(part) > MAX_KEY_LENGTH:
                raise ValueError(f"a key has {len(part)} characters or bytes; the limit is {MAX_KEY_LENGTH}")
        elif kind is int:
            if part.bit_length() > MAX_KEY_BITS:
                raise ValueError(f"a key is a number of {part.bit_length()} bits; the limit is {MAX_KEY_BITS}")
        elif kind not in self._plain:
            raise ValueError(f"a {kind.__name__} cannot be a key or a member of a set")
        if left <= 0:
            raise ValueError(f"a key is made of more than {MAX_KEY_PARTS} values")
        return left - 1


class _Machine:
    """Executes the instructions of one pickle, each of which has a function in `_INSTRUCTIONS`."""

    def __init__(self, size_bytes: int, allowed: frozenset[Global], path: str, *, keep_unknown: bool) -> None:
        self._allowed = allowed
        self._path = path
        self._keep_unknown = keep_unknown
        self._copy_limit = size_bytes + _ALWAYS
        self._marks: list[list[Any]] = []
        self._keys = KeyChecker((Global, PickledObject))
        self.place: int | None = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for instruction, argument, self.place in genops(io.BytesIO(data)):
            name = instruction.name
            if name in _VALUES:
                self.stack.append(argument)
            elif name == "STOP":
                break
            elif (follow := _INSTRUCTIONS.get(name)) is not None:
                follow(self, argument)
            else:
                raise ValueError(f"unexpected instruction {name}")
        return self.stack.pop()

    def mark(self) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        found = self.stack
        self.stack = self._marks.pop()
        return found

    def push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is not text")
        found = Global("builtins" if module == "__builtin__" else module, name)
        if found not in self._allowed and found not in _BUILDERS and not self._keep_unknown:
            raise FormatError(
                f"{self._path}: it contains {shown(found)}, which is not supported",
                path=self._path,
                hint=_HINT,
            )
        self.stack.append(found)

    def call(self, arguments: Any) -> None:
        function = self.stack.pop()
        if type(arguments) is not tuple:
            raise ValueError("a call without an argument list")
        build = _BUILDERS.get(function) if type(function) is Global else None
        if build is not None:
            self.stack.append(build(self, *arguments))
            return
        if type(function) is not Global:
            if not self._keep_unknown:
                raise ValueError("a call of something that is not a name")
            function = Global("", "?")
        self.stack.append(PickledObject(function, arguments, is_known=function in self._allowed))

    def set_state(self, state: Any) -> None:
        target = self.stack[-1]
        if type(target) is PickledObject:
            target.state = state
        elif type(target) is not dict:  # An OrderedDict may have attributes; torch puts versions there.
            raise ValueError("attributes are set on a value that has none")

    def append(self, values: list[Any]) -> None:
        target = self._target((list, collections.deque), "an item is appended to a value that is not a list")
        if target is not None:
            target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self._target((dict,), "an item is set in a value that is not a dict")
        if len(values) % 2:
            raise ValueError("a key has no value")
        if target is not None:
            target.update(zip(self.check_keys(values[::2]), values[1::2], strict=True))

    def add_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise ValueError("an item is added to a value that is not a set")
        target.update(self.check_keys(values))

    def _target(self, kinds: tuple[type, ...], problem: str) -> Any:
        """Returns the container that values go into; None if it is an unknown object, which is left out as a whole."""
        target = self.stack[-1]
        if type(target) is PickledObject and not target.is_known:
            return None
        if type(target) not in kinds:
            raise ValueError(problem)
        return target

    def check_keys(self, values: list[Any]) -> list[Any]:
        return [self._keys.check(value) for value in values]

    def count_copied(self, length: int) -> None:
        """Counts copies: one part that appears in a pickle once can be referred to repeatedly."""
        self._copy_limit -= length
        if self._copy_limit < 0:
            raise ValueError("it copies more than it contains")


def _bytes(machine: _Machine, text: Any, encoding: Any = "latin-1") -> bytes:
    if type(text) is not str or type(encoding) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"{shown(text)} cannot be encoded as bytes in {shown(encoding)}")
    machine.count_copied(len(text))
    return text.encode("latin-1")


def _bytearray(machine: _Machine, text: Any = b"", encoding: Any = "latin-1") -> bytearray:
    # A number would be a length, and memory be taken for it.
    if type(text) is str:
        return bytearray(_bytes(machine, text, encoding))
    if type(text) is not bytes:
        raise ValueError("a bytearray of something that is not bytes")
    machine.count_copied(len(text))
    return bytearray(text)


def _dict(machine: _Machine, pairs: Any = ()) -> dict[Any, Any]:
    if type(pairs) is dict:
        machine.count_copied(len(pairs))
        return dict(pairs)
    if type(pairs) not in (list, tuple) or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("a dict of something that is not pairs")
    machine.count_copied(len(pairs))
    return dict(zip(machine.check_keys([pair[0] for pair in pairs]), (pair[1] for pair in pairs), strict=True))


def _deque(machine: _Machine, values: Any = (), limit: Any = None) -> collections.deque[Any]:
    if type(values) not in (list, tuple) or (limit is not None and type(limit) is not int):
        raise ValueError("a deque of something that is not a list")
    machine.count_copied(len(values))
    return collections.deque(values, limit)


def _set(machine: _Machine, values: Any = ()) -> set[Any]:
    if type(values) not in (list, tuple):
        raise ValueError("a set of something that is not a list")
    machine.count_copied(len(values))
    return set(machine.check_keys(values))


def _complex(machine: _Machine, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise ValueError("a complex number of something that is not numbers")
    return complex(real, imaginary)


_BUILDERS: Final[dict[Global, Callable[..., Any]]] = {
    Global("collections", "OrderedDict"): _dict,
    Global("collections", "Counter"): _dict,
    Global("collections", "defaultdict"): lambda machine, factory=None: {},
    Global("collections", "deque"): _deque,
    Global("_codecs", "encode"): _bytes,
    Global("builtins", "set"): _set,
    Global("builtins", "frozenset"): lambda machine, values=(): frozenset(_set(machine, values)),
    Global("builtins", "bytearray"): _bytearray,
    Global("builtins", "bytes"): lambda machine: b"",  # How protocol 2 has the empty one.
    Global("builtins", "complex"): _complex,
}
"""The functions whose results are built here, by code of this module."""

_VALUES: Final = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
        *("BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
"""The instructions that push their argument on the stack."""


def _pushing(make: Callable[[_Machine], Any]) -> Callable[[_Machine, Any], None]:
    def follow(machine: _Machine, argument: Any) -> None:
        made = make(machine)  # This may bring back another stack.
        machine.stack.append(made)

    return follow


def _pop(machine: _Machine, argument: None) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_to_mark()


def _tuple_of(machine: _Machine, length: int) -> None:
    begin = len(machine.stack) - length
    if begin < 0:
        raise IndexError("too few values for a tuple")
    machine.stack[begin:] = [tuple(machine.stack[begin:])]


def _persistent(machine: _Machine, argument: None) -> None:
    identity = machine.stack.pop()
    if type(identity) is not tuple:
        raise ValueError("the name of data outside of the pickle is not a tuple")
    machine.stack.append(Persistent(identity))


def _put(machine: _Machine, number: int) -> None:
    machine.memo[number] = machine.stack[-1]


def _get(machine: _Machine, number: int) -> None:
    machine.stack.append(machine.memo[number])


def _set_item(machine: _Machine, argument: None) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _stack_global(machine: _Machine, argument: None) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push_name(module, name)


def _call_with_names(machine: _Machine, argument: None) -> None:
    names, arguments = machine.stack.pop(), machine.stack.pop()
    if type(arguments) is not tuple or type(names) is not dict:
        raise ValueError("an object without arguments")
    machine.call((*arguments, names))


_INSTRUCTIONS: Final[dict[str, Callable[[_Machine, Any], object]]] = {
    "PROTO": lambda machine, version: None,
    "FRAME": lambda machine, size: None,
    "NONE": _pushing(lambda machine: None),
    "NEWTRUE": _pushing(lambda machine: True),
    "NEWFALSE": _pushing(lambda machine: False),
    "EMPTY_TUPLE": _pushing(lambda machine: ()),
    "EMPTY_LIST": _pushing(lambda machine: []),
    "EMPTY_DICT": _pushing(lambda machine: {}),
    "EMPTY_SET": _pushing(lambda machine: set()),
    "TUPLE": _pushing(lambda machine: tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: _tuple_of(machine, 1),
    "TUPLE2": lambda machine, _: _tuple_of(machine, 2),
    "TUPLE3": lambda machine, _: _tuple_of(machine, 3),
    "FROZENSET": _pushing(lambda machine: frozenset(machine.check_keys(machine.pop_to_mark()))),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "ADDITEMS": lambda machine, _: machine.add_items(machine.pop_to_mark()),
    "MARK": lambda machine, _: machine.mark(),
    "POP": _pop,
    "POP_MARK": lambda machine, _: machine.pop_to_mark(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": lambda machine, names: machine.push_name(*names.split(" ", 1)),
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda machine, _: machine.call(machine.stack.pop()),
    "NEWOBJ": lambda machine, _: machine.call(machine.stack.pop()),
    "NEWOBJ_EX": _call_with_names,
    "BUILD": lambda machine, _: machine.set_state(machine.stack.pop()),
    "BINPERSID": _persistent,
}
