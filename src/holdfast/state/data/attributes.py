"""The attributes of an object that change in training: counters, shuffled lists, random generators."""

from __future__ import annotations

import collections
import copy
import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from holdfast.format.digests import digest
from holdfast.state.registry import backend_of

SMALL_ELEMENTS: Final = 65_536
"""Arrays of at most that many elements are cheap to copy."""

_SKIPPED: Final = frozenset({"_model", "model", "params", "validation_data"})
"""Attributes that Keras itself gives to each callback."""

_LOOKED_AT_BYTES: Final = 1 << 24
_LOOKED_AT_ELEMENTS: Final = 1 << 14
"""Arrays of at most that many bytes are compared whole, and that many elements of larger ones."""

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)

RANDOM: Final = "state of a random generator"
"""The only key of a dict that is stored for a random generator."""

_LONG: Final = 1024
"""Lists of more elements are stored as the bytes of their JSON: one value, where each element would be one."""


class Attributes:
    """The attributes of an object that have changed since training began, as far as they can be stored."""

    def __init__(self, obj: Any, skipped: frozenset[str] = _SKIPPED) -> None:
        """Notes their current values, except those of the attributes `skipped`."""
        self.obj = obj
        self._skipped = skipped
        self._began = {name: _note(value) for name, value in self._list().items()}

    def read(self) -> dict[str, Any]:
        """Returns those that have changed; lists and dicts are copied, large arrays are not."""
        began = self._began
        return {
            name: value for name, value in self._list().items() if name not in began or not _is_same(value, began[name])
        }

    def forget_new(self, values: Mapping[str, Any]) -> None:
        """Deletes the attributes that were not there when the values were noted, except those in `values`."""
        for name in self._list().keys() - self._began.keys() - values.keys():
            delattr(self.obj, name)

    def write(self, values: Mapping[str, Any]) -> None:
        """Restores them; unchanged attributes get their value at the beginning of training."""
        present = self._list()
        for name, began in self._began.items():
            if name in present and name not in values and not _is_same(present[name], began) and not _holds_seen(began):
                self._put(name, began)
        for name, value in values.items():
            # The comparing function is not a value; Keras creates it at the next epoch's end, and sets the sign then.
            if name != "min_delta" or getattr(self.obj, "monitor_op", name) is not None:
                self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        if type(value) is not dict or value.keys() != {RANDOM}:
            decoded, live = _decode(value), getattr(self.obj, name, None)
            if isinstance(live, collections.defaultdict) and isinstance(decoded, dict):
                decoded = collections.defaultdict(live.default_factory, decoded)  # Functions are not stored.
            setattr(self.obj, name, decoded)
            return
        generator = getattr(self.obj, name, None)
        if (found := _find_random(generator)) is not None:
            found.write(generator, value[RANDOM])

    def _list(self) -> dict[str, Any]:
        found = {}
        for name, value in vars(self.obj).items():
            if name not in self._skipped:
                generator = _find_random(value)
                kept = _copy_plain(value if generator is None else {RANDOM: generator.read(value)})
                if kept is not _NO_VALUE:
                    found[name] = kept
        return found


_NO_VALUE: Final = object()

_JSON: Final = "JSON of a list"
_FLAT_KIND: Final = "kind of a container"
_FLAT: Final = (collections.deque, set, frozenset, bytearray)
"""Containers that are stored as a list of their parts, or as bytes."""

_ROWS: Final = {"list": list, "tuple": tuple}


class _Random(NamedTuple):
    """Reads and writes the state of a kind of random generators."""

    kind: Any
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def read_python(generator: Any) -> list[Any]:
    """Returns the state of a generator of Python's `random`, or of that module itself, in three values."""
    version, words, gauss = generator.getstate()
    return [version, np.array(words, np.uint32).tobytes(), gauss]


def write_python(generator: Any, state: Any) -> None:
    """Restores what `read_python` returned; or `getstate`, which was stored before."""
    version, words, gauss = state
    words = np.frombuffer(words, np.uint32).tolist() if isinstance(words, bytes) else words
    generator.setstate((version, tuple(words), gauss))


