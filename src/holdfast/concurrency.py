"""What holdfast needs of threads beyond the standard library: both survive an exception that a signal handler raises.

`threading.Event`, `Condition` and `Thread.start` run Python code with a lock held, and an interrupt there leaves the
lock locked for ever.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


class Latch:
    """**Thread-safe.** Shut until it is opened, once and for good.

    `threading.Event` and `Condition` take their lock in Python code, so that Ctrl-C (or any signal handler that raises)
    in a thread that waits may leave it locked, and whoever opens it hangs. A plain lock is taken within one
    instruction, and what is true stays true here: an interrupted wait takes nothing away.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._barred = threading.Lock()
        self._barred.acquire()

    def open(self) -> None:
        """Lets all through that wait or will come; harmless twice, from any thread."""
        if not self.is_open:
            self.is_open = True
            try:  # noqa: SIM105  A `with` could be interrupted before the release.
                self._barred.release()
            except RuntimeError:
                pass  # Another thread has opened it at this very moment.

    def wait(self, timeout_seconds: float) -> bool:
        """**Blocks.** Waits until it is open; False if it was not within that time."""
        if not self.is_open and self._barred.acquire(timeout=min(max(timeout_seconds, 0.0), threading.TIMEOUT_MAX)):
            # Another thread may wait as well.
            self._barred.release()
        return self.is_open


def start_thread(target: Callable[[], object], name: str) -> Latch:
    """Starts a daemon thread; does not wait until it runs.

    `Thread.start` waits in Python code, where Ctrl-C would leave a lock locked. So another thread calls it.

    Returns:
        A latch that is opened when the thread has ended, or could not be had.
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
        ended.open()  # None can be had any more: the interpreter shuts down, or the system has no room.
    return ended
