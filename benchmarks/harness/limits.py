"""The machine's own limits: copies, writes and reads of the same bytes with nothing else to do."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.harness import page_cache
from benchmarks.harness.timing import timed

_PAGE_BYTES: Final = mmap.PAGESIZE
_COPY_BYTES: Final = 4 << 20
_COPIES: Final = 3
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL

Pieces = Sequence[tuple[int, int]]
"""Pieces of memory: addresses and lengths."""


@dataclass(frozen=True, slots=True)
class Tries:
    """The ways that are tried. Of a disk, the quickest one counts.

    Attributes:
        copy_threads: How many threads copy.
        writes: How many bytes each call writes, and how many threads call.
        reads: The same for reads past the page cache.
        warm_reads: The same for reads of what is in the page cache; empty to leave these out.
    """

    copy_threads: int
    writes: Sequence[tuple[int, int]]
    reads: Sequence[tuple[int, int]]
    warm_reads: Sequence[tuple[int, int]] = ()


ALONE: Final = Tries(
    2,
    [(2 << 20, 2), (8 << 20, 2), (16 << 20, 2)],
    [(2 << 20, 2), (2 << 20, 4), (8 << 20, 2), (8 << 20, 4)],
    [(2 << 20, 2), (8 << 20, 2)],
)
"""For one process."""
TOGETHER: Final = Tries(1, [(8 << 20, 1), (8 << 20, 2)], [(8 << 20, 1), (8 << 20, 2)])
"""For each of several processes at once."""


class BareCopy:
    """Copies pieces of memory into memory that has been touched."""

    def __init__(self, pieces: Pieces, target: mmap.mmap, threads: int) -> None:
        self._target = target
        to, moves = address_of(target), []
        for source, size_bytes in pieces:
            for begin in range(0, size_bytes, _COPY_BYTES):
                length = min(_COPY_BYTES, size_bytes - begin)
                moves.append((to, source + begin, length))
                to += length
        half = _middle([length for _, _, length in moves])
        self._parts = [moves] if threads == 1 else [moves[:half], moves[half:]]

    def seconds(self) -> float:
        """One copy."""
        return timed(self)

    def __call__(self) -> None:
        """**Blocks.** Copies."""
        _together([partial(_move_all, part) for part in self._parts])


class Limits:
    """The bare operations, on the memory that contenders save: by one process, or by several at once.

    What several processes all hold is copied and written by all together, a part by each, and read whole by each.
    """

    def __init__(
        self,
        directory: Path,
        pieces: Pieces,
        tries: Tries,
        *,
        rank: int = 0,
        workers: int = 1,
        is_replicated: bool = False,
        meet: Callable[[], object] = lambda: None,
    ) -> None:
        """**Collective.** Touches the memory that it needs.

        Args:
            directory: Where to write.
            pieces: The memory that this process holds.
            tries: What to try.
            rank: The number of this process.
            workers: How many processes there are.
            is_replicated: Whether all processes hold the same.
            meet: Waits for the others.
        """
        self._tries, self._meet = tries, meet
        whole_bytes = sum(length for _, length in pieces)
        own = _part(pieces, rank, workers) if is_replicated else pieces
        padded_bytes = max(_PAGE_BYTES, _padded(sum(length for _, length in own)))
        self._path = directory / f"bare-{rank}"
        # Each process reads what it holds: where that is the whole, from the files of all.
        sources = range(workers) if is_replicated else [rank]
        self._sources = [directory / f"bare-{source}" for source in sources]
        self._buffer = mmap.mmap(-1, max(padded_bytes, _padded(whole_bytes)) + workers * _PAGE_BYTES)
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        # Touched here, once: the first touch of a page is not a part of the copy.
        ctypes.memset(address_of(self._buffer), 1, len(self._buffer))
        self._own = memoryview(self._buffer)[:padded_bytes]
        self._copy = BareCopy(own, self._buffer, tries.copy_threads)

    def measure(self) -> dict[str, float]:
        """**Collective.** All limits, in seconds: of a usual copy, and of the best way to write and to read."""
        # The median of some copies, not the best: a save copies once, at the pace that the memory has then.
        copy = median(self._alone(self._copy) for _ in range(_COPIES))
        write = min(self._write(*how, NEW_FILE) for how in self._tries.writes)
        rewrite = min(self._write(*how, os.O_WRONLY) for how in self._tries.writes)
        page_cache.drop(self._path.parent)
        figures = {"copy": copy, "write": write, "rewrite": rewrite, **self.measure_read()}
        if self._tries.warm_reads:
            page_cache.fill(self._path.parent)
            figures["read_warm"] = min(self._read(*how, 0) for how in self._tries.warm_reads)
        return figures

    def measure_read(self) -> dict[str, float]:
        """**Collective.** The reads alone; files that are not there yet are written first."""
        if not self._path.exists():
            self._write(*self._tries.writes[0], NEW_FILE)
        return {"read_cold": min(self._read(*how, os.O_DIRECT) for how in self._tries.reads)}

    def close(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def _alone(self, action: Callable[[], None]) -> float:
        """Begins with the others, and ends before they begin something else."""
        self._meet()
        seconds = timed(action)
        self._meet()
        return seconds

    def _write(self, block_bytes: int, threads: int, flags: int) -> float:
        return self._alone(lambda: write_directly(self._path, self._own, block_bytes, threads, flags))

    def _read(self, block_bytes: int, threads: int, flag: int) -> float:
        def read() -> None:
            view = memoryview(self._buffer)
            for source in self._sources:
                size_bytes = source.stat().st_size
                read_into(source, view[:size_bytes], block_bytes, threads, flag)
                view = view[size_bytes:]

        return self._alone(read)


def _move_all(moves: Sequence[tuple[int, int, int]]) -> None:
    move = ctypes.memmove
    for to, of, length in moves:
        move(to, of, length)


def write_directly(path: Path, view: memoryview, block_bytes: int, threads: int, flags: int = NEW_FILE) -> None:
    """**Blocks.** Writes whole pages past the page cache, into a new file or the one that is there, and syncs it."""
    if flags & os.O_EXCL:
        path.unlink(missing_ok=True)
    descriptor = os.open(path, flags | os.O_DIRECT)
    try:
        os.posix_fallocate(descriptor, 0, len(view))
        _spread(
            lambda begin, end: _all(os.pwrite(descriptor, view[begin:end], begin), end - begin),
            len(view),
            block_bytes,
            threads,
        )
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_into(path: Path, view: memoryview, block_bytes: int, threads: int, flag: int = os.O_DIRECT) -> None:
    """**Blocks.** Reads a file of as many bytes into memory; past the page cache, unless other flags are given."""
    descriptor = os.open(path, os.O_RDONLY | flag)
    try:
        _spread(
            lambda begin, end: _all(os.preadv(descriptor, [view[begin:end]], begin), end - begin),
            len(view),
            block_bytes,
            threads,
        )
    finally:
        os.close(descriptor)


def address_of(memory: mmap.mmap) -> int:
    """The address at which it begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _part(pieces: Pieces, rank: int, workers: int) -> list[tuple[int, int]]:
    """**Pure.** The part of pieces of memory that one of so many processes takes: about as many bytes as the others."""
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


def _middle(lengths: Sequence[int]) -> int:
    """Where to cut a list so that both parts have about as many bytes."""
    half, total = sum(lengths) / 2, 0
    for number, length in enumerate(lengths):
        total += length
        if total >= half:
            return number + 1
    return len(lengths)


def _all(done_bytes: int, wanted_bytes: int) -> None:
    if done_bytes != wanted_bytes:
        raise OSError(f"{done_bytes} of {wanted_bytes} bytes were transferred")


def _spread(transfer: Callable[[int, int], None], size_bytes: int, block_bytes: int, threads: int) -> None:
    """Transfers each block once, shared out over the threads."""

    def work(first: int) -> None:
        for begin in range(first * block_bytes, size_bytes, threads * block_bytes):
            transfer(begin, min(begin + block_bytes, size_bytes))

    _together([lambda number=number: work(number) for number in range(threads)])  # type: ignore[misc]


def _together(jobs: Sequence[Callable[[], None]]) -> None:
    """Runs the jobs in a thread each, the first in this one; raises the first error."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        others = [pool.submit(job) for job in jobs[1:]]
        jobs[0]()
        for other in others:
            other.result()
