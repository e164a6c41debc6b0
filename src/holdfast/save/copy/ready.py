"""Makes the host memory of the first save ready while training runs, so that the first save need not."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final

from holdfast.concurrency import Latch
from holdfast.save.copy.image import HostBuffer
from holdfast.storage.worker_pool import WorkerPool

GENTLE: Final = 30.0
"""How many times as long as it works a gentle thread rests: training loses 3 % of one processor at most."""


class Readying:
    """A thread that touches the pages of a host buffer, one small piece after the other, until it is ended.

    The thread has the usual priority and rests instead. A thread of low priority would wait for a processor while it
    holds the interpreter's lock, or the kernel's lock on the process's memory, and training would wait for it.

    An interrupt leaves nothing locked: whoever ends it waits for a latch that each piece has of its own.

    Attributes:
        has_ended: True once `end` has returned.
    """

    def __init__(self, buffer: HostBuffer, rest_share: float = 0.0) -> None:
        """Begins nothing yet; the thread rests `rest_share` times as long as it works."""
        self._pages = buffer.touch()
        self._rest_share = rest_share
        self._over, self._touched = Latch(), Latch()
        self._touched.open()
        self.has_ended = False
        self._thread = WorkerPool(1, "holdfast-ready")

    def begin(self) -> None:
        """Starts the thread, which ends by itself. Nothing is touched if no thread can be had, or after `end`."""
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
