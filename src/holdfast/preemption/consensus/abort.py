"""Interrupts a training thread that may be waiting for a worker that has failed.

Usually it is in a collective of a framework: how many were begun, and whether the thread is in one, is found out here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any, Final, NoReturn

from holdfast.process.exit import drain_all
from holdfast.process.interrupt import Interrupter
from holdfast.process.latch import start_thread
from holdfast.process.terminal import say

_INTERRUPT_SECONDS: Final = 1.0
_ABORT_SECONDS: Final = 1.5
_END_SECONDS: Final = 4.0
"""The times after the news of interrupting the training thread, aborting its collectives, and ending the process."""

_LOOKS: Final = 8
"""How many looks there must have been by then: the whole machine may have been suspended."""

_CLEAN_UP_SECONDS: Final = 30.0
"""How long it may take instead while the program handles the error, for example in `finally`."""

_RAISES: Final = 3
_RAISE_SECONDS: Final = 5.0
"""After that many errors between two steps, and that time, a program counts as one that errors do not end."""

_DRAIN_SECONDS: Final = 10.0
"""How long a save in progress may take to end before that."""

_COLLECTIVES: Final = {"torch.distributed": "holdfast.integrations.torch.cluster"}
"""By framework; imported by name, and only if the framework is in use."""

_LIBRARY: Final = f"{os.sep}torch{os.sep}"
"""A part of the paths of all of the library's files."""

_VAIN_SECONDS: Final = 2.0
"""How long a worker waits in a collective which a worker that has ended its training never began."""

_FRAMES: Final = 3
_MOST_CONTEXTS: Final = 100
_EXIT_FAILED: Final = 1


class StuckThreadAborter:
    """Interrupts the training thread, aborts its collectives and ends the process, until an error has come out of it.

    An error that is raised at an arbitrary point may be swallowed there, by `except Exception` or in a `__del__`. So
    until the loop ends the error is raised again, and in the end the process is ended.

    Attributes:
        is_raised: True if an error has come out of the training loop, or comes out of it now.
        is_open: True once it was opened.
        erred_at: When the error was received, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.is_raised = self.is_open = False
        self.erred_at = 0.0
        self._error: Exception | None = None
        self._thread = threading.get_ident()
        self._interrupter = Interrupter(self._take_error)
        self._is_aborted = False
        self._thrown_at: float | None = None
        self._unhandled_looks = 0
        self._raised_at: list[float] = []

    def open(self) -> None:
        """Prepares interrupts of the thread that calls this, if it is the main thread."""
        self._thread = threading.get_ident()
        self._interrupter.open()
        self.is_open = True

    def close(self) -> None:
        """Stops interrupting."""
        self._interrupter.close()

    def escalate(self, error: Exception) -> None:
        """Called repeatedly while the error has not come out of the training loop."""
        self._error = error
        now = time.monotonic()
        waited_seconds = now - self.erred_at
        thrown_at = self._thrown_at
        if thrown_at is not None and waited_seconds >= _CLEAN_UP_SECONDS:
            self._end(error, "did not finish in time")
        if thrown_at is not None and self._is_handled(error):
            return
        # On its way from one frame to the next an error is not handled for a moment.
        self._unhandled_looks += 1
        if now - (thrown_at or self.erred_at) >= _INTERRUPT_SECONDS:
            self._interrupter.interrupt()
        if waited_seconds >= _ABORT_SECONDS and not self._is_aborted:
            self._is_aborted = True
            # It may hang as well.
            for collectives in _find_collectives():
                start_thread(collectives.abort, "holdfast-abort")
        if waited_seconds >= _END_SECONDS and self._unhandled_looks >= _LOOKS:
            self._end(
                error,
                "did not return from the call that it is in"
                if thrown_at is None
                else "continued in spite of the error",
            )

    def count_raise(self, error: Exception) -> None:
        """Counts an error that is about to be raised between two steps. Ends a program that keeps asking for steps."""
        self._raised_at.append(time.monotonic())
        if len(self._raised_at) > _RAISES and self._raised_at[-1] - self._raised_at[0] >= _RAISE_SECONDS:
            self._end(error, "continued in spite of the error")

    def _take_error(self) -> Exception | None:
        """Returns the error to raise at an arbitrary point of the training thread; None if one has come out by now."""
        if self.is_raised:
            return None
        self._thrown_at = time.monotonic()
        return self._error

    def _is_handled(self, error: Exception) -> bool:
        """Returns True if the training thread handles the error, or is on its way through `finally` and `with`."""
        found: Any = sys._current_exceptions().get(self._thread)
        # Before Python 3.12 with its type and its traceback.
        handled = found[1] if isinstance(found, tuple) else found
        for _ in range(_MOST_CONTEXTS):
            if handled is None or handled is error:
                break
            handled = handled.__context__
        return handled is error

    def _end(self, error: Exception, why: str) -> NoReturn:
        frame = sys._current_frames().get(self._thread)
        where = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else ""
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        text = (
            f"holdfast: another worker failed, and this one {why}: its process is ended.\n{error}{notes}\nThis "
            f"worker was in:\n{where}"
        )
        try:
            say(text.rstrip())
        finally:
            # What all have written can still be committed.
            start_thread(drain_all, "holdfast-drain").wait(_DRAIN_SECONDS)
            os._exit(_EXIT_FAILED)


def count_begun() -> int | None:
    """Returns how many collectives among all workers this process has begun; None if that is not known."""
    counts = [count for each in _find_collectives() if (count := each.count_begun()) is not None]
    return sum(counts) if counts else None


class VainWait:
    """Finds out whether a thread waits in a collective that another worker, which has ended, never began.

    The counts of collectives alone do not show that: if workers send to each other, those in the middle count more.
    """

    def __init__(self) -> None:
        """Looks at the thread that calls this."""
        self._thread = threading.get_ident()
        self._call: tuple[int, object] | None = None
        self._since: float | None = None

    def find_since(self, begun: int) -> float | None:
        """Returns since when it has waited, by the monotonic clock, once that is long enough; None before.

        Args:
            begun: How many collectives this process has begun.
        """
        frame = sys._current_frames().get(self._thread)
        is_inside = frame is not None and _LIBRARY in frame.f_code.co_filename
        # Equal while it stays there. A frame is identified by its address, so as not to be kept alive.
        places: list[tuple[int, CodeType, int]] = []
        while frame is not None and is_inside:
            places.append((id(frame), frame.f_code, frame.f_lasti))
            frame = frame.f_back
        if not places or (begun, places) != self._call:
            self._call, self._since = (begun, places), None
            return None
        self._since = self._since or time.monotonic()
        return self._since if time.monotonic() - self._since >= _VAIN_SECONDS else None


def _find_collectives() -> Iterator[ModuleType]:
    return (import_module(module) for framework, module in _COLLECTIVES.items() if framework in sys.modules)
