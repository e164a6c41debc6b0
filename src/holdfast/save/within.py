"""Whether a call was made from within another one, as a signal handler makes it."""

from __future__ import annotations

import sys
from types import FrameType, MethodType
from typing import cast


def is_within(call: object, **arguments: object) -> bool:
    """Whether this thread is in that call at the moment, and whatever asks was called from there.

    A flag that the call sets and clears would tell the same, but not after an interrupt between the two.

    Args:
        call: A method, bound to its object; of the same method of other objects nothing is said.
        **arguments: What it was called with, where it matters.
    """
    method = cast("MethodType", call)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is method.__func__.__code__:
            found = frame.f_locals
            if all(found.get(name) is value for name, value in {"self": method.__self__, **arguments}.items()):
                return True
        frame = frame.f_back
    return False
