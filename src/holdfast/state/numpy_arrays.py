"""NumPy's arrays and random generators."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from holdfast.errors import MissingPackageError, UnsupportedValueError
from holdfast.format.dtypes import names_in
from holdfast.format.shapes import extent_of, find_layout, may_share_elements, order_dimensions, strides_in_order
from holdfast.state.leaves import ArraySpec, DeviceCopier, Glance, Plain, Sight, spec_of
from holdfast.state.registry import register_backend

_DTYPES = names_in("numpy")
_NUMPY_NAMES = {name: numpy_name for numpy_name, name in _DTYPES.items()}


class NumpyBackend:
    """NumPy arrays. Other byte orders are stored little-endian, and come back so in new arrays."""

    name = "numpy"
    devices: DeviceCopier | None = None
    sight = Sight(
        lambda array: array,
        lambda array: ((array.dtype.num, array.shape), array) if array.flags.c_contiguous else (None, None),
        lambda array: float(array.reshape(())),
    )
    is_immutable = False

    def spec(self, array: Any, path: str) -> ArraySpec:
        """Returns the array's description."""
        dtype = _name_of(array.dtype)
        if type(array) is not np.ndarray:
            raise UnsupportedValueError(
                f"{path}: an array of type {type(array).__module__}.{type(array).__qualname__} cannot be stored",
                path=path,
                hint="Store numpy.asarray(...) of it, or register a codec for its type.",
            )
        if not dtype:
            raise UnsupportedValueError(
                f"{path}: an array of dtype {array.dtype} cannot be stored",
                path=path,
                hint="Convert it to a list, or to a numpy or ml_dtypes type that is the same on all machines.",
            )
        if array.flags.c_contiguous:
            return spec_of(dtype, array.shape)
        return ArraySpec(dtype, array.shape, _find_layout(array))

    def alias_key(self, array: Any) -> Hashable:
        """Returns address, type, shape and strides."""
        if array.size == 0:
            return id(array)
        address = array.__array_interface__["data"][0]
        return (address, array.dtype, array.shape, array.strides)

    def address(self, array: Any) -> int | None:
        """Returns the address of an array with the stored layout."""
        if not (array.size and array.flags.c_contiguous and _stored_as(array.dtype)):
            return None
        return int(array.__array_interface__["data"][0])

    def extent(self, array: Any) -> tuple[int, int] | None:
        """Returns the addresses from the first byte of any element to the last."""
        if not array.size:
            return None
        address = array.__array_interface__["data"][0]
        return extent_of(address, array.shape, array.strides, array.itemsize)

    def glance(self, arrays: Sequence[Any]) -> Glance | None:
        """Returns type, byte order, shape and strides of each."""
        addresses = _addresses_of(arrays)
        if 0 in map(_size, arrays):
            addresses = [address if array.size else 0 for address, array in zip(addresses, arrays, strict=True)]
        return Glance(addresses, list(map(_form, arrays)))

    def versions(self, arrays: Sequence[Any]) -> Sequence[None]:
        """Returns None for each: NumPy counts no changes."""
        return [None] * len(arrays)

    def try_plain(self, arrays: Sequence[Any]) -> Plain | None:
        """Returns types, shapes and addresses, if all have the stored layout."""
        names = [_stored_as(array.dtype) for array in arrays]
        if set(map(type, arrays)) - {np.ndarray} or not all(names) or 0 in map(_size, arrays):
            return None
        if not all(flags.c_contiguous and flags.writeable for flags in map(_flags, arrays)):
            return None
        addresses = _addresses_of(arrays)
        specs = [spec_of(name, array.shape) for name, array in zip(names, arrays, strict=True)]
        # As `alias_key` gives them.
        keys: list[Hashable] = [(address, *form) for address, form in zip(addresses, map(_form, arrays), strict=True)]
        return Plain(specs, addresses, keys)

    def copy_out(self, arrays: Sequence[Any], image: memoryview, offsets_bytes: Sequence[int]) -> None:
        """Copies the values of many arrays into one image."""
        if not image.nbytes:
            return
        flat = np.frombuffer(image, np.uint8)
        for array, offset in zip(arrays, offsets_bytes, strict=True):
            if array.size:
                dtype = array.dtype.newbyteorder("<")
                part = flat[offset : offset + array.nbytes].view(dtype).reshape(array.shape)
                np.copyto(part, array)

    def lend_memory(self, arrays: Sequence[Any]) -> Sequence[tuple[int, int]]:
        """Returns the memory of each; NumPy counts no changes."""
        begins = _addresses_of(arrays)
        return [(begin, begin + array.nbytes) for begin, array in zip(begins, arrays, strict=True)]

    def copy_in(self, array: Any, data: memoryview) -> None:
        """Fills an array from bytes."""
        values = np.frombuffer(data, array.dtype.newbyteorder("<")).reshape(array.shape)
        np.copyto(array, values)

    def new(self, spec: ArraySpec, like: Any = None) -> Any:
        """Returns a new array."""
        dtype = _dtype_named(spec.dtype)
        if spec.strides is None:
            return np.empty(spec.shape, dtype)
        order = order_dimensions(spec.shape, spec.strides)
        return np.empty([spec.shape[one] for one in order], dtype).transpose(np.argsort(order))

    def fillable(self, array: Any) -> bool:
        """Returns True if the array is writable, without overlapping elements."""
        flags = array.flags
        apart = flags.forc or not array.size or not may_share_elements(array.shape, array.strides)
        return bool(flags.writeable and apart)


