"""Archives of `torch.save`: what lies where in them. Only the directory and small records are read here."""

from __future__ import annotations

import os
import stat
import struct
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from holdfast.errors import FormatError
from holdfast.storage.failures import as_storage_errors

MAX_DIRECTORY_BYTES: Final = 256 << 20
_END: Final = struct.Struct("<4sHHHHLLH")
_LARGE_END: Final = struct.Struct("<4sQHHLLQQQQ")
_CENTRAL: Final = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_LOCAL: Final = struct.Struct("<4sHHHHHLLLHH")
_LIMIT: Final = 0xFFFFFFFF
_OPEN_FILES: Final = 64
_COPY: Final = "A pipe or a device cannot be read back and forth: copy what comes out of it into a file."


class SourceFile:
    """A file that something is taken from. It is open while it is read, and for as long as few others are.

    Attributes:
        path: Where it is.
        size_bytes: Its size.
    """

    def __init__(self, path: Path, pool: FilePool | None = None, *, follow_links: bool = True) -> None:
        """**Blocks.** Opens it.

        Args:
            path: Where it is.
            pool: What keeps the number of open files small, if there may be many.
            follow_links: Whether a link is followed.

        Raises:
            NotFoundError: If it is not there.
            FormatError: If it is no plain file.
            StorageError: If it cannot be read.
        """
        self.path = path
        self._pool = pool
        # To open a pipe would wait for somebody to write into it.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        self._descriptor = -1
        self._identity: tuple[int, int, int] | None = None
        self.size_bytes = 0
        self.fileno()

    def fileno(self) -> int:
        """**Blocks.** The file's descriptor, good until another file is read.

        Raises:
            FormatError: If it is no plain file, or another one lies there now.
            StorageError: If it cannot be opened.
        """
        if self._descriptor < 0:
            with as_storage_errors("read", "", self.path):
                self._descriptor = os.open(self.path, self._flags)
                status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                self.close()
                raise FormatError(f"{self.path} is no plain file", path=str(self.path), hint=_COPY)
            identity = (status.st_dev, status.st_ino, status.st_size)
            if self._identity not in (None, identity):
                raise FormatError(f"{self.path} was changed while it was being read", path=str(self.path))
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
                    raise FormatError(f"{self.path} ends at byte {offset_bytes}, too early", path=str(self.path))
                offset_bytes += count
                left = left[count:]

    def read(self, offset_bytes: int, size_bytes: int) -> bytearray:
        """**Blocks.** Some bytes of the file; the caller has made sure that they are few.

        Raises:
            FormatError: If the file ends before that.
            StorageError: If it cannot be read.
        """
        if not 0 <= offset_bytes <= offset_bytes + size_bytes <= self.size_bytes:
            raise FormatError(
                f"{self.path}: bytes {offset_bytes} to {offset_bytes + size_bytes} are asked for, of {self.size_bytes}",
                path=str(self.path),
            )
        data = bytearray(size_bytes)
        self.read_into(offset_bytes, memoryview(data))
        return data

    def close(self) -> None:
        """Gives the file back; harmless twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FilePool:
    """Keeps few of many files open: those that were used last."""

    def __init__(self) -> None:
        self._used: OrderedDict[int, SourceFile] = OrderedDict()

    def use(self, file: SourceFile) -> None:
        """Notes that a file is used, and closes the one that has not been for longest if there are too many."""
        self._used.pop(id(file), None)
        self._used[id(file)] = file
        if len(self._used) > _OPEN_FILES:
            self._used.popitem(last=False)[1].close()


class Record(msgspec.Struct, frozen=True):
    """Where a record of an archive lies, in the file that holds the archive.

    Attributes:
        offset_bytes: Its first byte.
        size_bytes: How many there are.
    """

    offset_bytes: int
    size_bytes: int


def read_directory(file: SourceFile, begin: int, size_bytes: int) -> dict[str, Record]:
    """**Blocks.** The records of an archive, by their names without the folder that all lie in.

    Args:
        file: The file.
        begin: Where the archive begins in it.
        size_bytes: How long it is.

    Raises:
        FormatError: If it is no such archive, or says what cannot be.
        StorageError: If the file cannot be read.
    """
    try:
        at, directory_bytes, count = _find_directory(file, begin, size_bytes)
        if directory_bytes > MAX_DIRECTORY_BYTES or count * _CENTRAL.size > directory_bytes:
            raise ValueError(f"a directory of {directory_bytes} bytes for {count} records")
        data = memoryview(file.read(at, directory_bytes))
        records: dict[str, Record] = {}
        place = 0
        for _ in range(count):
            name, record, place = _read_entry(file, data, place, begin, at)
            if name in records:
                raise ValueError(f"{name!r} stands twice")
            records[name] = record
    except (ValueError, struct.error) as error:
        raise FormatError(
            f"{file.path}: this is no archive that torch.save has written: {error}", path=str(file.path)
        ) from error
    return {name.partition("/")[2]: record for name, record in records.items()}


def _find_directory(file: SourceFile, begin: int, size_bytes: int) -> tuple[int, int, int]:
    """Where the directory begins in the file, how long it is, and how many records it has."""
    end = begin + size_bytes
    if size_bytes < _END.size or end > file.size_bytes:
        raise ValueError("it is too short")
    mark, _, _, _, count, length, offset, comment = _END.unpack(file.read(end - _END.size, _END.size))
    if mark != b"PK\x05\x06" or comment:
        raise ValueError("its end is not that of an archive")
    limit = end - _END.size
    if count == 0xFFFF or length == _LIMIT or offset == _LIMIT:
        locator = struct.unpack("<4sLQL", file.read(limit - 20, 20)) if size_bytes >= _END.size + 20 else (b"",)
        if locator[0] != b"PK\x06\x07" or not 0 <= locator[2] <= size_bytes - _LARGE_END.size:
            raise ValueError("its end is not that of a large archive")
        large = _LARGE_END.unpack(file.read(begin + locator[2], _LARGE_END.size))
        if large[0] != b"PK\x06\x06":
            raise ValueError("its end is not that of a large archive")
        count, length, offset = large[7], large[8], large[9]
        limit = begin + locator[2]
    if offset > limit - begin or length > limit - begin - offset:
        raise ValueError("its directory does not lie in it")
    return begin + offset, length, count


def _read_entry(file: SourceFile, data: memoryview, place: int, begin: int, limit: int) -> tuple[str, Record, int]:
    fields = _CENTRAL.unpack(data[place : place + _CENTRAL.size])
    mark, flags, method, packed, size = fields[0], fields[3], fields[4], fields[8], fields[9]
    name_bytes, extra_bytes, comment_bytes, offset = fields[10], fields[11], fields[12], fields[16]
    at = place + _CENTRAL.size
    name = str(data[at : at + name_bytes], "utf-8")
    extra = data[at + name_bytes : at + name_bytes + extra_bytes]
    size, packed, offset = _large_fields(extra, size, packed, offset)
    if mark != b"PK\x01\x02" or method or flags & 1 or size != packed:
        raise ValueError(f"{name!r} is compressed or encrypted, which torch never does")
    local_at = begin + offset
    if local_at + _LOCAL.size > limit:
        raise ValueError(f"{name!r} does not lie in it")
    local = _LOCAL.unpack(file.read(local_at, _LOCAL.size))
    first = local_at + _LOCAL.size + local[9] + local[10]
    if local[0] != b"PK\x03\x04" or first + size > limit:
        raise ValueError(f"{name!r} does not lie in it")
    return name, Record(first, size), at + name_bytes + extra_bytes + comment_bytes


def _large_fields(extra: memoryview, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """Sizes and offset, from the field for large ones where they are too large for their own."""
    while len(extra) >= 4:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == 1:
            short = (size, packed, offset)
            count = short.count(_LIMIT)
            found = iter(struct.unpack(f"<{count}Q", extra[4 : 4 + 8 * count]))
            size, packed, offset = (next(found) if value == _LIMIT else value for value in short)
            return size, packed, offset
        extra = extra[4 + length :]
    return size, packed, offset
