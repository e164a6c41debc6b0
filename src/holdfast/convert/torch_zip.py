"""The archive that `torch.save` makes: a zip of a pickle and the bytes of each storage, written as the bytes come."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from holdfast.convert.output_files import NewFile

ALIGNMENT_BYTES: Final = 64
"""Where torch has records begin, so that it can map them into memory."""

_LIMIT: Final = 0xFFFFFFFF
_VERSION: Final = 45
_LOCAL: Final = struct.Struct("<4sHHHHHLLLHH")
_CENTRAL: Final = struct.Struct("<4sHHHHHHLLLHHHHHLL")
_DATE: Final = 0x21  # The first day that a zip can name: the same input gives the same archive.


class _Record(msgspec.Struct, frozen=True):
    name: bytes
    checksum: int
    size_bytes: int
    offset_bytes: int


class ArchiveWriter:
    """Writes one archive behind what a file holds already."""

    def __init__(self, file: NewFile, name: str) -> None:
        """Writes nothing yet.

        Args:
            file: Where to write.
            name: What all names in the archive begin with.
        """
        self._file = file
        self._name = name
        self._begin = file.size_bytes
        self._records: list[_Record] = []

    def begin(self, pickle: bytes) -> None:
        """**Blocks.** Writes what comes before the storages."""
        self.add("data.pkl", len(pickle), [pickle])
        self.add("byteorder", 6, [b"little"])

    def add(self, name: str, size_bytes: int, pieces: Iterable[bytes | memoryview]) -> None:
        """**Blocks.** Writes one record.

        Args:
            name: Its name.
            size_bytes: How much the pieces are together.
            pieces: Its bytes.
        """
        encoded = f"{self._name}/{name}".encode()
        offset_bytes = self._file.size_bytes - self._begin
        large = struct.pack("<HHQQ", 1, 16, size_bytes, size_bytes) if size_bytes >= _LIMIT else b""
        at = self._file.size_bytes - self._begin + _LOCAL.size + len(encoded) + len(large) + 4
        # Room that says it is none of the fields that readers know, as torch itself does it.
        padding = -at % ALIGNMENT_BYTES
        extra = large + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        short = min(size_bytes, _LIMIT)
        header_at = self._file.size_bytes
        self._file.write(
            _LOCAL.pack(b"PK\x03\x04", _VERSION, 0, 0, 0, _DATE, 0, short, short, len(encoded), len(extra))
            + encoded
            + extra
        )
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
            self._file.write(piece)
        self._file.patch(header_at + 14, struct.pack("<L", checksum))
        self._records.append(_Record(encoded, checksum, size_bytes, offset_bytes))

    def finish(self) -> None:
        """**Blocks.** Writes the directory of the archive, with which it is whole."""
        self.add("version", 2, [b"3\n"])
        begin = self._file.size_bytes - self._begin
        for record in self._records:
            self._file.write(_central(record))
        size = self._file.size_bytes - self._begin - begin
        count = len(self._records)
        end = begin + size
        if count > 0xFFFE or end > _LIMIT:
            self._file.write(struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin))
            self._file.write(struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1))
        short = min(count, 0xFFFF)
        self._file.write(
            struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, short, short, min(size, _LIMIT), min(begin, _LIMIT), 0)
        )


def _central(record: _Record) -> bytes:
    large = [value for value in (record.size_bytes,) * 2 if value >= _LIMIT]
    if record.offset_bytes >= _LIMIT:
        large.append(record.offset_bytes)
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    size, offset = min(record.size_bytes, _LIMIT), min(record.offset_bytes, _LIMIT)
    return (
        _CENTRAL.pack(
            *(b"PK\x01\x02", _VERSION, _VERSION, 0, 0, 0, _DATE, record.checksum, size, size),
            *(len(record.name), len(extra), 0, 0, 0, 0, offset),
        )
        + record.name
        + extra
    )


def take(pieces: Iterator[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """The next pieces, as many as make up a size."""
    while size_bytes:
        piece = next(pieces)
        size_bytes -= len(piece)
        yield piece
