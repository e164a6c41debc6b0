"""Reads and writes that bypass the page cache: whether a file supports them, and which reads benefit."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Final

from holdfast.format.index import ALIGNMENT_BYTES
from holdfast.storage.buffers import address_of
from holdfast.storage.local.files import NOT_SUPPORTED

PAGE_BYTES: Final = ALIGNMENT_BYTES
"""Offset, length and memory address of a direct write are multiples of this."""

SMALLEST_DIRECT_BYTES: Final = 1 << 20
"""A smaller file is written through the page cache: one fsync then costs as much as the writes would save."""


def round_down(size_bytes: int) -> int:
    """**Pure.** Rounds down to a multiple of a page."""
    return size_bytes // PAGE_BYTES * PAGE_BYTES


def try_direct(descriptor: int) -> bool:
    """Turns direct writes on for a new file of more than two pages, all of which is yet to be written.

    The flag is set on an open file, because `open` with it may fail and yet create the file. Some file systems accept
    the flag and refuse the writes, or require more than whole pages; so one page is written, at an offset and from an
    address that are multiples of one page and no more. If that works, all pages do. Other `OSError`s are not handled.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    import fcntl

    plain = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, plain | flag)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:
            return False
        raise
    pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
    first = 0 if address_of(pages) % (2 * PAGE_BYTES) else PAGE_BYTES
    try:
        if os.pwrite(descriptor, pages[first : first + PAGE_BYTES], PAGE_BYTES) == PAGE_BYTES:
            return True
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, plain)
    return False


def try_direct_reads(descriptor: int) -> int | None:
    """Returns a second descriptor of an open file, whose reads bypass the page cache; None if that is not supported.

    One page is read to check, because some file systems accept the flag and refuse the reads.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return None
    second = -1
    try:
        # Through /proc the same open file is opened again, even if its path now leads to another one.
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
    """**Blocks.** Writes whole pages directly, with as many calls as needed. `OSError` is not handled."""
    while pages.nbytes:
        # A write that was cut short inside a page is taken up again from that page's beginning.
        written = round_down(os.pwrite(descriptor, pages, offset_bytes))
        if written == 0:
            raise OSError(errno.EIO, "less than a page was written")
        pages = pages[written:]
        offset_bytes += written


_REGION_BYTES: Final = 32 << 20
_LOOKS: Final = 8
_LOOK_PAGES: Final = 8

_LOWEST_BITS: Final = bytes(byte & 1 for byte in range(256))
"""Of each byte that the kernel returns, only the lowest bit is defined."""


class Residency:
    """Tells whether the page cache holds ranges of one open file; `close` releases the file.

    It asks the kernel once for each region of the file, without reading anything. If that is not possible, or it is
    closed, every range counts as cached, and is read through the page cache as usual.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Maps the file; a mapping costs nothing until it is touched, and it never is. It keeps the file open."""
        self._mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None) if size_bytes else None
        self._map: mmap.mmap | None = None
        self._size_bytes = size_bytes
        # What was found out, by the region's number. Should two threads ask at once, both find out.
        self._regions: dict[int, bool] = {}
        if self._mincore is None:
            return
        self._mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
        try:
            # The mapping must be writable to give its address, and private so that nothing could be written.
            self._map = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError):
            return
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def holds(self, begin: int, end: int) -> bool:
        """**Thread-safe.** Returns True if the page cache seems to hold most of the middle of a range."""
        if self._map is None or self._mincore is None:
            return True
        region = (begin + end) // 2 // _REGION_BYTES
        held = self._regions.get(region)
        if held is None:
            held = self._regions[region] = self._look(self._mincore, region * _REGION_BYTES)
        return held

    def close(self) -> None:
        """**Thread-safe.** Ends the mapping; may be repeated.

        A thread that asks the kernel meanwhile finds no mapping, or another one: then it reads the other way.
        """
        mapped, self._map = self._map, None
        if mapped is not None:
            mapped.close()

    def _look(self, mincore: Callable[..., int], begin: int) -> bool:
        """Looks at places of a region. To ask for every page takes a tenth of the time of reading them."""
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
