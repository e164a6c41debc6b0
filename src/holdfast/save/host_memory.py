"""Host memory for the image of a snapshot, and a thread that makes it ready before the first save."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final

from holdfast.errors import OutOfMemoryError
from holdfast.format.index import round_up
from holdfast.process.latch import Latch
from holdfast.process.worker_pool import WorkerPool
from holdfast.state.leaves import Pin

GENTLE: Final = 30.0
"""How many times as long as it works a gentle thread rests: training loses 3 % of one processor at most."""

TOUCHED_BYTES: Final = 1 << 20
"""How much one job of `HostBuffer.touch` touches."""

_WIPE_ON_FORK: Final = 18
"""`MADV_WIPEONFORK`, which Python has no name for."""


class HostBuffer:
    """Host memory for one snapshot, reused by the next.

    Copies to touched memory are about ten times faster than to fresh memory, so it is kept between saves and only ever
    grows, except that memory of an estimated size is cut to the size of the first save. Not thread-safe: one save uses
    it at a time.

    Attributes:
        count: How many places there are for the image of a save.
        memory: The memory of the next image; None before there is any.
    """

    count = 1

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self._is_estimate = False

    @property
    def size_bytes(self) -> int:
        """How much memory is held."""
        return len(self.memory) if self.memory is not None else 0

    def take(self, size_bytes: int) -> memoryview:
        """Returns a writable view of that many bytes, beginning on a page, with its old content; or
        `OutOfMemoryError`."""
        wanted_bytes = max(round_up(size_bytes), mmap.PAGESIZE)
        held_bytes = 0 if self.memory is None else len(self.memory)
        is_other = held_bytes < wanted_bytes or (self._is_estimate and held_bytes > wanted_bytes)
        if self.memory is None or (is_other and not self.memory.try_resize(wanted_bytes)):
            # Let go of the old memory first, so that the two are never held at once. A view that is still in
            # use keeps it alive until the view is freed.
            self.release()
            self.memory = _map(wanted_bytes)
        self._is_estimate = False
        return memoryview(self.memory)[:size_bytes]

    def reserve(self, size_bytes: int) -> None:
        """Takes memory for a save that will need about that much; pages take none before they are touched."""
        self.take(size_bytes)
        self._is_estimate = True

    def pin(self, pin: Pin) -> None:
        """Pins the memory for a device, unless that was done, or tried, before."""
        if self.memory is not None and not self.memory.is_pin_tried:
            self.memory.is_pin_tried = True
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # Untouched pages stay unpinned: a device has fewer pages to register, and the processor copies nothing.
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            self.memory.unpin = pin(memoryview(self.memory))

    def touch(self) -> Iterator[Callable[[], object]]:
        """Returns jobs that give each page memory of its own, so that the first copy need not."""
        if self.memory is None:
            return
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for begin in range(0, len(self.memory), TOUCHED_BYTES):
            yield partial(ctypes.memset, address + begin, 0, min(TOUCHED_BYTES, len(self.memory) - begin))

    def release(self) -> None:
        """Frees the memory as soon as no view of it is left."""
        self.memory = None


class Memory(mmap.mmap):
    """Memory that is unpinned right before it is freed.

    If it were freed while it is pinned, a device would take later memory at that address for pinned as well, and copy
    to the wrong pages.
    """

    unpin: Callable[[], None] | None = None
    is_pin_tried = False

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()

    def try_resize(self, size_bytes: int) -> bool:
        """Takes more memory or gives some back, and keeps what has been touched; returns False if it cannot, for
        example while there are views of it."""
        if self.unpin is not None:
            return False
        try:
            self.resize(size_bytes)
        except (BufferError, OSError, OverflowError, SystemError, ValueError):
            return False
        return True


def _map(size_bytes: int) -> Memory:
    # Private memory is touched for the first time far more quickly than shared memory.
    try:
        memory = Memory(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise OutOfMemoryError(
            f"no memory for a copy of the state, {size_bytes:,} bytes: {error}",
            hint="A save needs as much host memory as the state; use a machine with more memory, or save less.",
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # In huge pages the first copy is quicker, and each one after it was found to be slower once files are written.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        # Otherwise each fork (a loader's workers, say) would let the next save copy every page once more.
        with suppress(OSError):  # A kernel may not know it.
            memory.madvise(_WIPE_ON_FORK)
    return memory


class Readying:
    """A thread that touches the pages of a host buffer, one small piece after the other, until it is ended.

    The thread has the usual priority and rests instead. A thread of low priority would wait for a processor while it
    holds the interpreter's lock, or the kernel's lock on the process's memory, and training would wait for it.

    An interrupt leaves nothing locked: `end` waits for a latch that each piece has of its own.

    Attributes:
        has_ended: True once `end` has returned.
    """

    def __init__(self, pages: Iterator[Callable[[], object]], rest_share: float = 0.0) -> None:
        """Begins nothing yet; `pages` are the jobs of `HostBuffer.touch`, and the thread rests `rest_share` times as
        long as it works."""
        self._pages = pages
        self._rest_share = rest_share
        self._over, self._touched = Latch(), Latch()
        self._touched.open()
        self.has_ended = False
        self._thread = WorkerPool(1, "holdfast-ready")

    def begin(self) -> None:
        """Starts the thread, which ends by itself. Nothing is touched if no thread is available, or after `end`."""
        if self._thread.start():
            # It knows this by a weak reference: a manager that is dropped takes its memory with it.
            me, over, share = weakref.ref(self), self._over, self._rest_share
            self._thread.put(lambda: _touch_all(me, over, share))
        self._thread.end()

    def end(self) -> None:
        """**Thread-safe.** **Blocks** for a millisecond. What is not touched by now is left as it is."""
        self._over.open()
        # The thread shows its latch before it looks whether this is over: one of the two sees the other.
        self._touched.wait(threading.TIMEOUT_MAX)
        self.has_ended = True

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the thread to end, after `end`."""
        # Not ended yet if `begin` was interrupted.
        self._thread.end()
        self._thread.join(timeout_seconds)

    def touch_next(self) -> bool:
        """Touches the next piece; returns False if there is none, or this is over. Called by the thread."""
        self._touched = touched = Latch()
        try:
            touch = None if self._over.is_open else next(self._pages, None)
            if touch is not None:
                touch()
            return touch is not None
        finally:
            touched.open()


def _touch_all(readying: weakref.ref[Readying], over: Latch, rest_share: float) -> None:
    while (one := readying()) is not None:
        begun_at = time.monotonic()
        if not one.touch_next():
            return
        del one
        if rest_share and over.wait((time.monotonic() - begun_at) * rest_share):
            return
