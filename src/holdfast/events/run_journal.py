"""The events of a run, kept beside its checkpoints."""

from __future__ import annotations

import os
from collections import deque
from typing import Final

from holdfast.events.event import Event
from holdfast.events.journal import JsonLinesSink
from holdfast.events.kinds import (
    GenerationOpened,
)

JOURNAL_NAME: Final = "events.jsonl"
_MAX_WAITING: Final = 100


class RunJournal:
    """Writes events into a run's directory from the moment when this process has become the one that saves there.

    What happened before (a restore, say) waits until then, so that a process that only reads leaves no trace. It is
    called from one thread at a time until the generation is opened, as a manager does.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._sink = JsonLinesSink(os.path.join(directory, JOURNAL_NAME))  # noqa: PTH118  The sink makes it a path.
        self._waiting: deque[Event] | None = deque(maxlen=_MAX_WAITING)

    def __call__(self, event: Event) -> None:
        """Writes the event, or keeps it until a generation is opened."""
        waiting = self._waiting
        if waiting is not None and not isinstance(event, GenerationOpened):
            waiting.append(event)
            return
        if waiting is not None:
            self._waiting = None
            for earlier in waiting:
                self._sink(earlier)
        self._sink(event)
