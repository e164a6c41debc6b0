"""Starts threads so that an interrupt of the thread that asks for it does no harm."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from holdfast.gate import Gate


def start_thread(target: Callable[[], object], name: str) -> Gate:
    """Starts a daemon thread; does not wait until it runs.

    `Thread.start` waits in Python code, where Ctrl-C would leave a lock locked. So another thread calls it.

    Returns:
        A gate that is opened when the thread has ended, or could not be had.
    """
    ended = Gate()

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
