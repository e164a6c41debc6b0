"""The host memory that snapshots are copied into."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from holdfast.errors import OutOfMemoryError
from holdfast.format.layout import round_up

_TOUCHED_BYTES: Final = 4 << 20
_WIPE_ON_FORK: Final = 18
"""`MADV_WIPEONFORK`, which Python has no name for."""


class HostBuffer:
    """Host memory for one snapshot, used again by the next.

    Memory that was touched before takes a copy about ten times faster than fresh memory, so it is kept between saves
    and only ever grows. Not thread-safe: one save uses it at a time.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None

    @property
    def size_bytes(self) -> int:
        """How much memory is held."""
        return len(self._memory) if self._memory is not None else 0

    def take(self, size_bytes: int) -> memoryview:
        """A writable view of that many bytes, beginning on a page; what it held before stays in it.

        Raises:
            OutOfMemoryError: If there is not that much; then nothing is held.
        """
        if self._memory is None or len(self._memory) < size_bytes:
            wanted_bytes = max(round_up(size_bytes), mmap.PAGESIZE)
            if self._memory is None or not self._memory.try_grow(wanted_bytes):
                # Let go of the old memory first, so that the two are never held at once. A view that somebody still has
                # keeps it alive, and it goes with the view.
                self.release()
                self._memory = _map(wanted_bytes)
        return memoryview(self._memory)[:size_bytes]

    def pin(self, pin: Callable[[memoryview], Callable[[], None] | None]) -> None:
        """Pins the memory for a device, unless it is pinned."""
        if self._memory is not None and self._memory.unpin is None:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # What was not touched yet: a device has fewer pages to be told of, and the processor copies nothing.
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._memory.unpin = pin(memoryview(self._memory))

    def touch(self) -> Iterator[Callable[[], object]]:
        """Jobs that give each page memory of its own, so that the first copy need not."""
        if self._memory is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for begin in range(0, len(self._memory), _TOUCHED_BYTES):
            yield partial(ctypes.memset, address + begin, 0, min(_TOUCHED_BYTES, len(self._memory) - begin))

    def release(self) -> None:
        """Gives the memory back as soon as no view of it is left."""
        self._memory = None


class _Memory(mmap.mmap):
    """Memory that is unpinned right before it goes, whoever was the last to hold it.

    Were it to go while it is pinned, a device would take other memory that comes to lie there for pinned as well, and
    copy to pages that are nobody's.
    """

    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()

    def try_grow(self, size_bytes: int) -> bool:
        """Takes more memory, and keeps what has been touched; False if it cannot, as while there are views of it."""
        if self.unpin is not None:
            return False
        try:
            self.resize(size_bytes)
        except (BufferError, OSError, OverflowError, SystemError, ValueError):
            return False
        return True


def _map(size_bytes: int) -> _Memory:
    # Private memory is touched for the first time far more quickly than shared memory.
    try:
        memory = _Memory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(
            f"no memory for a copy of the state, {size_bytes:,} bytes: {error}",
            hint="A save takes as much host memory as the state has; use a machine with more, or save less.",
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # In huge pages the first copy is quicker, and each one after it was found to be slower once files are written.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        # Otherwise each fork (a loader's workers, say) would let the next save copy every page once more.
        with suppress(OSError):  # A kernel may not know it.
            memory.madvise(_WIPE_ON_FORK)
    return memory
