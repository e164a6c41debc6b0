"""Files of other programs, of which few are open at a time, and the positions of the arrays in them."""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from holdfast.convert.leaf_stream import StoredLeaf
from holdfast.errors import FormatError
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.scalars import is_text
from holdfast.format.shapes import Box, byte_ranges, intersect, shift, split_range, strides_of, whole_box
from holdfast.storage.checks import as_storage_errors

_WINDOW_BYTES: Final = 32 << 20
_OPEN_FILES: Final = 64
_COPY: Final = "Pipes and devices cannot be read at random offsets: copy the content into a file first."


class InputFile:
    """A file that is read piece by piece. It is open while it is read, and as long as few others are."""

    def __init__(self, path: Path, pool: FilePool | None = None, *, follow_links: bool = True) -> None:
        """**Blocks.** Opens it.

        Raises:
            NotFoundError: If it does not exist.
            FormatError: If it is not a regular file.
            StorageError: If it cannot be read.
        """
        self.path = path
        self._pool = pool
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        self._descriptor = -1
        self._identity: tuple[int, int, int] | None = None
        self.size_bytes = 0
        self.fileno()

    def fileno(self) -> int:
        """**Blocks.** Returns the file's descriptor, which is valid until another file is read.

        Raises:
            FormatError: If it is not a regular file, or was replaced.
            StorageError: If it cannot be opened.
        """
        if self._descriptor < 0:
            with as_storage_errors("read", "", self.path):
                self._descriptor = os.open(self.path, self._flags)
                status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                self.close()
                raise FormatError(f"{self.path} is not a regular file", path=str(self.path), hint=_COPY)
            identity = (status.st_dev, status.st_ino, status.st_size)
            if self._identity not in (None, identity):
                raise FormatError(f"{self.path} changed while it was being read", path=str(self.path))
            self._identity = identity
            self.size_bytes = status.st_size
        if self._pool is not None:
            self._pool.use(self)
        return self._descriptor

    def read_into(self, offset_bytes: int, into: memoryview) -> None:
        """**Blocks.** Fills memory from the file.

        Raises:
            FormatError: If the file ends before that.
            StorageError: If it cannot be read.
        """
        left = into
        with as_storage_errors("read", "", self.path):
            while left:
                count = os.preadv(self.fileno(), [left], offset_bytes)
                if not count:
                    raise FormatError(f"{self.path} is cut short: it ends at byte {offset_bytes}", path=str(self.path))
                offset_bytes += count
                left = left[count:]

    def read(self, offset_bytes: int, size_bytes: int) -> bytes:
        """**Blocks.** Returns some bytes of the file; the caller limits their number.

        Raises:
            FormatError: If the file ends before that.
            StorageError: If it cannot be read.
        """
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self.size_bytes:
            raise FormatError(
                f"{self.path}: bytes {offset_bytes} to {offset_bytes + size_bytes} were requested, but the file "
                f"has {self.size_bytes}",
                path=str(self.path),
            )
        data = bytearray(size_bytes)
        self.read_into(offset_bytes, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Closes the file until it is read again; may be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class FilePool:
    """All files of one import. It keeps the few that were used last open."""

    def __init__(self) -> None:
        self._files: dict[Path, InputFile] = {}
        self._open: OrderedDict[Path, InputFile] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """The size of all its files together."""
        return sum(file.size_bytes for file in self._files.values())

    def find(self, path: Path, *, follow_links: bool) -> InputFile:
        """**Blocks.** Returns the file at a path; like `InputFile`."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = InputFile(path, self, follow_links=follow_links)
        return file

    def use(self, file: InputFile) -> None:
        """Notes that a file is used, and closes the least recently used one if there are too many."""
        self._open.pop(file.path, None)
        self._open[file.path] = file
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1].close()

    def close(self) -> None:
        """Closes the files; may be repeated."""
        for file in self._files.values():
            file.close()


def is_plain_name(name: Any) -> bool:
    """**Pure.** Returns True if something is the name of a file, without a path."""
    return type(name) is str and name not in ("", ".", "..") and not {"/", "\0"} & set(name) and is_text(name)


class ArrayPart(Protocol):
    """The source of the values of an array, or of a box of it."""

    @property
    def key(self) -> Hashable:
        """Equal for parts that are the same elements of the same bytes."""

    @property
    def strides(self) -> tuple[int, ...]:
        """For each dimension, the distance in elements from one to the next."""

    @property
    def is_contiguous(self) -> bool:
        """True if its elements are in row-major order without gaps, so that `read_run` works."""

    def read_run(self, box: Box, into: memoryview) -> None:
        """**Blocks.** Reads a box that is one run of elements."""

    def values(self, box: Box) -> Any:
        """**Blocks.** Returns the elements of a box as a NumPy array of raw bytes, of the box's shape."""


class SourceTensor(msgspec.Struct, frozen=True):
    """A tensor in a file, as torch describes one: some elements of a run of bytes.

    Attributes:
        file: The file.
        begin: The offset of its first element, in bytes.
        dtype: The element type.
        shape: The length of each dimension.
        strides: For each dimension, the distance in elements from one to the next.
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
        """True if its elements are in row-major order without gaps."""
        plain = strides_of(self.shape, 1)
        return 0 in self.shape or all(
            length == 1 or stride == expected
            for length, stride, expected in zip(self.shape, self.strides, plain, strict=True)
        )

    @property
    def reach(self) -> int:
        """How many elements of its storage there are from its first to its last, inclusive."""
        if 0 in self.shape:
            return 0
        return 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))

    def read_run(self, box: Box, into: memoryview) -> None:
        """**Blocks.** Reads a box that is one run of bytes, as in a contiguous tensor."""
        (first, _), *_ = byte_ranges(self.shape, box, ITEM_BYTES[self.dtype])
        self.file.read_into(self.begin + first, into)

    def values(self, box: Box) -> Any:
        """**Blocks.** Returns the elements of a box as a NumPy array of raw bytes, of the box's shape."""
        import numpy as np

        item_bytes = ITEM_BYTES[self.dtype]
        unit = f"V{item_bytes}"
        if self.is_contiguous:
            data = bytearray(math.prod(box.shape) * item_bytes)
            self.read_run(box, memoryview(data))
            return np.frombuffer(data, unit).reshape(box.shape)
        # Its elements are not contiguous: only the pages with elements of the box are read.
        first = self.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.begin - first + self.reach * item_bytes
        mapped = mmap.mmap(self.file.fileno(), length, access=mmap.ACCESS_READ, offset=first)
        run = np.frombuffer(mapped, "u1")[self.begin - first :]
        strides = tuple(stride * item_bytes for stride in self.strides)
        shaped: Any = np.ndarray(self.shape, unit, run, 0, strides)
        return shaped[(*map(slice, box.offsets, box.ends), ...)]


class Chunk(msgspec.Struct, frozen=True):
    """A box of an array."""

    box: Box
    tensor: ArrayPart


class InputArray(StoredLeaf, frozen=True):
    """An array to import, which becomes a leaf of a step.

    Attributes:
        chunks: The parts that cover it exactly.
        library: The library whose array a job gets if it has none at that path.
    """

    chunks: tuple[Chunk, ...]
    library: str = "torch"

    @property
    def key(self) -> Hashable:
        """Equal for arrays that are one in the files; None for one without elements."""
        return tuple((chunk.box, chunk.tensor.key) for chunk in self.chunks) if self.size_bytes else None


def whole_array(tensor: SourceTensor) -> InputArray:
    """**Pure.** Returns an array that is one tensor."""
    return InputArray(tensor.dtype, tensor.shape, (Chunk(whole_box(tensor.shape), tensor),))


def read_spans(array: InputArray, span_bytes: int) -> Iterator[memoryview]:
    """**Blocks.** Yields the bytes of an array in row-major order, in spans of equal length except the last.

    Each is valid until the next one is requested. At most a window is in memory, apart from what the system caches of a
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
    """Assembles a box of an array that is a run of its elements."""
    import numpy as np

    goal: Any = None
    for chunk in array.chunks:
        common = intersect(chunk.box, slab)
        if common is None:
            continue
        inner = shift(common, chunk.box.offsets)
        if common == slab and chunk.tensor.is_contiguous:
            chunk.tensor.read_run(inner, into)
            continue
        if goal is None:
            goal = np.frombuffer(into, f"V{ITEM_BYTES[array.dtype]}").reshape(slab.shape)
        at = shift(common, slab.offsets)
        goal[(*map(slice, at.offsets, at.ends), ...)] = chunk.tensor.values(inner)
