"""`NoticeSource` and `Notice`: the interface of sources, and what they report."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec.structs import force_setattr

from holdfast.errors import UsageError
from holdfast.numbers import check_seconds


class Demand(enum.IntEnum):
    """The demand of a notice; a larger number asks for more."""

    SAVE = 1
    """Save and continue: the machine may be taken away soon, or is being moved."""
    LEAVE_BY = 2
    """Exit by a known time; until then training may continue."""
    LEAVE = 3
    """Save and exit after the current step."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice that this process, or its machine, is about to be taken away.

    Attributes:
        source: The name of the source that reports it.
        text: The notice in words.
        demand: What it asks for.
        left_seconds: The time from the notice until the process must be gone, at least 0; None if it is not known.
        insists: True if a second notice of this kind means more than the first, as with signals.
        by_hand: True if a person at a terminal asked, and does not want the job to be restarted automatically.
        advice: How to restart the job in this environment, in words; or an empty string.

    Raises:
        UsageError: If a value is not valid.
    """

    source: str
    text: str
    demand: Demand = Demand.LEAVE
    left_seconds: float | None = None
    insists: bool = False
    by_hand: bool = False
    advice: str = ""

    def __post_init__(self) -> None:
        for name in ("source", "text"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be text, got {getattr(self, name)!r}", hint="Pass a str.")
        if not isinstance(self.demand, Demand):
            raise UsageError(f"demand must be a Demand, got {self.demand!r}", hint="For example: Demand.LEAVE.")
        left: object = self.left_seconds
        if left is None:
            return
        # Compared with anything NaN is false: such a notice would be received, and nothing done.
        hint = "Pass a number of seconds, or None if it is not known."
        number = left if isinstance(left, bool) or not isinstance(left, Real) else float(left)
        left_seconds = check_seconds("left_seconds", number, least=-math.inf, most=math.inf, hint=hint)
        force_setattr(self, "left_seconds", max(left_seconds, 0.0))

    def __str__(self) -> str:
        left = "" if self.left_seconds is None else f", {self.left_seconds:.3g} s left"
        return f"{self.text}{left}"


Hear: TypeAlias = Callable[[Notice], bool]
"""Receives a notice, from any thread and from a signal handler. Returns False if it does not accept the notice, which
then has the effect that it would have without holdfast.
"""


@runtime_checkable
class NoticeSource(Protocol):
    """A source of preemption notices. Sources are combined in a list and are independent of each other."""

    @property
    def name(self) -> str:
        """The name of the source in notices and warnings."""
        ...

    @property
    def interval_seconds(self) -> float | None:
        """How long to wait between two looks; None for a source that is not polled, because it reports by itself."""
        ...

    def open(self, hear: Hear) -> None:
        """Starts listening. Called in the thread that creates the handler, so it must not wait.

        Raises:
            UsageError: If the source cannot be used here.
        """
        ...

    def look(self) -> Iterable[Notice]:
        """**Blocks.** Returns the notices since the last look; called in its own thread, and may raise anything.

        A look that raised is tried again, at growing intervals.
        """
        ...

    def note_leaving(self) -> None:
        """**Blocks.** Called when everything is saved and the process exits; it may raise anything."""
        ...

    def close(self) -> None:
        """Stops listening, and ends a look in progress in another thread. Called in the thread that called `open`."""
        ...


class PolledSource:
    """Base class of sources that are polled."""

    def open(self, hear: Hear) -> None:
        """Does nothing."""

    def note_leaving(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
