"""Which parts of a file are in memory already, so that a read of them needs no disk."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Final

_PAGE_BYTES: Final = mmap.PAGESIZE

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
            pages = min(_LOOK_PAGES, -(-(end - first) // _PAGE_BYTES))
            if mincore(self._address + first, min(pages * _PAGE_BYTES, end - first), found) != 0:
                return True
            looked += pages
            held += found.raw[:pages].translate(_LOWEST_BITS).count(1)
        return 2 * held >= looked
