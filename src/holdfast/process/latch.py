"""Thread primitives that survive an exception raised by a signal handler.

`threading.Event`, `Condition` and `Thread.start` run Python code while they hold a lock, and an interrupt there leaves
it locked.
"""

from __future__ import annotations

import _thread
import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LONGEST_SECONDS: Final = 1.0
"""A wait looks this often whether a signal has come that did not end it."""


class Latch:
    """**Thread-safe.** A one-shot event: shut until it is opened, once and for good.

    `threading.Event` and `Condition` take their lock in Python code, so Ctrl-C (or any signal handler that raises) in a
    waiting thread may leave it locked, and the thread that opens it hangs. Here each wait has its own lock, so an
    interrupt affects no other thread.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: list[threading.Lock] = []

    def open(self) -> None:
        """Releases all who wait or will wait. May be repeated, also after an interrupt."""
        self.is_open = True
        # A thread that comes to wait from here on sees that it is open.
        for lock in self._waiting.copy():
            try:  # noqa: SIM105  This is quicker.
                lock.release()
            except RuntimeError:
                pass  # It was let through already.

    def wait(self, timeout_seconds: float) -> bool:
        """**Blocks.** Waits until it is open; returns False if that takes longer."""
        if self.is_open:
            return True
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        end_at = time.monotonic() + timeout_seconds
        try:
            # It may have been opened by a thread that has not seen this lock. And a signal that comes just before the
            # wait does not end it: Python calls the handler when a blocking call returns.
            while not self.is_open and (left_seconds := end_at - time.monotonic()) > 0:
                lock.acquire(timeout=min(left_seconds, _LONGEST_SECONDS))
        finally:
            self._waiting.remove(lock)
        return self.is_open


def start_thread(target: Callable[[], object], name: str) -> Latch:
    """Starts a daemon thread; does not wait until it runs.

    `Thread.start` waits in Python code, where Ctrl-C would leave a lock locked, so another thread calls it.

    Returns:
        A latch that opens when the thread has ended, or could not be started.
    """
    ended = Latch()

    def serve() -> None:
        try:
            target()
        finally:
            ended.open()

    def start() -> None:
        try:
            threading.Thread(target=serve, name=name, daemon=True).start()
        except RuntimeError:
            ended.open()

    try:
        _thread.start_new_thread(start, ())
    except RuntimeError:
        ended.open()  # No thread can be started: the interpreter shuts down, or the system has no room.
    return ended


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector while many small objects are created, all of which stay.

    Each would bring a full collection nearer while training waits: with 20,000 arrays that doubles the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
