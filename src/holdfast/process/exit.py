"""Waits for saves in progress when the program ends without having closed its managers.

A normal exit waits for the save in progress. A failure that was not raised by then is printed, and changes the exit
code, because a job that ends with 0 is taken to have saved its last state.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn, Protocol

from holdfast.errors import HoldfastError
from holdfast.process.terminal import say

EXIT_SAVE_FAILED: Final = 74
"""The exit code (EX_IOERR) of a job that ends with a failed save that was not raised, regardless of the code it asked
for."""

EXIT_INTERRUPTED: Final = 130
"""The exit code of a program that a person has ended with Ctrl-C: it should not be restarted automatically."""

_TEARDOWN_SECONDS: Final = 5.0
"""How long the interpreter and its libraries may take to end: torch takes about a second of processor time."""


class Drainable(Protocol):
    """An object that may have work in progress when the program ends."""

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Waits for the work in progress, within its own deadline; returns failures not raised yet.

        If it raises `KeyboardInterrupt`, that says what is lost.
        """
        ...


# By owner, the process that it lives in. Changed by the training thread and by saves; a single change needs no lock.
_owners: dict[Drainable, int] = {}
_drained_process = 0
# What ends when all else has: connections, whose threads the interpreter must not end by force.
_closers: list[Callable[[], None]] = []
# The exit that the interpreter ends by, once it does; and one that was raised in another thread than the main one.
_exit: LeavingExit | None = None
_exit_of_thread: LeavingExit | None = None


def register_drain(owner: Drainable) -> None:
    """**Thread-safe.** Makes the program wait for `owner` before it ends."""
    global _drained_process
    _owners[owner] = os.getpid()
    # Processes that multiprocessing has forked end without exit handlers, but run finalizers of its own.
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None or _drained_process == os.getpid():
        return
    from multiprocessing.util import Finalize

    _drained_process = os.getpid()
    Finalize(None, drain_all, exitpriority=100)


def unregister_drain(owner: Drainable) -> None:
    """**Thread-safe.** Undoes `register_drain`; a second call does nothing."""
    _owners.pop(owner, None)


def close_last(close: Callable[[], None]) -> None:
    """Makes the program call `close` at its end, when no work is left in progress."""
    _closers.append(close)


def drain_all() -> None:
    """**Blocks.** Waits for the work of this process; ends it with another code if a failure was never raised."""
    failures: list[HoldfastError] = []
    try:
        # What a forked child has inherited is its parent's: the child has neither the threads nor the task. Some
        # register only now: the first file that is kept for the next save, when the clean-up of the last one ends.
        while left := [owner for owner, process in list(_owners.items()) if process == os.getpid()]:
            for owner in left:
                unregister_drain(owner)
                failures += owner.drain()
    except KeyboardInterrupt as interrupt:
        end_interrupted(str(interrupt))
    if not failures:
        for close in _closers:
            close()
        if _exit is not None and _exit.is_urgent():
            _end_now(_exit.number)
        if _exit is None and _exit_of_thread is not None and not _exit_of_thread.is_taken:
            _end_now(_exit_of_thread.number)
        return
    for failure in failures:
        say(f"holdfast: {type(failure).__name__}: {failure}")
    # An exception in an exit handler does not change the exit code, so the process has to be ended here. This handler
    # was registered before those of modules that were imported later, so theirs have run by now.
    _end_now(EXIT_SAVE_FAILED)


class LeavingExit(SystemExit):
    """The exit of a job; it knows if it ends the program, and when that must be gone.

    Attributes:
        number: The exit code.
        gone_at: When the process must be gone, by the monotonic clock; None if it is not known.
        is_taken: True if the program has read the code: then it decides what it ends with.
    """

    def __init__(self, number: int, gone_at: float | None = None) -> None:
        super().__init__(number)
        self.number = number
        self.gone_at = gone_at
        self.is_taken = False

    @property
    def code(self) -> int:  # type: ignore[override]
        """The exit code. The interpreter itself, below all Python code, reads it when it ends the program."""
        global _exit
        if sys._getframe().f_back is None:
            _exit = self
        else:
            self.is_taken = True
        return self.number

    def is_urgent(self) -> bool:
        """True if the interpreter may not end by itself before the process must be gone."""
        return self.gone_at is not None and time.monotonic() >= self.gone_at - _TEARDOWN_SECONDS


def leave_with_thread(leaving: LeavingExit) -> None:
    """Makes an exit that is about to be raised end the program, in whichever thread it is raised.

    In a thread other than the main one Python lets an exit end only that thread. With this, the process ends when the
    exit has come out of a `threading.Thread`, or else, if a pool of threads keeps it, with that code.
    """
    global _exit_of_thread
    if threading.get_ident() == threading.main_thread().ident:
        return
    before, _exit_of_thread = threading.excepthook, leaving

    def end(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is leaving:
            end_process(leaving.number)
        before(args)

    threading.excepthook = end


def is_interactive() -> bool:
    """Returns True if a person works in this process and continues in it: a notebook, IPython, a prompt."""
    # What multiprocessing has forked from it, as notebook launchers do, has the mark too, and no prompt.
    processes = sys.modules.get("multiprocessing.process")
    is_child = processes is not None and processes.parent_process() is not None
    return (hasattr(sys, "ps1") or bool(sys.flags.inspect)) and not is_child


def end_interrupted(lost: str = "") -> NoReturn:
    """Ends the process at once, as a person asked with Ctrl-C: Python would end it with 0 at this point."""
    lost = f": {lost}" if lost else ""
    say(f"holdfast: interrupted at the end of the program{lost}; leaving with exit code {EXIT_INTERRUPTED}.")
    _end_now(EXIT_INTERRUPTED)


def end_process(code: int) -> NoReturn:
    """**Blocks.** Ends the process from any thread, once the work in progress has ended; nothing is unwound."""
    drain_all()
    _end_now(code)


def _end_now(code: int) -> NoReturn:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


atexit.register(drain_all)


@contextmanager
def ending_on(*numbers: signal.Signals) -> Iterator[None]:
    """Lets signals end the body as an exception does, so that its processes and files go as well.

    One that is ignored (`nohup` does that) stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
