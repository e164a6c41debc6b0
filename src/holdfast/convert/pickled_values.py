"""Values of NumPy and of Python's own library, made here from how a pickle describes them, which is checked. Pure."""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import math
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.convert.files import SourceTensor, whole_array
from holdfast.convert.pickle_read import PickledObject
from holdfast.convert.pickle_write import Global
from holdfast.convert.torch_file import lengths_of
from holdfast.format.dtypes import ITEM_BYTES, MAX_DIMENSIONS, names_in
from holdfast.format.scalars import MAX_DECIMAL_CHARACTERS, MAX_INT_DIGITS
from holdfast.format.shapes import strides_of


def thaw(value: Any) -> Any:
    """**Pure.** Returns an array or scalar of NumPy, or a value of Python's library such as a path or a date.

    An array of numbers becomes an `InputArray`, one of texts or times a list. The values in a namespace are as they
    were. Anything else is returned unchanged.
    """
    make = _MAKERS.get(value.function) if type(value) is PickledObject else None
    try:
        made = None if make is None else make(value.state, *value.arguments)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError):
        made = None  # It is not described as its own library does.
    return value if made is None else made


class _PickledBytes:
    """The elements of an array that are in the pickle itself, as a file."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.path, self._data = f"pickled {id(data)}", memoryview(data)

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        into[:] = self._data[offset_bytes : offset_bytes + len(into)]


def _dtype(made: Any, kinds: str = "biufc") -> Any:
    import numpy as np

    code = made.arguments[0] if type(made) is PickledObject and made.function == Global("numpy", "dtype") else ""
    if type(code) is not str or code[:1] not in tuple(kinds) or made.state[1] not in ("<", "|"):
        raise ValueError("not a type of numbers, texts or times")
    if code[0] in "Mm":
        unit, count, *_ = made.state[-1][1]
        code += f"[{count}{unit.decode('ascii')}]"
    elif not code[1:].isdecimal() or len(code) > (10 if code[0] in "US" else 3):
        raise ValueError("not a type of numbers or texts")
    return np.dtype(code).newbyteorder("<")


def _scalar(_: Any, made: Any, data: Any) -> Any:
    import numpy as np

    dtype = _dtype(made, "biufcUSMm")
    if len(data) != dtype.itemsize:
        return None
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()


def _list_values(array: Any) -> Any:
    """Returns the values of an array as lists in lists."""
    if array.ndim and array.dtype.kind in "Mm":
        return [_list_values(part) if array.ndim > 1 else part for part in array]
    return array.tolist() if array.dtype.kind in "US" else array[()]


def _array(data: Any, made_dtype: Any, made_shape: Any, *, is_turned: bool) -> Any:
    import numpy as np

    live, shape = _dtype(made_dtype, "biufcUSMm"), lengths_of(made_shape)
    if live.kind in "USMm" and shape is not None and len(shape) <= MAX_DIMENSIONS:
        return _list_values(np.frombuffer(data, live).reshape(shape, order="F" if is_turned else "C"))
    dtype = names_in("numpy")[live.name]
    if shape is None or len(shape) > MAX_DIMENSIONS or len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
        return None
    if is_turned:
        data = np.frombuffer(data, live).reshape(shape, order="F").tobytes()
    file: Any = _PickledBytes(data)
    return msgspec.structs.replace(
        whole_array(SourceTensor(file, 0, dtype, shape, strides_of(shape, 1))), library="numpy"
    )


def _path(kind: type[pathlib.PurePath]) -> Callable[..., Any]:
    return lambda _, *parts: kind(*parts) if all(type(part) is str for part in parts) else None


def _datetime(_: Any, parts: bytes) -> Any:
    high, low, month, day, hour, minute, second, *rest = parts
    return datetime.datetime(high << 8 | low, month, day, hour, minute, second, int.from_bytes(rest, "big"))


def _date(_: Any, parts: bytes) -> Any:
    high, low, month, day = parts
    return datetime.date(high << 8 | low, month, day)


def _time(_: Any, parts: bytes) -> Any:
    hour, minute, second, *rest = parts
    return datetime.time(hour, minute, second, int.from_bytes(rest, "big"))


def _from_ints(make: Callable[..., Any], count: int) -> Callable[..., Any]:
    def call(_: Any, *numbers: Any) -> Any:
        are_fit = all(type(one) is int and one.bit_length() <= 4 * MAX_INT_DIGITS for one in numbers)
        return make(*numbers) if len(numbers) == count and are_fit else None

    return call


def _decimal(_: Any, text: Any) -> Any:
    return decimal.Decimal(text) if type(text) is str and len(text) <= MAX_DECIMAL_CHARACTERS else None


def _namespace(kind: type) -> Callable[..., Any]:
    def call(state: Any) -> Any:
        namespace = kind()
        vars(namespace).update((name, part) for name, part in state.items() if type(name) is str)
        return namespace

    return call


_MAKERS: Final[dict[Global, Callable[..., Any]]] = {
    Global("argparse", "Namespace"): _namespace(argparse.Namespace),
    Global("types", "SimpleNamespace"): _namespace(types.SimpleNamespace),
    Global("datetime", "datetime"): _datetime,  # One with a time zone is left as it is.
    Global("datetime", "date"): _date,
    Global("datetime", "time"): _time,
    Global("datetime", "timedelta"): _from_ints(datetime.timedelta, 3),
    Global("decimal", "Decimal"): _decimal,
    Global("fractions", "Fraction"): _from_ints(fractions.Fraction, 2),
    Global("uuid", "UUID"): lambda state: uuid.UUID(int=state["int"]) if type(state["int"]) is int else None,
    Global("builtins", "range"): _from_ints(range, 3),
    Global("builtins", "xrange"): _from_ints(range, 3),  # How protocol 2 has it.
}
"""For each name, what makes the value of a description's state and arguments."""

PUBLIC_NAMES: Final[dict[Global, str]] = {
    Global("numpy.random._pickle", "__generator_ctor"): "numpy.random.Generator",
    Global("numpy.random._pickle", "__randomstate_ctor"): "numpy.random.RandomState",
    Global("numpy.random._pickle", "__bit_generator_ctor"): "numpy.random.BitGenerator",
    Global("re", "_compile"): "re.Pattern",
}
"""For names that only a pickle uses, the class of what they make."""

for _package in ("numpy._core", "numpy.core"):
    _MAKERS[Global(f"{_package}.multiarray", "scalar")] = _scalar
    PUBLIC_NAMES[Global(f"{_package}.multiarray", "scalar")] = "numpy scalar of a type that cannot be stored"
    PUBLIC_NAMES[Global(f"{_package}.multiarray", "_reconstruct")] = "numpy array of objects or records"
    PUBLIC_NAMES[Global(f"{_package}.numeric", "_frombuffer")] = "numpy array of records"
    _MAKERS[Global(f"{_package}.multiarray", "_reconstruct")] = lambda state, *_: _array(
        state[4], state[2], state[1], is_turned=state[3] is True
    )
    _MAKERS[Global(f"{_package}.numeric", "_frombuffer")] = lambda _, data, dtype, shape, order: _array(
        data, dtype, shape, is_turned=order == "F"
    )
for _name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
    for _module in ("pathlib", "pathlib._local"):
        _MAKERS[Global(_module, _name)] = _path(
            type(pathlib.Path()) if _name == "PosixPath" else getattr(pathlib, f"Pure{_name.removeprefix('Pure')}")
        )