_form = attrgetter("dtype", "shape", "strides")
_flags = attrgetter("flags")
_size = attrgetter("size")


def _addresses_of(arrays: Sequence[Any]) -> list[int]:
    """Returns the address of each array's first element.

    NumPy's own description of an array takes four times as long as the buffer, which read-only and empty arrays, those
    with gaps, and those of some types do not have.
    """
    try:
        return [ctypes.addressof(ctypes.c_char.from_buffer(array)) for array in arrays]
    except (TypeError, ValueError, BufferError):
        return [array.__array_interface__["data"][0] for array in arrays]


def _find_layout(array: Any) -> tuple[int, ...] | None:
    """Returns the strides, in elements, of a dense array with the same order of dimensions."""
    item_bytes = array.itemsize
    if any(stride % item_bytes for stride in array.strides):  # As of a field of records.
        order = order_dimensions(array.shape, array.strides)
        return find_layout(array.shape, strides_in_order(array.shape, order))
    return find_layout(array.shape, tuple(stride // item_bytes for stride in array.strides))


@lru_cache(maxsize=1 << 10)
def _name_of(dtype: Any) -> str:
    """Returns the element type of a dtype; empty if there is none."""
    return _DTYPES.get(dtype.name, "")


@lru_cache(maxsize=1 << 10)
def _stored_as(dtype: Any) -> str:
    """Returns the element type with which arrays are stored byte for byte; empty if there is none."""
    return _name_of(dtype) if dtype.newbyteorder("<") == dtype else ""


@lru_cache(maxsize=1 << 10)
def _dtype_named(name: str) -> Any:
    """Returns NumPy's type for an element type; types that NumPy lacks, such as bfloat16, come from ml_dtypes.

    Raises:
        MissingPackageError: If there is no ml_dtypes, or none that has it.
    """
    numpy_name = _NUMPY_NAMES[name]
    try:
        return np.dtype(numpy_name).newbyteorder("<")
    except TypeError:
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, numpy_name))
    except (ImportError, AttributeError) as error:
        raise MissingPackageError(
            f"the checkpoint holds a NumPy array of {numpy_name}, a type of the package ml_dtypes",
            hint="pip install -U ml_dtypes",
        ) from error


register_backend(np.ndarray, NumpyBackend())
