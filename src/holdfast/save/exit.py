"""What happens to saves in flight when the program ends without having closed its managers.

A normal exit drains: it waits for the save in flight. A failure that nobody was told of by then is printed, and the
exit code says so, since a job that ends with 0 is taken to have kept its last state.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Final, NoReturn, Protocol

from holdfast.cluster.lanes import close_all
from holdfast.errors import HoldfastError
from holdfast.save.say import say

EXIT_SAVE_FAILED: Final = 74
"""The exit code (EX_IOERR) of a job that ends with a failed save that nobody was told of, whatever it asked for."""


class Drainable(Protocol):
    """Something that may have work in flight when the program ends."""

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Waits for the work in flight, within its own deadline; gives the failures not told of yet."""
        ...


# By owner, the process that it lives in. Changed by the training thread and by saves; a single change needs no lock.
_held: dict[Drainable, int] = {}
_drained_process = 0


def hold(owner: Drainable) -> None:
    """**Thread-safe.** Makes the program wait for `owner` before it ends."""
    _held[owner] = os.getpid()
    _drain_children()


def release(owner: Drainable) -> None:
    """**Thread-safe.** Undoes `hold`; harmless twice."""
    _held.pop(owner, None)


def _drain_children() -> None:
    """Processes that multiprocessing has forked end without exit handlers, but run finalizers of its own."""
    global _drained_process
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or processes.parent_process() is None or _drained_process == os.getpid():
        return
    from multiprocessing.util import Finalize

    _drained_process = os.getpid()
    Finalize(None, drain_all, exitpriority=100)


def drain_all() -> None:
    """**Blocks.** Waits for what this process has in flight; ends it if a failure was not told of to anybody."""
    # What a forked child has inherited is its parent's: the child has neither the threads nor the task.
    owners = [owner for owner, process in list(_held.items()) if process == os.getpid()]
    failures = [failure for owner in owners for failure in owner.drain()]
    if not failures:
        close_all()
        return
    for failure in failures:
        say(f"holdfast: {type(failure).__name__}: {failure}")
    # An exception in an exit handler does not change the exit code, so the process has to be ended here. This handler
    # was registered before those of whatever was imported later, so theirs have run by now.
    _end_now(EXIT_SAVE_FAILED)


def end_process(code: int) -> NoReturn:
    """**Blocks.** Ends the process from any thread, once what is in flight has ended; nothing is unwound."""
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
