"""Reads and writes that pass by the page cache: whether a file can have them, and which reads are the better for it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Final

from holdfast.format.index import ALIGNMENT_BYTES
from holdfast.storage.buffers import address_of

PAGE_BYTES: Final = ALIGNMENT_BYTES
"""Offset, length and memory address of a direct write are multiples of this."""

SMALLEST_DIRECT_BYTES: Final = 1 << 20
"""A smaller file is written through the page cache: one fsync then costs as much as the writes would save."""

_ALLOCATE_TRIES: Final = 3
_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`, whatever the file system's own is."""
_NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})


def round_down(size_bytes: int) -> int:
    """**Pure.** The multiple of a page before."""
    return size_bytes // PAGE_BYTES * PAGE_BYTES


def preallocate(descriptor: int, size_bytes: int) -> None:
    """Gives a file its size, and room on the disk where the file system can. `OSError` goes through.

    A file that has room already, and no more than that size, keeps it.

    Measured on ext4 (8 MiB direct writes from two threads, fsync counted, medians): with fallocate 2.1 GB/s; with a
    bare size, or with no preparation, 2.0; with room but no size, 1.9. Turning unwritten extents into written ones
    costs nothing that can be seen at that size of writes, and allocating 768 MiB takes 2 ms. What decides is that a
    full disk is noticed here rather than after minutes of writing, and that a write within the file's size shares the
    inode's lock where one that makes the file grow does not.

    posix_fallocate is not used: where the file system cannot allocate, the C library writes into each block instead.
    """
    status = os.fstatvfs(descriptor)
    # Asked first, since the call would take all the room there is from others before it fails. Some network file
    # systems say zero for everything.
    own_bytes = os.fstat(descriptor).st_blocks * _BLOCK_BYTES
    if status.f_blocks and status.f_bfree * status.f_frsize + own_bytes < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if not _try_fallocate(descriptor, size_bytes):
        os.ftruncate(descriptor, size_bytes)


def try_direct(descriptor: int) -> bool:
    """Turns direct writes on for a new file of more than two pages, all of which is yet to be written.

    The flag is set on an open file, since `open` with it may fail and yet leave the file behind. Some file systems
    take the flag and refuse the writes, or ask for more than whole pages; so one page is written, at an offset and
    from an address that are multiples of one page and no more. What this lets through lets all pages through.
    `OSError` other than a refusal goes through.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl

    plain = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, plain | flag)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return False
        raise
    pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
    first = 0 if address_of(pages) % (2 * PAGE_BYTES) else PAGE_BYTES
    try:
        if os.pwrite(descriptor, pages[first : first + PAGE_BYTES], PAGE_BYTES) == PAGE_BYTES:
            return True
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, plain)
    return False


def try_direct_reads(descriptor: int) -> int | None:
    """A second descriptor of an open file, whose reads pass by the page cache; None where that cannot be had.

    One page is read to make sure, since some file systems take the flag and refuse the reads.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    second = -1
    try:
        # By way of /proc the very file that is open is opened again, whatever lies at its path by now.
        second = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | flag)
        pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        first = 0 if address_of(pages) % (2 * PAGE_BYTES) else PAGE_BYTES
        if os.preadv(second, [pages[first : first + PAGE_BYTES]], PAGE_BYTES) == PAGE_BYTES:
            return second
    except BaseException as error:
        # Also where Ctrl-C ends the read, which may have to wait for the disk.
        if second >= 0:
            os.close(second)
        if not isinstance(error, OSError):
            raise
        return None
    os.close(second)
    return None


def write_pages(descriptor: int, pages: memoryview, offset_bytes: int) -> None:
    """**Blocks.** Writes whole pages directly, however many calls that takes. `OSError` goes through."""
    while pages.nbytes:
        # A write that was cut short inside a page is taken up again from that page's beginning.
        written = round_down(os.pwrite(descriptor, pages, offset_bytes))
        if written == 0:
            raise OSError(errno.EIO, "less than a page was written")
        pages = pages[written:]
        offset_bytes += written


def _try_fallocate(descriptor: int, size_bytes: int) -> bool:
    """False where the system or the file system has no such call."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    for _ in range(_ALLOCATE_TRIES):
        if fallocate(descriptor, 0, 0, size_bytes) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NOT_SUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    # Some file systems begin anew after a signal, and a profiler's timer would never let them end.
    return False


_REGION_BYTES: Final = 32 << 20
_LOOKS: Final = 8
_LOOK_PAGES: Final = 8

_LOWEST_BITS: Final = bytes(byte & 1 for byte in range(256))
"""Of each byte that the kernel gives, only the lowest bit is defined."""


class Residency:
    """Tells of ranges of one open file whether the page cache holds them; `close` lets go of the file.

    It asks the kernel once for each region of the file, without reading anything. Where that is not possible, or once
    it is closed, every range counts as held, and is read through the page cache as usual.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Maps the file; a mapping costs nothing until it is touched, and nobody touches it. It keeps the file open."""
        self._mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None) if size_bytes else None
        self._map: mmap.mmap | None = None
        self._size_bytes = size_bytes
        # What was found out, by the region's number. Should two threads ask at once, both find out.
        self._regions: dict[int, bool] = {}
        if self._mincore is None:
            return
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        try:
            # The mapping must be writable for its address to be told, and private so that nothing could be written.
            self._map = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError):
            return
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def holds(self, begin: int, end: int) -> bool:
        """**Thread-safe.** True if the page cache seems to hold most of what lies around the middle of a range."""
        if self._map is None or self._mincore is None:
            return True
        region = (begin + end) // 2 // _REGION_BYTES
        held = self._regions.get(region)
        if held is None:
            held = self._regions[region] = self._look(self._mincore, region * _REGION_BYTES)
        return held

    def close(self) -> None:
        """**Thread-safe.** Ends the mapping; harmless twice.

        A thread that asks the kernel meanwhile is told of no mapping, or of another one: then it reads the other way.
        """
        mapped, self._map = self._map, None
        if mapped is not None:
            mapped.close()

    def _look(self, mincore: Callable[..., int], begin: int) -> bool:
        """Looks at places of a region. To ask for every page takes a tenth of the time in which they are read."""
        end = min(begin + _REGION_BYTES, self._size_bytes)
        looked = held = 0
        found = ctypes.create_string_buffer(_LOOK_PAGES)
        for first in range(begin, end, _REGION_BYTES // _LOOKS):
            pages = min(_LOOK_PAGES, -(-(end - first) // mmap.PAGESIZE))
            if mincore(self._address + first, min(pages * mmap.PAGESIZE, end - first), found) != 0:
                return True
            looked += pages
            held += found.raw[:pages].translate(_LOWEST_BITS).count(1)
        return 2 * held >= looked
