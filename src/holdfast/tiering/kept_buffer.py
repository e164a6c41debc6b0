"""Host memory for the image of a snapshot that outlives this process."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from holdfast.format.index import round_up
from holdfast.save.host_memory import GENTLE, TOUCHED_BYTES, HostBuffer, Memory, Readying
from holdfast.storage.kept_memory import KeptMemory

_JOIN_SECONDS: Final = 1.0
_POPULATE_WRITE: Final = 23
"""`MADV_POPULATE_WRITE`: gives pages memory, and leaves what is in them."""


class KeptBuffer(HostBuffer):
    """Host memory for two snapshots in turn, which outlives this process: the newest whole one stays as it is.

    Where there is not enough memory for both, or nothing keeps them, it is like any other buffer, and says so once.
    """

    count = 2

    def __init__(self, kept: KeptMemory, warn: Callable[[str], object]) -> None:
        super().__init__()
        self._kept, self._warn = kept, warn
        self._both: dict[int, Memory] = {}
        # Touches the image of the second save while training goes on after the first.
        self._readying: Readying | None = None

    def take(self, size_bytes: int) -> memoryview:
        """See `HostBuffer`; the image that was kept there is gone."""
        if self._kept.is_open:
            try:
                self._map_both(size_bytes)
                self.memory = self._both[self._kept.take()]
                if self._readying is None:
                    others = [memory for memory in self._both.values() if memory is not self.memory]
                    self._readying = Readying(_touch(others), GENTLE)
                    self._readying.begin()
                return memoryview(self.memory)[:size_bytes]
            except (OSError, MemoryError, OverflowError, ValueError) as error:
                self._give_up(error)
        if self._both:
            self.release()
        return super().take(size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """See `HostBuffer`; what is kept stays."""
        if self._kept.is_open:
            try:
                self._map_both(size_bytes)
                return
            except (OSError, MemoryError, OverflowError, ValueError) as error:
                self._give_up(error)
        super().reserve(size_bytes)

    def touch(self) -> Iterator[Callable[[], object]]:
        """See `HostBuffer`; what is kept stays."""
        if not self._both:
            yield from super().touch()
        yield from _touch([*self._both.values()])

    def release(self) -> None:
        """See `HostBuffer`."""
        self._unmap_both()
        super().release()

    def _map_both(self, size_bytes: int) -> None:
        wanted_bytes = max(round_up(size_bytes), mmap.PAGESIZE)
        if self._both and all(len(memory) >= wanted_bytes for memory in self._both.values()):
            return
        self._unmap_both()
        for number, descriptor in self._kept.grow(wanted_bytes).items():
            self._both[number] = memory = Memory(descriptor, wanted_bytes)
            # A child would go on to have what another process writes into, and the memory would never go.
            memory.madvise(mmap.MADV_DONTFORK)

    def _unmap_both(self) -> None:
        if self._readying is not None:
            self._readying.end()
            self._readying.join(_JOIN_SECONDS)
        self.memory, self._both, self._readying = None, {}, None

    def _give_up(self, error: Exception) -> None:
        problem = self._kept.give_up(str(error) or type(error).__name__)
        self.release()
        self._warn(f"saves are not kept in memory: {problem}")


def _touch(memories: Sequence[Memory]) -> Iterator[Callable[[], object]]:
    for memory in memories:
        for begin in range(0, len(memory), TOUCHED_BYTES):
            yield partial(_populate, memory, begin, min(TOUCHED_BYTES, len(memory) - begin))


def _populate(memory: mmap.mmap, begin: int, size_bytes: int) -> None:
    with suppress(OSError, ValueError):  # The kernel may not know it: then the first copies are slower.
        memory.madvise(_POPULATE_WRITE, begin, size_bytes)
