"""Host memory: by its address, on whole pages, and many places of it at once."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final, TypeAlias, TypeVar

from holdfast.errors import OutOfMemoryError

MEMORY: Final = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""All memory there may be; only that of arrays may be touched."""

Extent: TypeAlias = tuple[int, int]
"""The addresses of an array, the last exclusive."""


def address_of(data: memoryview) -> int:
    """Returns the address of the first byte of `data`, which is not empty."""
    import numpy as np

    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def memory_between(begin: int, end: int, extent: Extent) -> memoryview:
    """Returns the memory between two addresses; raises `ValueError` if some is outside of the array's `extent`."""
    if not 0 < extent[0] <= begin <= end <= extent[1]:
        raise ValueError(
            f"expected memory from {begin:#x} to {end:#x}, but the array is at {extent[0]:#x} to {extent[1]:#x}"
        )
    return MEMORY[begin:end]


_HUGE_BYTES: Final = 2 << 20
"""The huge pages of most processors. If they have another size, the memory is only slower."""


def take_pages(size_bytes: int) -> memoryview:
    """Returns new writable memory that begins on a page, with huge pages if possible; freed with the last view of it.

    A device reads into huge pages with far fewer entries in its lists, and they are first touched in a tenth of the
    time. Forks do not inherit the memory: a direct read into private memory that is forked meanwhile may end in the
    child. Raises `OutOfMemoryError` if there is not enough.
    """
    huge_bytes = size_bytes // _HUGE_BYTES * _HUGE_BYTES
    spare_bytes = _HUGE_BYTES if huge_bytes else 0
    try:
        memory = mmap.mmap(-1, size_bytes + spare_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(f"no memory for a buffer of {size_bytes:,} bytes: {error}") from error
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
    """Memory for one piece, one per thread, created when it is first needed; its old content stays in it."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def take(self, size_bytes: int) -> memoryview:
        """Returns a writable view of that many bytes, beginning on a page; valid until the thread asks again."""
        if self._memory.nbytes < size_bytes:
            # The old memory goes first, so that the two are never held at once.
            self._memory = memoryview(b"")
            self._memory = take_pages(size_bytes)
        return self._memory[:size_bytes]


_T = TypeVar("_T")


def batches(items: Iterable[_T], size_of: Callable[[_T], int], limit_bytes: int) -> Iterator[list[_T]]:
    """Splits a sequence into runs of at most that many bytes, or of one item that is larger."""
    every = list(items)
    ends = list(accumulate(map(size_of, every), initial=0))
    first = 0
    while first < len(every):
        last = max(bisect_right(ends, ends[first] + limit_bytes) - 1, first + 1)
        yield every[first:last]
        first = last


def parts_beyond(parts: Sequence[memoryview], filled_bytes: int) -> list[memoryview]:
    """Returns what is left to fill when that many bytes have been filled, fewer than the parts have."""
    for number, part in enumerate(parts):
        if filled_bytes < len(part):
            return [part[filled_bytes:], *parts[number + 1 :]]
        filled_bytes -= len(part)
    return []
