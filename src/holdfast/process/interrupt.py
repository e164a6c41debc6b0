"""The one owner of `SIGURG`: another thread raises an error in the main thread, also in a sleep or a wait for a socket.

Nothing else uses this signal, a process without a handler ignores it, and no shell ignores it from the start.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from holdfast.process.latch import start_thread
from holdfast.tracebacks import print_short

SIGNAL: Final = signal.SIGURG
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 5.0


class Interrupter:
    """Raises an error in the main thread at the request of another one. Several may be open at once."""

    def __init__(self, find_error: Callable[[], BaseException | None]) -> None:
        """Prepares; `find_error` is called in the main thread, and returns the error to raise, or None."""
        self._find_error = find_error
        self._is_asked = False

    def open(self) -> None:
        """Prepares interrupts if this is the main thread, the only one that Python interrupts."""
        global _before
        if threading.current_thread() is not threading.main_thread():
            return
        if not _open:
            _before = signal.getsignal(SIGNAL)
            if _before is None:
                return  # This handler was not made by Python, and could not be put back.
            signal.signal(SIGNAL, _handle)
        self._is_asked = False
        _open.append(self)

    def close(self) -> None:
        """Stops interrupting, and restores the earlier handler; a second call does nothing."""
        if self in _open and threading.current_thread() is threading.main_thread():
            _open.remove(self)
            if not _open and signal.getsignal(SIGNAL) == _handle:
                signal.signal(SIGNAL, _before)

    def interrupt(self) -> None:
        """**Thread-safe.** Makes the main thread raise the error as soon as Python code runs there, if it can.

        May be called again and again: until the first call is answered, the others do nothing. Each signal wakes the
        threads that listen for signals, and one of those may be the caller.
        """
        if self in _open and not self._is_asked:
            self._is_asked = True
            _send()
            start_thread(self._repeat, "holdfast-interrupt")

    def _repeat(self) -> None:
        """Sends the signal until it is answered: one that comes just before the main thread blocks ends no sleep."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        time.sleep(pause_seconds)
        while self._is_asked and self in _open:
            _send()
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
            time.sleep(pause_seconds)

    def answer(self) -> None:
        """Called in the main thread by the signal: raises the error, if one was asked for."""
        # In a forked child it was not.
        is_asked, self._is_asked = self._is_asked, False
        if is_asked and (error := self._find_error()) is not None:
            print_short()  # It passes through no public call.
            raise error


# The newest last; and the handler before the first one.
_open: list[Interrupter] = []
_before: Any = signal.SIG_DFL


def _send() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def _handle(number: int, frame: FrameType | None) -> None:
    if callable(_before):
        _before(number, frame)
    for interrupter in reversed(_open):
        interrupter.answer()
