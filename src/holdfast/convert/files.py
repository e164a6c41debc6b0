"""Files of other programs: read piece by piece with few of them open, and written whole or not at all.

`InputArray` describes an array in such files.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from holdfast.convert.leaf_stream import StoredLeaf
from holdfast.errors import FormatError, StorageFullError, UsageError
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.scalars import is_text
from holdfast.format.shapes import Box, byte_ranges, intersect, shift, split_range, strides_of, whole_box
from holdfast.storage.checks import as_storage_errors, find_file_above

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

    def read(self, box: Box, into: Any) -> None:
        """**Blocks.** Reads the elements of a box into a NumPy array of the box's shape, as raw bytes."""


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

    def read(self, box: Box, into: Any) -> None:
        """**Blocks.** Reads the elements of a box, which is one run of them if the tensor is contiguous."""
        import numpy as np

        item_bytes = ITEM_BYTES[self.dtype]
        if self.is_contiguous:
            run = into if into.flags.c_contiguous else np.empty_like(into, order="C")
            (first, _), *_ = byte_ranges(self.shape, box, item_bytes)
            self.file.read_into(self.begin + first, memoryview(run.reshape(-1).view(np.uint8)))
            if run is not into:
                into[...] = run
            return
        # Its elements are not contiguous: only the pages with elements of the box are read.
        first = self.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.begin - first + self.reach * item_bytes
        mapped = mmap.mmap(self.file.fileno(), length, access=mmap.ACCESS_READ, offset=first)
        elements = np.frombuffer(mapped, "u1")[self.begin - first :]
        strides = tuple(stride * item_bytes for stride in self.strides)
        shaped: Any = np.ndarray(self.shape, into.dtype, elements, 0, strides)
        into[...] = shaped[(*map(slice, box.offsets, box.ends), ...)]


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
    import numpy as np

    item_bytes = ITEM_BYTES[array.dtype]
    elements = array.size_bytes // item_bytes
    most = max(_WINDOW_BYTES // span_bytes, 1) * span_bytes // item_bytes
    window = bytearray(min(most, elements) * item_bytes)
    for begin in range(0, elements, most):
        end = min(begin + most, elements)
        filled = memoryview(window)[: (end - begin) * item_bytes]
        place = 0
        for slab in split_range(array.shape, begin, end):
            # The elements of a slab are a run of those of the array.
            goal: Any = np.frombuffer(filled, f"V{item_bytes}", slab.elements, place).reshape(slab.shape)
            for chunk in array.chunks:
                common = intersect(chunk.box, slab)
                if common is not None:
                    at = shift(common, slab.offsets)
                    into = goal[(*map(slice, at.offsets, at.ends), ...)]
                    chunk.tensor.read(shift(common, chunk.box.offsets), into)
            place += slab.elements * item_bytes
        for first in range(0, len(filled), span_bytes):
            yield filled[first : first + span_bytes]


_OVERWRITE: Final = "Choose another path, or pass overwrite=True."


class OutputFiles:
    """New files in a hidden directory, until they are moved to their names.

    A crash leaves that directory, whose name begins with `.` and ends with `.tmp`, and only whole files under final
    names.
    """

    def __init__(self, out: Path, staging: Path) -> None:
        self._out = out
        self._staging = staging

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """**Blocks.** Opens a new file; after the body, its bytes are durable.

        Raises:
            StorageError: If the storage fails.
        """
        with as_storage_errors("write", name, self._out):
            with (self._staging / name).open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())

    def publish_file(self, name: str, *, overwrite: bool) -> None:
        """**Blocks.** Gives the one file its name, which is that of the output.

        Raises:
            UsageError: If the path exists by now.
            StorageError: If the storage fails.
        """
        with as_storage_errors("write", "", self._out):
            if overwrite:
                (self._staging / name).replace(self._out)
            else:
                try:
                    os.link(self._staging / name, self._out)
                except FileExistsError:
                    raise UsageError(f"{self._out} already exists", hint=_OVERWRITE) from None
            _sync_directory(self._out.parent)

    def publish_files(self, last: str, is_ours: Callable[[str], bool]) -> None:
        """**Blocks.** Moves all files into the directory of that name.

        A new directory appears at once, with all of them. In an existing one, each file appears whole; the one without
        which the others mean nothing is removed first and added last. Existing files whose names are not `is_ours`
        stay.

        Raises:
            StorageError: If the storage fails.
        """
        with as_storage_errors("write", "", self._out):
            _sync_directory(self._staging)
            if self._staging.parent != self._out:
                self._staging.rename(self._out)
                _sync_directory(self._out.parent)
                return
            old = [entry.name for entry in os.scandir(self._out) if is_ours(entry.name) and entry.is_file()]
            for name in sorted(old, key=lambda name: name != last):
                (self._out / name).unlink()
                if name == last:
                    _sync_directory(self._out)
            names = sorted((entry.name for entry in os.scandir(self._staging)), key=lambda name: name == last)
            for name in names:
                (self._staging / name).rename(self._out / name)
            _sync_directory(self._out)


