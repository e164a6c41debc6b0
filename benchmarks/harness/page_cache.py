"""Puts the bytes of files into the page cache, drops them from it, and counts those on the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_READ_BYTES = 8 << 20


def drop(directory: Path) -> float:
    """Drops the bytes of all files below a directory from the page cache, once they are on the disk.

    Returns:
        The share of them that is still there, from 0 to 1.
    """
    pages = resident = 0
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            file_pages, file_resident = _count_pages(descriptor)
        finally:
            os.close(descriptor)
        pages += file_pages
        resident += file_resident
    return resident / pages if pages else 0.0


def fill(directory: Path) -> None:
    """Reads all files below a directory through the page cache."""
    scratch = bytearray(_READ_BYTES)
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def count_bytes(directory: Path) -> int:
    """The bytes of all files below a directory on the disk, once they are there; one of several names counts once."""
    blocks = {}
    for path in _files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _count_pages(descriptor: int) -> tuple[int, int]:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes == 0:
        return 0, 0
    pages = -(-size_bytes // mmap.PAGESIZE)
    # Private, so that Python lets us have its address; nothing is written to it, so it shows the file's own pages.
    with mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        first = ctypes.c_char.from_buffer(view)
        states = (ctypes.c_ubyte * pages)()
        try:
            status = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size_bytes), states
            )
        finally:
            del first
        if status != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    return pages, sum(state & 1 for state in states)
