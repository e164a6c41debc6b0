"""Small errands to the store for a thread that must not wait: the one that trains."""

from __future__ import annotations

import _thread
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.gate import Gate

_CLOSE_SECONDS: Final = 2.0


class Courier:
    """One thread that does errands in order, and looks at something now and then.

    An errand that fails is left at that: the store is gone then, which those who wait for it find out for themselves.
    """

    def __init__(self, look: Callable[[], None], interval_seconds: float) -> None:
        """Starts the thread.

        Args:
            look: What to do when there has been no errand for a while.
            interval_seconds: How long that is.
        """
        self._look = look
        self._interval_seconds = interval_seconds
        self._errands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ended = Gate()
        # Unlike `Thread.start` this cannot be interrupted half-way.
        _thread.start_new_thread(self._run, ())

    def send(self, errand: Callable[[], object]) -> None:
        """**Thread-safe.** Has something done soon; returns at once."""
        self._errands.put(errand)

    def close(self) -> None:
        """**Blocks** for a moment. Ends the thread, once it has done what was sent before; harmless twice."""
        self._errands.put(None)
        self._ended.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                errand: Callable[[], object] | None = self._look
                with suppress(queue.Empty):
                    errand = self._errands.get(timeout=self._interval_seconds)
                if errand is None:
                    return
                with suppress(HoldfastError):
                    errand()
        finally:
            self._ended.open()
