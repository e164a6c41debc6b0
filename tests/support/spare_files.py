"""Files of known bytes, and the file in whose room the next one is written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import preloaded
from holdfast.format.names import SPARE_NAME
from holdfast.storage import LocalStorage
from holdfast.storage.local.recycle import try_keep
from patience import read_line
from places import PROGRAMS

MIB = 1 << 20
FS_IOC_GETVERSION = 0x80087601


def pattern(number: int, size_bytes: int) -> bytes:
    return (number.to_bytes(8, "little") * (size_bytes // 8 + 1))[:size_bytes]


def lay(storage: LocalStorage, path: str, number: int, size_bytes: int) -> Path:
    """A whole file of its own directory."""
    writer = storage.create(path, size_bytes)
    writer.write_at(0, memoryview(pattern(number, size_bytes)))
    writer.finish()
    return Path(storage.url) / path


def lay_over(storage: LocalStorage, path: str, number: int, size_bytes: int) -> Path:
    """The same, in the room of the spare if that can be had."""
    writer = storage.create(path, size_bytes)
    try:
        half = size_bytes // 2
        content = memoryview(pattern(number, size_bytes))
        writer.write_at(half, content[half:])
        writer.write_at(0, content[:half])
        writer.finish()
    finally:
        writer.abandon()
    return Path(storage.url) / path


def identity(path: Path) -> tuple[int, int]:
    """Which file it is; a file system soon gives the number alone to another one."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.fstat(descriptor).st_ino, int.from_bytes(ioctl(descriptor, FS_IOC_GETVERSION, bytes(8)), "little")
    finally:
        os.close(descriptor)


def can_reuse(directory: Path) -> bool:
    storage = LocalStorage(directory / "trial")
    lay(storage, "a/data", 1, MIB)
    return try_keep(storage.location, "a/data", MIB)


def spare_of(storage: LocalStorage) -> Path:
    return Path(storage.url) / SPARE_NAME


@contextmanager
def reader_of(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file open, or mapped, while the body runs."""
    command: list[str | Path] = [sys.executable, PROGRAMS / "file_readers.py", how, path]
    with preloaded.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert read_line(reader) == "ready\n"
        try:
            yield reader
        finally:
            reader.kill()
