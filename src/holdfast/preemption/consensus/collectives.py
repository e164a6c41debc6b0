"""The collectives of the frameworks in use: how many were begun, whether a thread is in one, and how to abort them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from types import CodeType
from typing import Final, Protocol, cast

_MODULES: Final = {"torch.distributed": "holdfast.integrations.torch.collectives"}
"""By framework; imported by name, and only where the framework is in use."""


_LIBRARY: Final = f"{os.sep}torch{os.sep}"
"""What the paths of the library's files have in common."""


class Collectives(Protocol):
    """Those of one framework."""

    def count_begun(self) -> int | None:
        """How many this process has begun among all workers; None if there are none, or that is not known."""
        ...

    def abort(self) -> None:
        """Aborts all; whoever waits in one gets an error. It may block; none can be used after it."""
        ...


def find_collectives() -> Iterator[Collectives]:
    """Those of the frameworks that are in use."""
    for framework, module in _MODULES.items():
        if framework in sys.modules:
            yield cast("Collectives", import_module(module))


def count_begun() -> int | None:
    """How many collectives among all workers this process has begun; None if that is not known."""
    counts = [count for each in find_collectives() if (count := each.count_begun()) is not None]
    return sum(counts) if counts else None


def find_library_call(thread: int) -> list[tuple[int, CodeType, int]] | None:
    """Where a thread is, if the innermost function that it is in is one of the library's: as long as it is, the same.

    Each frame is named by its address, so as not to be kept, its code, and the instruction that it is at.
    """
    frame = sys._current_frames().get(thread)
    if frame is None or _LIBRARY not in frame.f_code.co_filename:
        return None
    places = []
    while frame is not None:
        places.append((id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return places
