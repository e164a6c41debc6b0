"""The events of a run, kept beside its checkpoints."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import Final

from holdfast.events.event import Event
from holdfast.events.journal import JsonLinesSink
from holdfast.events.kinds import (
    GenerationOpened,
)

JOURNAL_NAME: Final = "events.jsonl"
JOURNAL_NAMES: Final = ("events.1.jsonl", JOURNAL_NAME)
"""The file that was put aside, if there is one, and the one that is written."""
_MAX_WAITING: Final = 100

logger = logging.getLogger("holdfast")


class RunJournal:
    """**Thread-safe.** Writes events into a run's directory once this process has become the one that saves there.

    What happened before (a restore, say) waits until then, so that a process that only reads leaves no trace. Where
    the file cannot be written, a warning says so, once: saves and restores need it not.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = os.path.join(directory, JOURNAL_NAME)  # noqa: PTH118  The sink makes it a path.
        # Nothing outside the run's directory is written, whatever somebody has put there.
        self._sink = JsonLinesSink(path, follow_link=False)
        self._has_failed = False
        self._waiting: deque[Event] | None = deque(maxlen=_MAX_WAITING)
        # Guards what waits: an event that comes while the others are written is neither lost nor written before them.
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Writes the event, or keeps it until a generation is opened."""
        with self._lock:
            waiting = self._waiting
            if waiting is not None and not isinstance(event, GenerationOpened):
                waiting.append(event)
                return
            if waiting is not None:
                self._waiting = None
                for earlier in waiting:
                    self._write(earlier)
        self._write(event)

    def _write(self, event: Event) -> None:
        try:
            self._sink(event)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("the run's events are not kept; saves and restores need them not: %s", error)
