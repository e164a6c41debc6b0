"""NumPy's arrays and random generators."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import numpy as np

from holdfast.errors import MissingPackageError
from holdfast.format.dtypes import names_in
from holdfast.format.shapes import extent_of, find_layout, may_share_elements, order_dimensions, strides_in_order
from holdfast.state.leaves import ArrayBackend, ArraySpec, DeviceCopier, Facts, Sight, spec_of
from holdfast.state.registry import register_backend

_DTYPES = names_in("numpy")
_NUMPY_NAMES = {name: numpy_name for numpy_name, name in _DTYPES.items()}


class NumpyBackend(ArrayBackend):
    """NumPy arrays. Other byte orders are stored little-endian, and come back so in new arrays."""

    name = "numpy"
    devices: DeviceCopier | None = None
    sight = Sight(
        lambda array: array,
        lambda array: ((array.dtype.num, array.shape), array) if array.flags.c_contiguous else (None, None),
        lambda array: float(array.reshape(())),
    )
    is_immutable = False

    def versions(self, arrays: Sequence[Any]) -> Sequence[None]:
        """Returns None for each: NumPy counts no changes."""
        return [None] * len(arrays)

    def describe(self, arrays: Sequence[Any]) -> Facts:
        """Returns the facts of many arrays: at once of those that can be written to and have the stored layout."""
        facts = Facts([], [], [], {}, {}, set(), {})
        for first in range(0, len(arrays), _TOGETHER):
            some = arrays[first : first + _TOGETHER]
            try:
                # NumPy's own description of an array takes four times as long as the buffer, which read-only and empty
                # arrays, those with gaps, and those of some types do not have.
                addresses = [ctypes.addressof(ctypes.c_char.from_buffer(array)) for array in some]
            except (TypeError, ValueError, BufferError):
                addresses = []
            specs = list(map(_find_spec, map(_dtype, some), map(_shape, some)))
            if not addresses or None in specs or set(map(type, some)) != _PLAIN_TYPES:
                for array in some:
                    _add_facts(facts, array)
                continue
            facts.specs.extend(filter(None, specs))
            facts.keys.extend(addresses)
            facts.addresses.extend(addresses)
        return facts

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
        begins = self.describe(arrays).addresses
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


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_PLAIN_TYPES: Final = {np.ndarray}

_TOGETHER: Final = 256
"""How many arrays are described at once: an unusual one among them costs the time of describing each."""


@lru_cache(maxsize=1 << 14)
def _find_spec(dtype: Any, shape: tuple[int, ...]) -> ArraySpec | None:
    """Returns the description of arrays in row-major order; None if their bytes are not those that are stored."""
    name = _stored_as(dtype)
    return spec_of(name, shape) if name else None


def _add_facts(facts: Facts, array: Any) -> None:
    """Adds the facts of one array of any form."""
    row, dtype, flags = len(facts.specs), _name_of(array.dtype), array.flags
    begin = array.__array_interface__["data"][0] if array.size else -id(array)
    is_stored = flags.c_contiguous and bool(_stored_as(array.dtype))
    if type(array) is not np.ndarray:
        kind = f"{type(array).__module__}.{type(array).__qualname__}"
        hint = "Store numpy.asarray(...) of it, or register a codec for its type."
        facts.problems[row] = f"an array of type {kind} cannot be stored", hint
    elif not dtype:
        hint = "Convert it to a list, or to a numpy or ml_dtypes type that is the same on all machines."
        facts.problems[row] = f"an array of dtype {array.dtype} cannot be stored", hint
    facts.specs.append(ArraySpec(dtype, array.shape, None if flags.c_contiguous else _find_layout(array)))
    facts.keys.append(begin)
    facts.addresses.append(begin if is_stored and array.size else 0)
    if not is_stored:
        facts.forms[row] = array.dtype, array.strides
    if array.size and not flags.forc:
        facts.extents[row] = extent_of(begin, array.shape, array.strides, array.itemsize)
    is_apart = flags.forc or not array.size or not may_share_elements(array.shape, array.strides)
    if not (flags.writeable and is_apart):
        facts.unfillable.add(row)


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
