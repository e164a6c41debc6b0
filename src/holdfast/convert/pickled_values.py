"""Values of NumPy and of Python's own library, made here from how a pickle describes them, which is checked. Pure."""

from __future__ import annotations

import argparse
import datetime
import math
import pathlib
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.convert.input_files import SourceTensor, whole_array
from holdfast.convert.pickle_read import PickledObject
from holdfast.convert.pickle_write import Global
from holdfast.convert.torch_file import lengths_of
from holdfast.format.dtypes import ITEM_BYTES, MAX_DIMENSIONS, names_in
from holdfast.format.shapes import strides_of


def thaw(value: Any) -> Any:
    """**Pure.** Returns an array or number of NumPy, a path, a time or a namespace that a pickle describes.

    An array becomes an `InputArray`. The values in a namespace are as they were. Anything else is returned unchanged.
    """
    make = _MAKERS.get(value.function) if type(value) is PickledObject else None
    try:
        made = None if make is None else make(value.state, *value.arguments)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        made = None  # It is not described as its own library does.
    return value if made is None else made


class _PickledBytes:
    """The elements of an array that are in the pickle itself, as a file."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.path, self._data = f"pickled {id(data)}", memoryview(data)

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        into[:] = self._data[offset_bytes : offset_bytes + len(into)]


def _dtype(made: Any) -> Any:
    import numpy as np

    code = made.arguments[0] if type(made) is PickledObject and made.function == Global("numpy", "dtype") else ""
    if type(code) is not str or code[:1] not in tuple("biufc") or len(code) > 3 or made.state[1] not in ("<", "|"):
        raise ValueError("not a type of numbers")
    return np.dtype(code).newbyteorder("<")


def _number(_: Any, dtype: Any, data: Any) -> Any:
    import numpy as np

    return np.frombuffer(data, _dtype(dtype))[0] if len(data) == _dtype(dtype).itemsize else None


def _array(data: Any, made_dtype: Any, made_shape: Any, *, is_turned: bool) -> Any:
    import numpy as np

    dtype, shape = names_in("numpy")[_dtype(made_dtype).name], lengths_of(made_shape)
    if shape is None or len(shape) > MAX_DIMENSIONS or len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
        return None
    if is_turned:
        data = np.frombuffer(data, _dtype(made_dtype)).reshape(shape, order="F").tobytes()
    file: Any = _PickledBytes(data)
    return msgspec.structs.replace(
        whole_array(SourceTensor(file, 0, dtype, shape, strides_of(shape, 1))), library="numpy"
    )


def _path(kind: type[pathlib.PurePath]) -> Callable[..., Any]:
    return lambda _, *parts: kind(*parts) if all(type(part) is str for part in parts) else None


def _datetime(_: Any, parts: bytes) -> Any:
    high, low, month, day, hour, minute, second, *rest = parts
    return datetime.datetime(high << 8 | low, month, day, hour, minute, second, int.from_bytes(rest, "big"))


def _namespace(state: Any) -> Any:
    namespace = argparse.Namespace()
    vars(namespace).update((name, part) for name, part in state.items() if type(name) is str)
    return namespace


_MAKERS: Final[dict[Global, Callable[..., Any]]] = {
    Global("argparse", "Namespace"): _namespace,
    Global("datetime", "datetime"): _datetime,  # One with a time zone is left as it is.
}
"""For each name, what makes the value of a description's state and arguments."""

for _package in ("numpy._core", "numpy.core"):
    _MAKERS[Global(f"{_package}.multiarray", "scalar")] = _number
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
