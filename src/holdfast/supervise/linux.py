"""Calls of the Linux kernel that the standard library lacks."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_NONBLOCK_CLOEXEC: Final = 0o2004000
_SIGNAL_BYTES: Final = 128
_USER_CODE: Final = 0
"""Signals with a code up to this were sent by a process; others by the kernel, such as those of a terminal."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class Received(NamedTuple):
    """A signal.

    Attributes:
        number: Its number.
        is_sent: True if a process sent it to this one, False if it came from the terminal to the whole group.
    """

    number: int
    is_sent: bool


def end_with_parent() -> None:
    """Makes this process receive SIGTERM, a notice to a training program, when its parent ends."""
    _check(_libc.prctl(_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0))


def adopt_orphans() -> None:
    """Makes this process the parent of those descendants whose own parent ends."""
    _check(_libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def open_signals(numbers: Iterable[int]) -> int:
    """Blocks signals, and returns a descriptor that they are read from."""
    numbers = [*numbers]
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    bits = sum(1 << (number - 1) for number in numbers)
    mask = ctypes.create_string_buffer(bits.to_bytes(128, "little"), 128)
    descriptor = _libc.signalfd(-1, mask, _NONBLOCK_CLOEXEC)
    _check(descriptor)
    return int(descriptor)


def read_signal(descriptor: int) -> Received | None:
    """Returns the next signal; None if there is none."""
    try:
        data = os.read(descriptor, _SIGNAL_BYTES)
    except BlockingIOError:
        return None
    code = int.from_bytes(data[8:12], "little", signed=True)
    return Received(int.from_bytes(data[:4], "little"), code <= _USER_CODE)


def list_children() -> list[int]:
    """Returns the children of this process, which has one thread; none where the kernel does not tell."""
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_bytes().split()]
    except OSError:
        return []


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
