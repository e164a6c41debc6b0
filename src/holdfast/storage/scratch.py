"""Memory for bytes on their way, kept from one piece to the next."""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from typing import Final

from holdfast.errors import OutOfMemoryError

_HUGE_BYTES: Final = 2 << 20
"""The huge pages of most processors. Where they have another size, the memory is only less quick."""


def take_pages(size_bytes: int) -> memoryview:
    """New writable memory that begins on a page, on huge pages as far as they go; it goes with the last view of it.

    A device reads into huge pages with far fewer entries in its lists, and they are touched for the first time in a
    tenth of the time. Forks do not inherit the memory: a direct read into private memory that is forked meanwhile may
    end in the child.

    Raises:
        OutOfMemoryError: If there is not that much.
    """
    huge_bytes = size_bytes // _HUGE_BYTES * _HUGE_BYTES
    spare_bytes = _HUGE_BYTES if huge_bytes else 0
    try:
        memory = mmap.mmap(-1, size_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(f"no memory for {size_bytes:,} bytes on their way: {error}") from error
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_BYTES if huge_bytes else 0
    _advise(memory, "MADV_DONTFORK", 0, len(memory))
    _advise(memory, "MADV_HUGEPAGE", begin, huge_bytes)
    return memoryview(memory)[begin : begin + size_bytes]


def _advise(memory: mmap.mmap, advice: str, begin: int, length_bytes: int) -> None:
    if length_bytes and hasattr(mmap, advice):
        # A kernel that does not know the advice goes on without it.
        with suppress(OSError):
            memory.madvise(getattr(mmap, advice), begin, length_bytes)


class Scratch(threading.local):
    """Memory for one piece, one to a thread, made when it is first needed; what it held before stays in it."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, size_bytes: int) -> memoryview:
        """A writable view of that many bytes, beginning on a page; it holds until the thread asks again.

        Raises:
            OutOfMemoryError: If there is not that much.
        """
        if self._memory.nbytes < size_bytes:
            # The old memory goes first, so that the two are never held at once.
            self._memory = memoryview(b"")
            self._memory = take_pages(size_bytes)
        return self._memory[:size_bytes]
