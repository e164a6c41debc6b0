"""What the machine can do for as many processes at once that only copy, write or read the same bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.limits import NEW_FILE, address_of, move_all, plan_moves, read_into, write_directly
from benchmarks.timing import timed

_PAGE_BYTES: Final = mmap.PAGESIZE
_BLOCK_BYTES: Final = 8 << 20
_THREADS: Final = (1, 2)
_COPIES: Final = 3


class BareWorker:
    """One process of those that do it at once.

    What is replicated is copied and written by all processes together, a part by each, and read whole by each.
    """

    def __init__(
        self,
        directory: Path,
        pieces: Sequence[tuple[int, int]],
        rank: int,
        workers: int,
        meet: Callable[[], object],
        *,
        is_replicated: bool,
    ) -> None:
        """**Collective.** Touches the memory that it needs.

        Args:
            directory: Where to write.
            pieces: The memory that this process holds: addresses and lengths.
            rank: The number of this process.
            workers: How many processes there are.
            meet: Waits for the others.
            is_replicated: Whether all processes hold the same.
        """
        self._meet = meet
        whole_bytes = sum(length for _, length in pieces)
        own = _part(pieces, rank, workers) if is_replicated else list(pieces)
        own_bytes = sum(length for _, length in own)
        padded_bytes = max(_PAGE_BYTES, _padded(own_bytes))
        self._path = directory / f"bare-{rank}"
        # Each process reads what it holds: where that is the whole, from the files of all.
        sources = range(workers) if is_replicated else [rank]
        self._sources = [directory / f"bare-{source}" for source in sources]
        self._buffer = mmap.mmap(-1, max(padded_bytes, _padded(whole_bytes)) + workers * _PAGE_BYTES)
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        # Touched here, once: the first touch of a page is the machine's affair, not the copy's.
        ctypes.memset(address_of(self._buffer), 1, len(self._buffer))
        self._own = memoryview(self._buffer)[:padded_bytes]
        self._moves = plan_moves(own, self._buffer)

    def measure(self) -> dict[str, float]:
        """**Collective.** The seconds of this process: of a usual copy, and of the best way to write and to read."""
        return {
            "copy": median(self._alone(lambda: move_all(self._moves)) for _ in range(_COPIES)),
            "write": min(self._write(threads, NEW_FILE) for threads in _THREADS),
            "rewrite": min(self._write(threads, os.O_WRONLY) for threads in _THREADS),
            **self.measure_read(),
        }

    def measure_read(self) -> dict[str, float]:
        """**Collective.** The reads alone; files that are not there yet are written first."""
        if not self._path.exists():
            self._write(1, NEW_FILE)
        return {"read_cold": min(self._read(threads) for threads in _THREADS)}

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def _alone(self, action: Callable[[], None]) -> float:
        """Begins with the others, and ends before they begin something else."""
        self._meet()
        seconds = timed(action)
        self._meet()
        return seconds

    def _write(self, threads: int, flags: int) -> float:
        return self._alone(lambda: write_directly(self._path, self._own, _BLOCK_BYTES, threads, flags))

    def _read(self, threads: int) -> float:
        def read() -> None:
            view = memoryview(self._buffer)
            for source in self._sources:
                size_bytes = source.stat().st_size
                read_into(source, view[:size_bytes], _BLOCK_BYTES, threads)
                view = view[size_bytes:]

        return self._alone(read)


def _part(pieces: Sequence[tuple[int, int]], rank: int, workers: int) -> list[tuple[int, int]]:
    """**Pure.** What one of so many processes takes of pieces of memory: about as many bytes as the others."""
    whole_bytes = sum(length for _, length in pieces)
    begin, end = rank * whole_bytes // workers, (rank + 1) * whole_bytes // workers
    found, at = [], 0
    for address, length in pieces:
        first, last = max(begin, at), min(end, at + length)
        if first < last:
            found.append((address + first - at, last - first))
        at += length
    return found


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
