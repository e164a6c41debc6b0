"""The archives of `torch.save`: a zip of a pickle and the bytes of each storage, uncompressed."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from typing import BinaryIO, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import msgspec

from holdfast.convert.files import InputFile
from holdfast.errors import FormatError

MAX_DIRECTORY_BYTES: Final = 128 << 20
"""The largest directory of an archive that is read. Each of its records takes 46 bytes and its name."""

ALIGNMENT_BYTES: Final = 64
"""Where torch lets records begin, so that it can map them into memory."""

_LARGE_BYTES: Final = 1 << 30
"""From this size on, a record's size is in 64-bit fields. `zipfile` does that by itself from about 2 GiB on."""

_LOCAL: Final = struct.Struct("<4s22xHH")
"""The header before a record's bytes: a mark, and the lengths of its name and of its extra fields."""

_LARGE_FIELD_BYTES: Final = 20
_VERSION: Final = 45
_END_BYTES: Final = 22


class Record(msgspec.Struct, frozen=True):
    """The position of an archive's record, in the file that contains the archive."""

    offset_bytes: int
    size_bytes: int


def write_archive(
    file: BinaryIO, pickle: bytes, storages: Iterable[tuple[str, int, Iterable[bytes | memoryview]]]
) -> None:
    """**Blocks.** Writes one archive at the end of a file. A storage is its name, its size, and its bytes in pieces."""
    part = _WrittenPart(file)
    with ZipFile(part, "w", ZIP_STORED) as archive:
        _add(archive, part, "data.pkl", len(pickle), [pickle])
        _add(archive, part, "byteorder", 6, [b"little"])
        for name, size_bytes, pieces in storages:
            _add(archive, part, f"data/{name}", size_bytes, pieces)
        _add(archive, part, "version", 2, [b"3\n"])


def _add(
    archive: ZipFile, part: _WrittenPart, name: str, size_bytes: int, pieces: Iterable[bytes | memoryview]
) -> None:
    info = ZipInfo(f"archive/{name}")  # Of the first day that a zip can name: the same input gives the same archive.
    info.create_system, info.create_version, info.extract_version = 0, _VERSION, _VERSION
    is_large = size_bytes >= _LARGE_BYTES
    begin = part.tell() + _LOCAL.size + len(info.filename) + 4 + _LARGE_FIELD_BYTES * is_large
    # Room that says it is none of the fields that readers know, as torch itself does it.
    padding = -begin % ALIGNMENT_BYTES
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=is_large) as record:
        for piece in pieces:
            record.write(piece)
    # The directory, which is written at the end, needs no room.
    info.extra, info.external_attr = b"", 0


class ArchiveReader:
    """Finds the records of an archive. Only its directory is in memory."""

    def __init__(self, file: InputFile, begin: int, size_bytes: int) -> None:
        """**Blocks.** Reads the directory.

        Raises:
            FormatError: If it is not such an archive.
            StorageError: If the file cannot be read.
        """
        self._file = file
        self._begin = begin
        self._end = begin + size_bytes
        self._records: dict[str, ZipInfo | Record] = {}
        try:
            if size_bytes < _END_BYTES or self._end > file.size_bytes:
                raise ValueError("it is too short")
            records = ZipFile(_ReadPart(file, begin, size_bytes)).infolist()
            (count,) = struct.unpack("<H", file.read(self._end - _END_BYTES + 10, 2))
            if count not in (len(records), 0xFFFF):
                raise ValueError(f"its directory should have {count} records, but has {len(records)}")
            for record in records:
                # All records are in one folder, which torch names after the file.
                name = record.filename.partition("/")[2]
                if name in self._records:
                    raise ValueError(f"{name!r} appears twice")
                self._records[name] = record
        except (ValueError, OSError, BadZipFile, NotImplementedError, struct.error) as error:
            raise self._malformed(error) from error

    def find(self, name: str) -> Record | None:
        """**Blocks.** Returns the position of a record; None if there is none of that name.

        Its name is without the folder that contains all records.

        Raises:
            FormatError: If it is compressed, or outside of the archive.
            StorageError: If the file cannot be read.
        """
        record = self._records.get(name)
        if isinstance(record, ZipInfo):
            record = self._records[name] = self._locate(name, record)
        return record

    def _locate(self, name: str, info: ZipInfo) -> Record:
        if info.compress_type != ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
            raise self._malformed(f"{name!r} is compressed or encrypted, which torch.save never does")
        # What comes before a record's bytes may be longer than the directory says.
        header_at = self._begin + info.header_offset
        if self._begin <= header_at <= self._end - _LOCAL.size:
            mark, name_bytes, extra_bytes = _LOCAL.unpack(self._file.read(header_at, _LOCAL.size))
            first = header_at + _LOCAL.size + name_bytes + extra_bytes
            if mark == b"PK\x03\x04" and first + info.file_size <= self._end:
                return Record(first, info.file_size)
        raise self._malformed(f"{name!r} is outside of the file")

    def _malformed(self, what: object) -> FormatError:
        path = str(self._file.path)
        return FormatError(f"{path}: not a file that torch.save wrote: {what}", path=path)


class _WrittenPart:
    """The end of a file, as `zipfile` writes it: positions count from there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begin = file.tell()

    def tell(self) -> int:
        return self._file.tell() - self._begin

    def seek(self, offset_bytes: int) -> int:
        return self._file.seek(self._begin + offset_bytes) - self._begin

    def write(self, data: bytes) -> int:
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Does nothing: the file belongs to the caller."""


class _ReadPart:
    """A part of a file, as `zipfile` reads it. A read returns at most the size of a directory."""

    def __init__(self, file: InputFile, begin: int, size_bytes: int) -> None:
        self._file = file
        self._begin = begin
        self._size_bytes = size_bytes
        self._place = 0

    def tell(self) -> int:
        return self._place

    def seek(self, offset_bytes: int, whence: int = os.SEEK_SET) -> int:
        place = offset_bytes + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size_bytes}[whence]
        if place < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._place = place
        return place

    def read(self, size_bytes: int | None = None) -> bytes:
        left = max(self._size_bytes - self._place, 0)
        size_bytes = left if size_bytes is None or size_bytes < 0 else min(size_bytes, left)
        if size_bytes > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size_bytes} bytes; the limit is {MAX_DIRECTORY_BYTES}")
        data = self._file.read(self._begin + self._place, size_bytes)
        self._place += size_bytes
        return data