@contextmanager
def open_output_file(out: Path, size_bytes: int, *, overwrite: bool) -> Iterator[OutputFiles]:
    """**Blocks.** Prepares one file, which the body publishes; however the body ends, nothing else stays.

    Raises:
        UsageError: If the path exists and must not be overwritten.
        StorageFullError: If there is clearly no space.
        StorageError: If the storage fails.
    """
    if os.path.lexists(out) and (not overwrite or not out.is_file()):
        what = "already exists" if out.is_file() else "already exists and is not a file"
        raise UsageError(f"{out} {what}", hint=_OVERWRITE)
    with _staging(out, out.parent, size_bytes) as staging:
        yield OutputFiles(out, staging)


@contextmanager
def open_output_directory(
    out: Path, size_bytes: int, is_ours: Callable[[str], bool], *, overwrite: bool
) -> Iterator[OutputFiles]:
    """**Blocks.** Like `open_output_file`, for several files in one directory.

    Existing files whose names are not `is_ours` stay.

    Raises:
        UsageError: If a file exists and must not be overwritten.
        StorageFullError: If there is clearly no space.
        StorageError: If the storage fails.
    """
    is_there = out.is_dir()
    if os.path.lexists(out) and not is_there:
        raise UsageError(f"{out} already exists and is not a directory", hint="Choose another path.")
    if is_there:
        with as_storage_errors("read", "", out):
            old = sorted(entry.name for entry in os.scandir(out) if is_ours(entry.name))
        if old and not overwrite:
            more = f" and {len(old) - 2} more files" if len(old) > 2 else ""
            raise UsageError(f"{out} already contains {', '.join(old[:2])}{more}", hint=_OVERWRITE)
    with _staging(out, out if is_there else out.parent, size_bytes) as staging:
        yield OutputFiles(out, staging)


@contextmanager
def _staging(out: Path, parent: Path, size_bytes: int) -> Iterator[Path]:
    with as_storage_errors("write", "", parent):
        if out.parent != Path() and not out.parent.is_dir():
            file = find_file_above(out)
            if file is not None:
                raise UsageError(f"{out} cannot be created: {file} is not a directory", hint="Check the path.")
            raise UsageError(f"the directory {out.parent} does not exist", hint="Create it first, or check the path.")
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < size_bytes:
            raise StorageFullError(
                f"{out} needs {size_bytes} bytes, but only {free_bytes} are free there",
                path=str(out),
                hint="Free some space, or choose a path on another disk.",
            )
        staging = parent / f".{out.name}.{secrets.token_hex(4)}.tmp"
        staging.mkdir()
    try:
        yield staging
    finally:
        with suppress(OSError):
            shutil.rmtree(staging)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
