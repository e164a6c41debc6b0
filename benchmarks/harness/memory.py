"""Counts what processes hold, seen from outside: memory, descriptors, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INTERVAL_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class Held:
    """The things that some processes hold together."""

    size_bytes: int
    descriptors: int
    threads: int


class MemoryWatch:
    """The largest amount that was seen while a body ran.

    Attributes:
        count: Counts the bytes that are held now.
        peak_bytes: The largest amount.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count
        self.peak_bytes = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Looks a hundred times a second."""
        self.peak_bytes = self.count()
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_INTERVAL_SECONDS):
                self.peak_bytes = max(self.peak_bytes, self.count())

        thread = threading.Thread(target=look, name="memory-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.peak_bytes = max(self.peak_bytes, self.count())


def held_bytes(pid: int) -> int:
    """The memory that a process and its descendants hold now.

    Counted are anonymous memory, and shared memory once however many of the processes show it. Pages of files are left
    out: the kernel takes them back when it needs them.
    """
    anonymous, shared = 0, 0
    for member in _family(pid):
        own = _read_sizes(Path(f"/proc/{member}/status"))
        anonymous += own.get("RssAnon", 0)
        shared = max(shared, own.get("RssShmem", 0))
    return anonymous + shared


def taken_bytes() -> int:
    """The memory that all on this machine hold now. Pinned memory counts to no process."""
    sizes = _read_sizes(Path("/proc/meminfo"))
    return sizes["MemTotal"] - sizes["MemAvailable"]


def count_held(pid: int) -> Held:
    """Counts what a process and its descendants hold now."""
    descriptors = threads = 0
    for member in _family(pid):
        threads += _count(Path(f"/proc/{member}/task"))
        descriptors += _count(Path(f"/proc/{member}/fd"))
    return Held(held_bytes(pid), descriptors, threads)


def _count(directory: Path) -> int:
    try:
        return sum(1 for _ in directory.iterdir())
    except OSError:
        return 0  # The process has ended meanwhile.


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            text = children.read_text()
        except OSError:
            continue  # The thread has ended meanwhile.
        for child in text.split():
            yield from _family(int(child))


def _read_sizes(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}  # The process has ended meanwhile.
    fields = (line.partition(":") for line in lines)
    return {key: int(rest.split()[0]) * 1024 for key, _, rest in fields if rest.endswith(" kB")}
