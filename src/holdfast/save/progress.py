"""Whether the training thread has left the call that it was in: seen from another thread, by its frames alone."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Final, TypeAlias

from holdfast.gate import Gate

Place: TypeAlias = tuple[int, CodeType, int]
"""A frame, its code, and the instruction that it is at. The frame is named by its address, so as not to be kept."""

_LIBRARY: Final = f"{os.sep}torch{os.sep}"
"""What the paths of the library's files have in common."""

RESUMED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of the code of functions that give way and are resumed."""


_LENT: Final = frozenset({"__torch_dispatch__", "forward"})
"""Functions of a program that torch may call from within a call whose change it counts at the end."""


class Sign:
    """A sign that a thread gives by itself: it asks something of holdfast, so it is in no call of before.

    It is what a loop gives that polls: whenever another thread looks, that is asleep at the same instruction.

    Attributes:
        given: Whether it has been given since it was expected.
    """

    def __init__(self) -> None:
        """The thread is the one that makes this."""
        self._thread = threading.get_ident()
        self._expected = False
        self.given = False

    def expect(self) -> None:
        """From now on it counts."""
        self._expected = True

    def give(self) -> None:
        """Called by whatever a program may ask, from any thread; all but the one are of no account."""
        if self._expected and not self.given and threading.get_ident() == self._thread:
            places = trace_places(sys._getframe())
            self.given = all(code.co_name not in _LENT for _, code, _ in places)


class CallWatch:
    """Tells when a thread has left the call that it was in at the first look.

    A library may run Python code within a call whose change it counts at the end (a mode that looks at each operation
    of torch, a custom function of autograd). So a step forward in that code says nothing, nor does its end. What says
    enough is the innermost frame outside of all calls of the library: all that was called since has been called from
    there, and has returned when this frame is at another instruction, or is gone.

    One that has come back to the same instruction counts as still there, since it cannot be told from one that is.
    """

    def __init__(self, thread: int, before: list[Place]) -> None:
        """Looks for the first time.

        Args:
            thread: The thread.
            before: Where it was when the save was asked for, by `trace_places`.
        """
        self._thread = thread
        self._before = before
        self._anchor: Place | None = None
        self.look()

    def look(self) -> bool:
        """True if the thread has left that call, waits for a save, or has ended."""
        frame = sys._current_frames().get(self._thread)
        if frame is None or frame.f_code is Gate.wait.__code__:
            return True
        places = trace_places(frame)
        if self._anchor is not None and places:
            return self._anchor not in places
        if places:
            self._anchor = _find_anchor(self._before, places)
        return False


def trace_places(frame: FrameType | None) -> list[Place]:
    """Where a thread is, the outermost frame first; empty if that cannot be said."""
    places: list[Place] = []
    while frame is not None:
        places.append((id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    if places and places[-1][1].co_flags & RESUMED:
        # A generator that gave way while it was looked at no longer knows who had called it.
        return []
    places.reverse()
    return places


def find_library_call(thread: int) -> list[Place] | None:
    """Where a thread is, if the innermost function that it is in is one of the library's."""
    places = trace_places(sys._current_frames().get(thread))
    return places if places and _LIBRARY in places[-1][1].co_filename else None


def _find_anchor(before: list[Place], now: list[Place]) -> Place:
    """The innermost frame that surely stands outside of the call that was under way; the outermost one if none does.

    That is one that stands in the same calls as when the save was asked for, or one that was called from there through
    frames of the program alone: an evaluation right after the save, say. What a library calls back comes behind a frame
    of its own, or is a method of those that it looks for by name.
    """
    index = 0
    for position, (old, new) in enumerate(zip(before, now, strict=False)):
        if old[:2] != new[:2]:
            break
        index = position
        if old != new:
            break
    while index + 1 < len(now) and not _may_be_within(now[index + 1][1]):
        index += 1
    return now[index]


def _may_be_within(code: CodeType) -> bool:
    return _LIBRARY in code.co_filename or code.co_name.startswith("__")
