"""Who is told of events: the log, running totals, and several at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from holdfast.events.epochs import GroupEnded, NodesTimed
from holdfast.events.event import Event
from holdfast.events.kinds import (
    Committed,
    Diverged,
    Failed,
    GenerationOpened,
    Held,
    PassedOver,
    Resized,
    Restored,
    Retained,
    Skipped,
    Staged,
    Warned,
    Written,
)
from holdfast.events.leaving import Leaving, NoticeHeard

Sink: TypeAlias = Callable[[Event], None]
"""Anything that can be called with an event. It is called on the thread on which the event happened, the training
thread among them, so it should be quick."""

logger = logging.getLogger("holdfast")


def _name_where_nothing_does(record: logging.LogRecord) -> bool:
    """Where no handler is set up, Python prints the bare text of warnings and errors."""
    if not logger.hasHandlers():
        record.msg = f"holdfast: {record.msg}"
    return True


logger.addFilter(_name_where_nothing_does)

_LEVELS: dict[type[Event], int] = {
    GenerationOpened: logging.INFO,
    Staged: logging.DEBUG,
    Held: logging.DEBUG,
    Written: logging.DEBUG,
    Committed: logging.INFO,
    Restored: logging.INFO,
    Resized: logging.WARNING,
    Diverged: logging.WARNING,
    PassedOver: logging.WARNING,
    Retained: logging.DEBUG,
    Failed: logging.ERROR,
    Skipped: logging.WARNING,
    Warned: logging.WARNING,
    GroupEnded: logging.INFO,
    NodesTimed: logging.INFO,
    NoticeHeard: logging.WARNING,
    Leaving: logging.INFO,
}


class LoggingSink:
    """**Thread-safe.** Writes one readable line an event to the logger `holdfast`, at a level that fits its kind."""

    def __call__(self, event: Event) -> None:
        """Logs the event."""
        is_error = isinstance(event, Warned) and event.is_error
        level = logging.ERROR if is_error else _LEVELS.get(type(event), logging.INFO)
        logger.log(level, "%s", event, extra={"event": event})


class Fanout:
    """**Thread-safe.** A sink that tells several.

    A sink that raises breaks nothing: the others are told all the same, and its first error is logged.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)
        # Guards `_failed`, the places of the sinks whose error has been logged.
        self._lock = threading.Lock()
        self._failed: set[int] = set()

    def __call__(self, event: Event) -> None:
        """Tells every sink, in the order in which they were given."""
        for place, sink in enumerate(self._sinks):
            try:
                sink(event)
            except (Exception, SystemExit):
                with self._lock:
                    is_first = place not in self._failed
                    self._failed.add(place)
                if is_first:
                    logger.exception("the event sink %r failed; its further errors are not logged", sink)


class Sums(msgspec.Struct, frozen=True):
    """What has added up over a run.

    Attributes:
        blocked_seconds: How long saves have held up training.
        background_seconds: How long saves were at work behind training.
        training_saved_seconds: The training time that a crash can no longer take away.
        written_bytes: What was written, for saves that failed later as well.
        saves_committed: The saves that succeeded.
        saves_failed: The saves that were begun and are lost.
        saves_skipped: The saves that were asked for and not begun.
        restores: How often state was restored.
        steps_passed_over: The damaged steps that were passed over.
    """

    blocked_seconds: float = 0.0
    background_seconds: float = 0.0
    training_saved_seconds: float = 0.0
    written_bytes: int = 0
    saves_committed: int = 0
    saves_failed: int = 0
    saves_skipped: int = 0
    restores: int = 0
    steps_passed_over: int = 0


class Totals:
    """**Thread-safe.** A sink that adds up, for the report at the end of a run."""

    def __init__(self) -> None:
        # Guards `_sums`: events come from the training thread and from those behind it.
        self._lock = threading.Lock()
        self._sums = Sums()

    @property
    def sums(self) -> Sums:
        """What has added up until now."""
        with self._lock:
            return self._sums

    def __call__(self, event: Event) -> None:
        """Adds the event."""
        with self._lock:
            self._sums = add_event(self._sums, event)


def add_event(sums: Sums, event: Event) -> Sums:
    """**Pure.** The sums with one more event."""
    match event:
        case Staged() | Held():
            return replace(sums, blocked_seconds=sums.blocked_seconds + event.blocked_seconds)
        case Written():
            return replace(sums, written_bytes=sums.written_bytes + event.size_bytes)
        case Committed():
            return replace(
                sums,
                background_seconds=sums.background_seconds + event.background_seconds,
                training_saved_seconds=sums.training_saved_seconds + event.training_saved_seconds,
                saves_committed=sums.saves_committed + 1,
            )
        case Failed(save_lost=True):
            return replace(
                sums,
                background_seconds=sums.background_seconds + event.background_seconds,
                saves_failed=sums.saves_failed + 1,
            )
        case Skipped():
            return replace(sums, saves_skipped=sums.saves_skipped + 1)
        case Restored():
            return replace(sums, restores=sums.restores + 1)
        case PassedOver():
            return replace(sums, steps_passed_over=sums.steps_passed_over + 1)
    return sums
