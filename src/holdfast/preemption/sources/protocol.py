"""What a source of notices says, and what a source is."""

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
    """What a notice asks for; the larger the number, the more it asks."""

    SAVE = 1
    """Save and go on: the machine may be taken away soon, or is moved."""
    LEAVE_BY = 2
    """Be gone at a known time; until then training may go on."""
    LEAVE = 3
    """Save and leave after the step in progress."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """That this process, or the machine that it runs on, is about to be taken away.

    Attributes:
        source: The name of the source that heard it.
        text: What was heard, for people.
        demand: What it asks for.
        left_seconds: The time from when it was heard until the process must be gone, at least 0; None if that is not
            known.
        insists: Whether a second one of this kind means more than the first: signals do.
        by_hand: Whether a person at a terminal asked, who does not want the job to be started again by itself.
        advice: How the job is started again where this source speaks, for people; or an empty string.

    Raises:
        UsageError: If one of them is not what it has to be: `left_seconds` no real number, say.
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
        # Compared with anything NaN is false: such a notice would be heard, and nothing done.
        hint = "Pass a number of seconds, or None if it is not known."
        number = left if isinstance(left, bool) or not isinstance(left, Real) else float(left)
        left_seconds = check_seconds("left_seconds", number, least=-math.inf, most=math.inf, hint=hint)
        force_setattr(self, "left_seconds", max(left_seconds, 0.0))

    def __str__(self) -> str:
        left = "" if self.left_seconds is None else f", {self.left_seconds:.3g} s left"
        return f"{self.text}{left}"


Hear: TypeAlias = Callable[[Notice], bool]
"""Takes a notice, from any thread and from a signal handler. False if it is not taken: what was heard then has the
effect that it would have without holdfast."""


@runtime_checkable
class NoticeSource(Protocol):
    """A place where a notice may be heard. Sources are combined in a list; none of them has to know of the others."""

    @property
    def name(self) -> str:
        """What the source is called in notices and warnings."""
        ...

    @property
    def interval_seconds(self) -> float | None:
        """How long to wait between two looks; None for a source that is never looked at, since it tells by itself."""
        ...

    def open(self, hear: Hear) -> None:
        """Begins to listen. Called in the thread that makes the handler, so it does not wait for anything.

        Raises:
            UsageError: If the source cannot be used here.
        """
        ...

    def look(self) -> Iterable[Notice]:
        """**Blocks.** What has been heard since the last look; called in a thread of its own, and may raise anything.

        A look that has raised is tried again, ever more seldom.
        """
        ...

    def note_leaving(self) -> None:
        """**Blocks.** Told when all is saved and the process leaves; it may raise anything."""
        ...

    def close(self) -> None:
        """Ends listening, also a look under way in another thread. Called in the thread that called `open`."""
        ...


class PolledSource:
    """What sources have in common that have to be looked at."""

    def open(self, hear: Hear) -> None:
        """Nothing is done before the first look."""

    def note_leaving(self) -> None:
        """No one needs to know."""

    def close(self) -> None:
        """There is nothing to be ended."""
