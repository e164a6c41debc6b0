"""Wakes a thread, from other threads and when a signal arrives while the main thread is busy in foreign code."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from contextlib import suppress
from typing import ClassVar, Final, NamedTuple

ANSWERED: Final = 255
"""Follows the signals whose handlers the main thread has run; no signal has this number."""


class Wakeup:
    """A bell that one thread listens to.

    Python runs a signal's handler when its main thread is back in Python code, which a long kernel or a blocked
    collective may delay for minutes. The number of the signal is written to a file descriptor at once.

    There may be several bells. Signals ring the newest one; its listener rings the others, and forwards to any
    descriptor that other code had installed.
    """

    # The newest last; and closed ones that other code may put back. No thread listens to these.
    _ringing: ClassVar[list[Wakeup]] = []
    _left_open: ClassVar[list[Wakeup]] = []

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        self._stranger: _Stranger | None = None

    def take_signals(self) -> None:
        """Lets every signal that has a handler ring too, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            is_ours = any(before == bell._bell.fileno() for bell in self._ringing)
            self._stranger = self._ringing[-1]._stranger if is_ours else _Stranger.find(before)
            self._ringing.append(self)

    def ring(self) -> None:
        """**Thread-safe.** Wakes the listener."""
        self._send(b"\0")

    @classmethod
    def answer(cls) -> None:
        """Reports that the main thread now runs the handlers; called by the handlers of signals."""
        for bell in cls._ringing[-1:]:
            bell._send(bytes([ANSWERED]))

    def listen(self, timeout_seconds: float) -> list[int]:
        """**Blocks** until it rings or the time is over.

        Returns:
            The numbers of the signals that rang, in order; and `ANSWERED` after those that were handled.
        """
        readable, _, _ = select.select([self._ear], [], [], max(timeout_seconds, 0.0))
        rung: list[int] = []
        with suppress(OSError):
            rung = [number for number in self._ear.recv(4096) if number] if readable else []
        if rung and self in self._ringing[-1:]:
            for bell in self._ringing[:-1]:
                bell._send(bytes(rung))
            if self._stranger is not None and self._stranger.is_there():
                # Full, or closed this very moment.
                with suppress(OSError):
                    os.write(self._stranger.descriptor, bytes(number for number in rung if number != ANSWERED))
        return rung

    def close(self) -> None:
        """Restores the earlier descriptor, if it is still valid. No thread may be listening."""
        if self in self._ringing:
            self._ringing.remove(self)
            if not self._try_put_back():
                # Other code may put this one back, and what has its number by then is not to be rung.
                self._left_open.append(self)
                return
        self._ear.close()
        self._bell.close()

    def _send(self, rung: bytes) -> None:
        with suppress(OSError):  # Full, so that it wakes in any case; or closed, so that no thread listens.
            self._bell.send(rung)

    def _try_put_back(self) -> bool:
        """Lets signals ring the newest remaining bell; returns False if it is not known what they ring now."""
        if threading.current_thread() is not threading.main_thread():
            return False
        before = -1
        if self._ringing:
            before = self._ringing[-1]._bell.fileno()
        elif self._stranger is not None and self._stranger.is_there():
            before = self._stranger.descriptor
        current = _replace(before)
        if current not in (-1, self._bell.fileno()):
            _replace(current)
        return current in (-1, before, self._bell.fileno())

    @classmethod
    def leave_to_parent(cls) -> None:
        """Stops signals of a forked child from ringing in its parent."""
        if cls._ringing and threading.current_thread() is threading.main_thread():
            ours = {bell._bell.fileno() for bell in cls._ringing}
            current = _replace(-1)
            if current not in ours:
                _replace(current)
        cls._ringing.clear()


os.register_at_fork(after_in_child=Wakeup.leave_to_parent)


class _Stranger(NamedTuple):
    """A descriptor of other code, with what distinguishes it from a later one of the same number."""

    descriptor: int
    device: int
    inode: int

    @classmethod
    def find(cls, descriptor: int) -> _Stranger | None:
        try:
            status = os.fstat(descriptor)
        except OSError:
            return None
        return cls(descriptor, status.st_dev, status.st_ino)

    def is_there(self) -> bool:
        return _Stranger.find(self.descriptor) == self


def _replace(descriptor: int) -> int:
    """Installs a descriptor if it is usable, and returns the earlier one."""
    try:
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return signal.set_wakeup_fd(-1, warn_on_full_buffer=False)
