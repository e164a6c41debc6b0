"""Values of NumPy and of Python's own library, made here from how a pickle describes them. Pure.

No function that a pickle names is called with what the pickle gives it: the numbers in a description are checked, and
code of this module makes the value.
"""

from __future__ import annotations

import argparse
import datetime
import math
import pathlib
import types
from collections.abc import Callable, Hashable
from typing import Any, Final

from holdfast.convert.input_files import Chunk, InputArray
from holdfast.convert.pickle_read import PickledObject
from holdfast.convert.pickle_write import Global
from holdfast.convert.torch_file import lengths_of
from holdfast.format.dtypes import ITEM_BYTES, MAX_DIMENSIONS, names_in
from holdfast.format.shapes import Box, row_major, whole_box

_NUMPY: Final = ("numpy._core", "numpy.core")
"""The package of NumPy's own functions, the newest name first."""


class PickledArray:
    """The elements of an array that are in the pickle itself. For `strides` and so on, see `ArrayPart`."""

    is_contiguous = False

    def __init__(self, data: bytes | bytearray, item_bytes: int, shape: tuple[int, ...], order: str) -> None:
        self._data, self._item_bytes, self._shape, self._order = data, item_bytes, shape, order
        self.strides = row_major(shape) if order == "C" else row_major(shape[::-1])[::-1]

    @property
    def key(self) -> Hashable:
        """Equal for arrays that the pickle has once."""
        return ("pickled", id(self._data), self._order, self._shape)

    def read_run(self, box: Box, into: memoryview) -> None:
        """Never called: no array is contiguous here."""
        raise NotImplementedError

    def values(self, box: Box) -> Any:
        """Returns the elements of a box, as raw bytes."""
        import numpy as np

        elements: Any = np.frombuffer(self._data, f"V{self._item_bytes}")
        return elements.reshape(self._shape, order=self._order)[(*map(slice, box.offsets, box.ends), ...)]


def thaw(value: Any) -> Any:
    """**Pure.** Returns an array or number of NumPy, a path, a time or a namespace that a pickle describes.

    An array becomes an `InputArray`. The values in a namespace are as they were. Anything else is returned unchanged.
    """
    if type(value) is not PickledObject:
        return value
    make = _MAKERS.get(value.function)
    try:
        made = None if make is None else make(value)
    except (TypeError, ValueError, IndexError, OverflowError):
        made = None  # It is not described as its own library does.
    return value if made is None else made


def _dtype(made: Any) -> tuple[str, Any]:
    """Returns the element type's name in an index, and NumPy's own, which is little-endian.

    Raises:
        ValueError: If it is another type.
    """
    import numpy as np

    state = made.state if type(made) is PickledObject and made.function == Global("numpy", "dtype") else None
    code = made.arguments[0] if type(state) is tuple and len(state) > 4 and state[1] in ("<", "|") else None
    if type(code) is not str or len(code) > 3 or code[:1] not in "biufc":
        raise ValueError("not a type of numbers")
    dtype = np.dtype(code).newbyteorder("<")
    return names_in("numpy").get(dtype.name, ""), dtype


def _scalar(made: PickledObject) -> Any:
    import numpy as np

    _, dtype = _dtype(made.arguments[0])
    data = made.arguments[1]
    return np.frombuffer(data, dtype)[0] if type(data) is bytes and len(data) == dtype.itemsize else None


def _array(data: Any, made_dtype: Any, made_shape: Any, order: str) -> Any:
    dtype, _ = _dtype(made_dtype)
    shape = lengths_of(made_shape)
    if not dtype or shape is None or len(shape) > MAX_DIMENSIONS or type(data) not in (bytes, bytearray):
        return None
    if len(data) != math.prod(shape) * ITEM_BYTES[dtype]:
        return None
    part = PickledArray(data, ITEM_BYTES[dtype], shape, order)
    return InputArray(dtype, shape, (Chunk(whole_box(shape), part),), "numpy")


def _reconstructed(made: PickledObject) -> Any:
    _, shape, dtype, is_fortran, data = made.state
    return _array(data, dtype, shape, "F" if is_fortran is True else "C")


def _from_buffer(made: PickledObject) -> Any:
    data, dtype, shape, order = made.arguments
    return _array(data, dtype, shape, order) if order in ("C", "F") else None


def _path(kind: type[pathlib.PurePath]) -> Callable[[PickledObject], Any]:
    return lambda made: kind(*made.arguments) if all(type(part) is str for part in made.arguments) else None


def _datetime(made: PickledObject) -> Any:
    (parts,) = made.arguments  # One with a time zone is left as it is.
    high, low, month, day, hour, minute, second, *rest = parts
    microsecond = int.from_bytes(bytes(rest), "big")
    return datetime.datetime(high << 8 | low, month & 127, day, hour, minute, second, microsecond, fold=month >> 7)


def _namespace(kind: Callable[[], Any]) -> Callable[[PickledObject], Any]:
    def make(made: PickledObject) -> Any:
        if type(made.state) is not dict or not all(type(name) is str for name in made.state):
            return None
        namespace = kind()
        vars(namespace).update(made.state)
        return namespace

    return make


_PATHS: Final[tuple[tuple[str, type[pathlib.PurePath]], ...]] = (
    ("PosixPath", type(pathlib.Path())),
    ("PurePosixPath", pathlib.PurePosixPath),
    ("WindowsPath", pathlib.PureWindowsPath),
    ("PureWindowsPath", pathlib.PureWindowsPath),
)

_MAKERS: Final[dict[Global, Callable[[PickledObject], Any]]] = {
    **{Global(f"{package}.multiarray", "scalar"): _scalar for package in _NUMPY},
    **{Global(f"{package}.multiarray", "_reconstruct"): _reconstructed for package in _NUMPY},
    **{Global(f"{package}.numeric", "_frombuffer"): _from_buffer for package in _NUMPY},
    **{Global(module, name): _path(kind) for module in ("pathlib", "pathlib._local") for name, kind in _PATHS},
    Global("datetime", "datetime"): _datetime,
    Global("argparse", "Namespace"): _namespace(argparse.Namespace),
    Global("types", "SimpleNamespace"): _namespace(types.SimpleNamespace),
}
"""For each name, what makes the value; it returns None or raises an error of Python's if that cannot be."""
