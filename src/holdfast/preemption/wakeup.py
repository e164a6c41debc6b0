"""Wakes a thread: from other threads, and when a signal arrives while the main thread is busy in foreign code."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import weakref


class Wakeup:
    """A bell that one thread listens to.

    Python runs the handler of a signal when its main thread is back in Python code, which a long kernel or a blocked
    collective may delay for minutes. The number of the signal is written to a file descriptor at once.
    """

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._before = -1
        self._has_signals = False
        _bells.add(self)

    def take_signals(self) -> None:
        """Lets each signal that has a handler ring too, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            self._has_signals = True

    def ring(self) -> None:
        """**Thread-safe.** Wakes the listener."""
        try:
            self._bell.send(b"\0")
        except OSError:
            return  # Full, so that it wakes in any case; or closed, so that nobody listens.

    def listen(self, timeout_seconds: float) -> list[int]:
        """**Blocks** until it rings or the time is over. Gives the numbers of the signals that rang."""
        readable, _, _ = select.select([self._ear], [], [], max(timeout_seconds, 0.0))
        if not readable:
            return []
        try:
            rung = self._ear.recv(4096)
        except OSError:
            return []
        numbers = [number for number in rung if number]
        if numbers and self._before != -1:
            # Whoever listened before is told as well.
            try:
                os.write(self._before, bytes(numbers))
            except OSError:
                self._before = -1
        return numbers

    def close(self) -> None:
        """Puts back what was there before. Nobody may listen any more."""
        self._let_go(self._before)
        _bells.discard(self)
        self._ear.close()
        self._bell.close()

    def _let_go(self, before: int) -> None:
        if self._has_signals and threading.current_thread() is threading.main_thread():
            self._has_signals = False
            current = signal.set_wakeup_fd(before, warn_on_full_buffer=False)
            if current != self._bell.fileno():
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)


# In use in this process, so that a forked child can let go: signals of its own would ring in its parent.
_bells: weakref.WeakSet[Wakeup] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for bell in list(_bells):
        bell._let_go(-1)
    _bells.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