_GENERATORS: Final = [
    _Random(
        np.random.Generator,
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    _Random(np.random.RandomState, lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    _Random(random.Random, read_python, write_python),
]


def register_generator(kind: type, read: Callable[[Any], Any], write: Callable[[Any, Any], object]) -> None:
    """Adds a kind of random generators to those whose state is kept."""
    _GENERATORS.append(_Random(kind, read, write))


def is_random(value: Any) -> bool:
    """Returns True for a random generator whose state is kept."""
    return _find_random(value) is not None


def _find_random(value: Any) -> _Random | None:
    if isinstance(value, random.SystemRandom):
        return None  # It has no state.
    return next((one for one in _GENERATORS if isinstance(value, one.kind)), None)


class _Seen(NamedTuple):
    """An array that is too large to copy, or counts its changes, with what shows whether it has changed."""

    array: Any
    look: object


def _look(array: Any) -> object:
    if not isinstance(array, np.ndarray):
        backend = backend_of(array)
        return None if backend is None else backend.versions([array])[0]
    is_small = array.nbytes <= _LOOKED_AT_BYTES
    values = array if is_small else array.flat[:: -(-array.size // _LOOKED_AT_ELEMENTS)]
    return digest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _note(value: Any) -> Any:
    """Returns what `_is_same` compares a later value with."""
    if type(value) in (list, tuple):
        return type(value)(map(_note, value))
    if type(value) is dict:
        return {key: _note(part) for key, part in value.items()}
    if isinstance(value, np.generic) or backend_of(value) is None or _is_small(value):
        return value
    return _Seen(value, _look(value))


def _holds_seen(noted: Any) -> bool:
    if isinstance(noted, _Seen):
        return True
    parts = noted.values() if isinstance(noted, dict) else noted if isinstance(noted, list | tuple) else ()
    return any(map(_holds_seen, parts))


def _is_small(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.size <= SMALL_ELEMENTS


def _copy_plain(value: Any) -> Any:
    """Returns a value with its lists and dicts copied, if it consists of plain values and arrays; else `_NO_VALUE`."""
    if type(value) in _SCALARS or isinstance(value, np.generic):
        return value
    if type(value) in (list, tuple):
        if len(value) > _LONG and (encoded := _encode(value)) is not None:
            return encoded
        parts = [_copy_plain(part) for part in value]
        return _NO_VALUE if any(part is _NO_VALUE for part in parts) else type(value)(parts)
    if type(value) in _FLAT:
        part = bytes(value) if type(value) is bytearray else _copy_plain([*value])
        length = getattr(value, "maxlen", None)
        return _NO_VALUE if part is _NO_VALUE else {_FLAT_KIND: type(value).__name__, "parts": part, "length": length}
    if type(value) in (dict, collections.defaultdict):
        if not all(type(key) in (str, int) for key in value):
            return _NO_VALUE
        named = {key: _copy_plain(part) for key, part in value.items()}
        return _NO_VALUE if any(part is _NO_VALUE for part in named.values()) else named
    backend = backend_of(value)
    if backend is None or isinstance(value, np.memmap):
        return _NO_VALUE  # A mapped file is data, and to look at it would read it.
    if backend.describe([value]).problems:
        return _NO_VALUE
    # An array that is changed where it is would else seem to be as it was.
    return value.copy() if _is_small(value) else value


def _encode(value: Any) -> dict[str, Any] | None:
    """Returns a long list or tuple as JSON, if that keeps it exactly; rows of it may be lists, or all tuples."""
    row, kinds = "", {*map(type, value)}
    if kinds in ({list}, {tuple}):
        row, kinds = kinds.pop().__name__, {*map(type, itertools.chain.from_iterable(value))}
    if not kinds <= {int, float, str, bool}:
        return None
    content = msgspec.json.encode(value)
    # Infinity, and what is no number, become null.
    return None if float in kinds and b"null" in content else {_JSON: content, "kinds": [type(value).__name__, row]}


def _decode(value: Any) -> Any:
    """Returns the value that `_copy_plain` returned for another process."""
    if type(value) is dict and _JSON in value:
        kind, row = value["kinds"]
        decoded = msgspec.json.decode(value[_JSON])
        return _ROWS[kind](map(_ROWS[row], decoded) if row else decoded)
    if type(value) is dict and _FLAT_KIND in value:
        make: Any = next(each for each in _FLAT if each.__name__ == value[_FLAT_KIND])
        limit = () if make is not collections.deque else (value["length"],)
        return make(_decode(value["parts"]), *limit)
    if type(value) is dict:
        return {key: _decode(part) for key, part in value.items()}
    return type(value)(map(_decode, value)) if type(value) in (list, tuple) else copy.deepcopy(value)


def _is_same(value: Any, noted: Any) -> bool:
    """Returns True if a value of `_copy_plain` is equal to one of `_note`, type by type."""
    if isinstance(noted, _Seen):
        return value is noted.array and _look(value) == noted.look
    if type(value) is not type(noted):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(noted) and all(map(_is_same, value, noted))
    if isinstance(value, dict):
        return value.keys() == noted.keys() and all(_is_same(part, noted[key]) for key, part in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype == noted.dtype and np.array_equal(value, noted)
    return bool(value == noted) if isinstance(value, (*_SCALARS, np.generic)) else False
