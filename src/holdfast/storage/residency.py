"""Which parts of a file are in memory already, so that a read of them needs no disk."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

_PAGE_BYTES: Final = mmap.PAGESIZE

_LOOKS: Final = 4
_LOOK_PAGES: Final = 16

_LOWEST_BITS: Final = bytes(byte & 1 for byte in range(256))
"""Of each byte that the kernel gives, only the lowest bit is defined."""


class Residency:
    """Tells of ranges of one open file whether the page cache holds them.

    It asks the kernel anew for each range, without reading anything. Where that is not possible, every range counts as
    held, and is read through the page cache as usual.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Maps the file; a mapping costs nothing until it is touched, and nobody touches it."""
        self._mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None) if size_bytes else None
        self._map: mmap.mmap | None = None
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
        """**Thread-safe.** True if the page cache seems to hold at least half of the range, which is not empty.

        Of a long range a few places are looked at: to ask for every page takes a tenth of the time in which cached ones
        are read.
        """
        if self._map is None or self._mincore is None:
            return True
        first = begin // _PAGE_BYTES
        pages = -(-end // _PAGE_BYTES) - first
        stride = max(pages // _LOOKS, _LOOK_PAGES)
        looked = held = 0
        found = ctypes.create_string_buffer(_LOOK_PAGES)
        for page in range(first, first + pages, stride):
            count = min(_LOOK_PAGES, first + pages - page)
            length_bytes = min(count * _PAGE_BYTES, len(self._map) - page * _PAGE_BYTES)
            if self._mincore(self._address + page * _PAGE_BYTES, length_bytes, found) != 0:
                return True
            looked += count
            held += found.raw[:count].translate(_LOWEST_BITS).count(1)
        return 2 * held >= looked
