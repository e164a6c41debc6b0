"""The events of a run in a bucket, whose objects cannot be appended to: each start of a job has one of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.events import Event, GenerationOpened
from holdfast.events.sinks import encode_event, logger
from holdfast.format.names import events_path
from holdfast.process.exit import register_drain, unregister_drain
from holdfast.process.latch import Latch, start_thread

_MOST_BYTES: Final = 4 << 20
"""The newest events of a job are kept up to this size: some tens of thousands."""
_FIRST_SECONDS: Final = 1.0
_WRITE_SECONDS: Final = 60.0
_END_SECONDS: Final = 5.0
"""The end of a job waits so long for its last events."""


class ObjectJournal:
    """**Thread-safe.** A sink that keeps the events of this start, and replaces their object once a minute at most.

    It exists once this process has opened a generation, and has the number of that. A thread of its own writes it: a
    failure is logged once, and holds up nothing.
    """

    def __init__(self, replace: Callable[[str, bytes], object]) -> None:
        """`replace` puts an object in place of an older one."""
        self._replace = replace
        # Guards all below: what is kept, how many events there were, and how many of them are written.
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._size_bytes = self._count = self._written = 0
        self._path = ""
        self._closing, self._ended = Latch(), Latch()
        self._ended.open()
        # Held while the object is written.
        self._writing = threading.Lock()
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Keeps the event, to be written soon."""
        line = encode_event(event) + b"\n"
        with self._lock:
            self._lines.append(line)
            self._count += 1
            self._size_bytes += len(line)
            while self._size_bytes > _MOST_BYTES:
                self._size_bytes -= len(self._lines.popleft())
            if not self._path and isinstance(event, GenerationOpened):
                self._path = events_path(event.generation)
            if not self._path:
                return
            if self._closing.is_open or self._ended.is_open:
                self._closing = Latch()
                self._ended = start_thread(partial(self._write_on, self._closing), "holdfast-journal")
        register_drain(self)

    def close(self) -> None:
        """**Blocks.** Writes what is left, for a few seconds at most. Later events are written at the program's end."""
        unregister_drain(self)
        with self._lock:
            self._closing.open()
            ended = self._ended
        ended.wait(_END_SECONDS)

    def drain(self) -> list[HoldfastError]:
        """**Blocks.** Called when the program ends, or is about to be ended."""
        self.close()
        return []

    def _write_on(self, closing: Latch) -> None:
        seconds = _FIRST_SECONDS
        while True:
            is_last = closing.wait(seconds)
            with self._writing:
                self._write()
            if is_last:
                return
            seconds = _WRITE_SECONDS

    def _write(self) -> None:
        with self._lock:
            count, data = self._count, b"".join(self._lines)
        if count == self._written:
            return
        try:
            self._replace(self._path, data)
            self._written = count
        except Exception as error:  # noqa: BLE001  No save and no restore needs it.
            if not self._has_failed:
                self._has_failed = True
                logger.warning("the run's events are not recorded (saves and restores don't need them): %s", error)
