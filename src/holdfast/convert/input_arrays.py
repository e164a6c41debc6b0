"""Arrays in files of other programs: where their bytes are, and these in order, however large they are."""

from __future__ import annotations

import math
import mmap
from collections.abc import Hashable, Iterator
from typing import Any, Final

import msgspec

from holdfast.convert.input_files import InputFile
from holdfast.convert.leaf_stream import StoredLeaf
from holdfast.format.boxes import Box, byte_ranges, intersect, shift, split_range, strides_of, whole_box
from holdfast.format.dtypes import ITEM_BYTES

_WINDOW_BYTES: Final = 32 << 20


class SourceTensor(msgspec.Struct, frozen=True):
    """A tensor in a file, as torch describes one: some elements of a run of bytes.

    Attributes:
        file: The file.
        begin: Where its first element lies, in bytes.
        dtype: The element type.
        shape: The length of each dimension.
        strides: For each dimension, how many elements lie from one to the next.
    """

    file: InputFile
    begin: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        """Equal for tensors that are the same elements of the same bytes."""
        return (str(self.file.path), self.begin, self.dtype, self.shape, self.strides)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other in row-major order."""
        plain = strides_of(self.shape, 1)
        return 0 in self.shape or all(
            length == 1 or stride == expected
            for length, stride, expected in zip(self.shape, self.strides, plain, strict=True)
        )

    @property
    def reach(self) -> int:
        """How many elements of its storage there are from its first to its last, both counted."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))


class Chunk(msgspec.Struct, frozen=True):
    """A box of an array."""

    box: Box
    tensor: SourceTensor


class InputArray(StoredLeaf, frozen=True):
    """An array that is to be imported, and so to be a leaf of a step.

    Attributes:
        chunks: What it is made of; they cover it exactly.
    """

    chunks: tuple[Chunk, ...]

    @property
    def key(self) -> Hashable:
        """Equal for arrays that are one in the files; None for one without elements, which is no other."""
        return tuple((chunk.box, chunk.tensor.key) for chunk in self.chunks) if self.size_bytes else None


def whole_array(tensor: SourceTensor) -> InputArray:
    """**Pure.** An array that is one tensor."""
    return InputArray(tensor.dtype, tensor.shape, (Chunk(whole_box(tensor.shape), tensor),))


def read_spans(array: InputArray, span_bytes: int) -> Iterator[memoryview]:
    """**Blocks.** The bytes of an array in row-major order, in spans of equal length but for the last.

    Each is good until the next one is asked for. No more than a window is in memory, and what the system keeps of a
    file whose tensors are not contiguous.

    Raises:
        FormatError: If a file ends too early.
        StorageError: If it cannot be read.
    """
    item_bytes = ITEM_BYTES[array.dtype]
    elements = array.size_bytes // item_bytes
    most = max(_WINDOW_BYTES // span_bytes, 1) * span_bytes // item_bytes
    window = bytearray(min(most, elements) * item_bytes)
    for begin in range(0, elements, most):
        end = min(begin + most, elements)
        filled = memoryview(window)[: (end - begin) * item_bytes]
        place = 0
        for slab in split_range(array.shape, begin, end):
            size_bytes = slab.elements * item_bytes
            _fill(array, slab, filled[place : place + size_bytes])
            place += size_bytes
        for first in range(0, len(filled), span_bytes):
            yield filled[first : first + span_bytes]


def _fill(array: InputArray, slab: Box, into: memoryview) -> None:
    """Puts together a box of an array that is a run of its elements."""
    import numpy as np

    goal: Any = None
    for chunk in array.chunks:
        common = intersect(chunk.box, slab)
        if common is None:
            continue
        inner = shift(common, chunk.box.offsets)
        if common == slab and chunk.tensor.is_contiguous:
            _read_run(chunk.tensor, inner, into)
            continue
        if goal is None:
            goal = np.frombuffer(into, f"V{ITEM_BYTES[array.dtype]}").reshape(slab.shape)
        at = shift(common, slab.offsets)
        goal[(*map(slice, at.offsets, at.ends), ...)] = _values(chunk.tensor, inner)


def _read_run(tensor: SourceTensor, box: Box, into: memoryview) -> None:
    """Reads a box that is one run of bytes: what a contiguous tensor has in common with such a run of its array."""
    (first, _), *_ = byte_ranges(tensor.shape, box, ITEM_BYTES[tensor.dtype])
    tensor.file.read_into(tensor.begin + first, into)


def _values(tensor: SourceTensor, box: Box) -> Any:
    import numpy as np

    item_bytes = ITEM_BYTES[tensor.dtype]
    unit = f"V{item_bytes}"
    if tensor.is_contiguous:
        data = bytearray(math.prod(box.shape) * item_bytes)
        _read_run(tensor, box, memoryview(data))
        return np.frombuffer(data, unit).reshape(box.shape)
    # Its elements lie apart: only those pages are read that hold some of the box.
    first = tensor.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = tensor.begin - first + tensor.reach * item_bytes
    mapped = mmap.mmap(tensor.file.fileno(), length, access=mmap.ACCESS_READ, offset=first)
    run = np.frombuffer(mapped, "u1")[tensor.begin - first :]
    strides = tuple(stride * item_bytes for stride in tensor.strides)
    shaped: Any = np.ndarray(tensor.shape, unit, run, 0, strides)
    return shaped[(*map(slice, box.offsets, box.ends), ...)]
