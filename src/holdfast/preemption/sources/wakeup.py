"""Wakes a thread: from other threads, and when a signal arrives while the main thread is busy in foreign code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from itertools import takewhile
from typing import Final, NamedTuple

ANSWERED: Final = 255
"""Rings after the signals for which the main thread has run their handlers; no signal has this number."""


class Wakeup:
    """A bell that one thread listens to.

    Python runs the handler of a signal when its main thread is back in Python code, which a long kernel or a blocked
    collective may delay for minutes. The number of the signal is written to a file descriptor at once.

    There may be several, and others who use that descriptor. Each passes on what rings to the one before it,
    and they may be closed in any order.
    """

    def __init__(self) -> None:
        self._ear, self._bell = socket.socketpair()
        self._ear.setblocking(False)
        self._bell.setblocking(False)
        # Not of this package, and there before this one: the last one last.
        self._strangers: tuple[_Stranger, ...] = ()

    def take_signals(self) -> None:
        """Lets each signal that has a handler ring too, if this is the main thread."""
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
            stranger = None if before in _descriptors() else _recognize(before)
            self._strangers = () if stranger is None else (stranger,)
            _ringing.append(self)

    def ring(self) -> None:
        """**Thread-safe.** Wakes the listener."""
        self._send(b"\0")

    def listen(self, timeout_seconds: float) -> list[int]:
        """**Blocks** until it rings or the time is over.

        Returns:
            The numbers of the signals that rang, in their order; and `ANSWERED`, after those that were handled.
        """
        readable, _, _ = select.select([self._ear], [], [], max(timeout_seconds, 0.0))
        if not readable:
            return []
        try:
            rung = [number for number in self._ear.recv(4096) if number]
        except OSError:
            return []
        before = self._find_before()
        if isinstance(before, Wakeup):
            before._send(bytes(rung))
        elif before is not None:
            # Full, or closed this very moment.
            with contextlib.suppress(OSError):
                os.write(before.descriptor, bytes(number for number in rung if number != ANSWERED))
        return rung

    def close(self) -> None:
        """Puts back what was there before, and is still there. No thread may listen any more."""
        if self._let_go():
            self._ear.close()
            self._bell.close()
        else:
            _left_open.append(self)

    def _send(self, rung: bytes) -> None:
        try:
            self._bell.send(rung)
        except OSError:
            return  # Full, so that it wakes in any case; or closed, so that no thread listens.

    def _find_before(self) -> Wakeup | _Stranger | None:
        """Whose turn it is after this one, of those that are still there."""
        for stranger in reversed(self._strangers):
            if _recognize(stranger.descriptor) == stranger:
                return stranger
        older = [*takewhile(lambda each: each is not self, _ringing)]
        return older[-1] if older else None

    def _let_go(self) -> bool:
        """Lets signals ring here no more; False if other code may put this one back, so that it has to stay open."""
        if self not in _ringing:
            return True
        newer = _ringing[_ringing.index(self) + 1 :]
        before = self._find_before()
        _ringing.remove(self)
        if newer:
            between, newer[0]._strangers = newer[0]._strangers, self._strangers + newer[0]._strangers
            return not between
        if threading.current_thread() is not threading.main_thread():
            return False
        own, descriptor = self._bell.fileno(), -1
        if before is not None:
            descriptor = before._bell.fileno() if isinstance(before, Wakeup) else before.descriptor
        current = _replace(descriptor)
        if current != own:
            _replace(current)
        return current in (own, -1)


class _Stranger(NamedTuple):
    """A descriptor of other code, by what tells it from a later one of the same number."""

    descriptor: int
    device: int
    inode: int


def answer() -> None:
    """Called by the handlers of signals: says that the main thread has come to run them."""
    for bell in _ringing[-1:]:
        bell._send(bytes([ANSWERED]))


def _recognize(descriptor: int) -> _Stranger | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return _Stranger(descriptor, status.st_dev, status.st_ino)


def _replace(descriptor: int) -> int:
    """What was there before. What cannot be used is not put there."""
    try:
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return signal.set_wakeup_fd(-1, warn_on_full_buffer=False)


def _descriptors() -> set[int]:
    return {bell._bell.fileno() for bell in _ringing}


# Those that signals ring, the newest last: they ring that one, and it passes them on.
_ringing: list[Wakeup] = []

# No thread listens to them. Other code has taken their place, and may put them back.
_left_open: list[Wakeup] = []


_fork = threading.local()


def _hold_signals() -> None:
    """A signal that reaches a child before that has let go would ring in its parent, and be taken for its own."""
    if _ringing:
        _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _let_signals_come() -> None:
    mask = _fork.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _let_go_in_child() -> None:
    """Signals of a forked child would ring in its parent."""
    if _ringing and threading.current_thread() is threading.main_thread():
        ours = _descriptors()
        current = _replace(-1)
        if current not in ours:
            _replace(current)
    _ringing.clear()
    _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_let_go_in_child)
