"""`NoticeSource` and `Notice`: the interface of sources, what they report, and how all are listened to at once."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Real
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec.structs import force_setattr

from holdfast.errors import UsageError
from holdfast.events import Event, Warned
from holdfast.numbers import check_seconds
from holdfast.process.latch import Latch, start_thread

_LONGEST_PAUSE_SECONDS: Final = 60.0
_END_SECONDS: Final = 2.0


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


class SourcePoller:
    """Opens sources, polls those that need polling, and closes them.

    A source that raises is polled again at growing intervals, with one warning, and does not affect the others. Notices
    are passed on from the thread in which they arrive, which may be inside a signal handler.

    Attributes:
        sources: The sources.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        hear: Hear,
        emit: Callable[[Event], object],
        *,
        pause_seconds: float = 1.0,
    ) -> None:
        self.sources = tuple(sources)
        self._hear = hear
        self._emit = emit
        self._pause_seconds = pause_seconds
        self._opened: list[NoticeSource] = []
        self._ended: list[Latch] = []
        self._closing = Latch()

    def open(self) -> None:
        """Starts listening; waits for nothing.

        Raises:
            UsageError: If a source cannot be used here. Then none listens.
        """
        try:
            for source in self.sources:
                self._opened.append(source)
                source.open(self._hear)
        except BaseException:
            self.close()
            raise
        for source in self.sources:
            if source.interval_seconds is not None:
                name = f"holdfast-notices-{source.name.replace(' ', '-')}"
                self._ended.append(start_thread(partial(self._look_on, source), name))

    def note_leaving(self) -> None:
        """**Blocks.** Notifies the sources that everything is saved and the process exits."""
        for source in self._opened:
            try:
                source.note_leaving()
            except Exception as error:  # noqa: BLE001  A source can be of the user's, and leaving goes on.
                self._emit(Warned(text=f"{source.name} could not be notified that the job is leaving: {_say(error)}"))

    def close(self) -> None:
        """**Blocks** for a moment at most: a poll that does not end is abandoned."""
        self._closing.open()
        opened, self._opened = self._opened, []
        for source in reversed(opened):
            try:
                source.close()
            except Exception as error:  # noqa: BLE001  As above.
                self._emit(Warned(text=f"{source.name} could not be closed: {_say(error)}"))
        ended, self._ended = self._ended, []
        for latch in ended:
            latch.wait(_END_SECONDS)

    def _look_on(self, source: NoticeSource) -> None:
        pause_seconds = self._pause_seconds
        is_warned = False
        while not self._closing.is_open:
            try:
                for notice in source.look():
                    self._hear(notice)
                wait_seconds = source.interval_seconds or 0.0
                if not wait_seconds >= 0:
                    raise ValueError(f"interval_seconds={wait_seconds!r} is not a number of seconds")
                self._closing.wait(wait_seconds)
                pause_seconds = self._pause_seconds
            except BaseException as error:  # noqa: BLE001  A source can be of the user's, and this thread is ours.
                wait_seconds = pause_seconds
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
                # One that is closed meanwhile fails for that reason.
                if not is_warned and not self._closing.is_open:
                    is_warned = True
                    text = f"{source.name} cannot be queried for notices; it will be tried again: {_say(error)}"
                    self._emit(Warned(text=text))
                self._closing.wait(wait_seconds)


def _say(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}" if str(error) else name
    except Exception:  # noqa: BLE001  So can the error.
        return name
