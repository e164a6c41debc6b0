"""Exceptions that strike in the midst of a save, as those of signal handlers do."""

from __future__ import annotations

import dis
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import holdfast as hf


class Interrupted(BaseException):
    """What a signal handler of the program raises."""


_is_awaited = False


def interrupt_after(seconds: float, act: Callable[[], object]) -> bool:
    """Runs something in the main thread, with an exception that a timer's signal raises in it if it takes longer.

    Returns:
        Whether the exception struck.
    """
    global _is_awaited
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        _is_awaited = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        act()
        _is_awaited = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        return True
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises once: another thread may take the signal, and hand it on when the timer has been stopped."""
    global _is_awaited
    if _is_awaited:
        _is_awaited = False
        raise Interrupted


def save_struck(manager: hf.CheckpointManager, step: int, *calls: int) -> int:
    """Saves, with an exception at so many calls of functions in this thread, and others so many calls later.

    Returns:
        How many of these did strike.
    """
    left, struck = [*calls], 0

    def strike(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal struck
        if event == "call" and left:
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                struck += 1
                # What a profiler raises takes it away; it is put back when that exception is being handled.
                sys.settrace(resume if left else None)
                raise Interrupted

    def resume(frame: FrameType, event: str, argument: Any) -> Any:
        sys.settrace(None)
        sys.setprofile(strike)
        return None

    sys.setprofile(strike)
    try:
        manager.save(step)
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)
        sys.settrace(None)
    return struck


def save_struck_after(manager: hf.CheckpointManager, step: int, number: int) -> int:
    """Saves, with an exception where the call of that number in the manager's or the engine's functions has returned.

    After a call, and at a function's begin, Python runs the handlers of signals; `save_struck` has the latter.

    Returns:
        1 if it did strike, or 0.
    """
    left = number
    struck = 0
    before: dict[FrameType, int] = {}

    def begin(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(_STRUCK):
            return None
        frame.f_trace_opcodes = True
        return strike

    def strike(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left, struck
        if event == "opcode":
            place = before.get(frame)
            before[frame] = frame.f_lasti
            left -= place is not None and dis.opname[frame.f_code.co_code[place]] in _CALLS
            if left == 0 and not struck:
                struck = 1
                sys.settrace(None)
                raise Interrupted
        return strike

    earlier = sys.gettrace()
    sys.settrace(begin)
    try:
        manager.save(step)
    except Interrupted:
        pass
    finally:
        sys.settrace(earlier)
    return struck


_STRUCK = ("holdfast/manager.py", "holdfast/save/engine.py", "holdfast/save/handle.py")
_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")
