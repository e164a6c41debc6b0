"""The most host memory that anything on the machine took, pinned and shared memory included."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_INTERVAL_SECONDS: Final = 0.02


class HostMemory:
    """What is available now, against the least that was while a body ran.

    Pinned memory counts to no process. So the machine as a whole is looked at, which has to be quiet. What the page
    cache holds is available.

    Attributes:
        peak_bytes: What was taken at most.
    """

    def __init__(self) -> None:
        self._at_first = _available_bytes()
        self.peak_bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Looks fifty times a second."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_INTERVAL_SECONDS):
                self.peak_bytes = max(self.peak_bytes, self._at_first - _available_bytes())

        thread = threading.Thread(target=look, name="host-memory", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0
