"""What the machine itself can do: copy, write and read the same bytes with nothing else to do."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import page_cache
from benchmarks.timing import timed
from benchmarks.workloads import Place

_PAGE_BYTES: Final = 4096
_COPY_BYTES: Final = 4 << 20
WRITE_BLOCKS: Final = (2 << 20, 8 << 20, 16 << 20)
READ_BLOCKS: Final = (2 << 20, 8 << 20)
READ_THREADS: Final = (2, 4)
NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class BareCopy:
    """Copies every tensor that the peers save into memory that has been touched, with two threads."""

    def __init__(self, memory: mmap.mmap, target: mmap.mmap, places: Sequence[Place]) -> None:
        # The moves are addresses only.
        self._kept = memory, target
        source = address_of(memory)
        self._moves = plan_moves([(source + place.begin, place.end - place.begin) for place in places], target)
        self._half = _middle([length for _, _, length in self._moves])

    def seconds(self) -> float:
        """One copy."""
        halves = (self._moves[: self._half], self._moves[self._half :])
        return timed(lambda: _together([partial(move_all, half) for half in halves]))


class Limits:
    """The bare operations, on the tensors that the peers save. In seconds; of the disk, the best of a few ways."""

    def __init__(self, directory: Path, memory: mmap.mmap, places: Sequence[Place]) -> None:
        self._path = directory / "limit"
        self._size_bytes = sum(place.end - place.begin for place in places)
        self._padded_bytes = -(-self._size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._buffer = mmap.mmap(-1, self._padded_bytes)
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        # Touched here, once: the first touch of a page is the machine's affair, not the copy's.
        ctypes.memset(address_of(self._buffer), 1, self._padded_bytes)
        self._copy = BareCopy(memory, self._buffer, places)

    def copy_seconds(self) -> float:
        """The median of three copies, not the best: a save copies once, at whatever pace the memory has then."""
        return median(self._copy.seconds() for _ in range(3))

    def write_seconds(self) -> float:
        """Direct writes by two threads into a new file that has its room already, the fsync counted."""
        best = min(self._write(block) for block in WRITE_BLOCKS)
        page_cache.drop(self._path.parent)
        return best

    def rewrite_seconds(self) -> float:
        """The same over the bytes of a file that is there. `write_seconds` comes before."""
        return min(self._write(block, os.O_WRONLY) for block in WRITE_BLOCKS)

    def read_cold_seconds(self) -> float:
        """Direct reads into memory that has been touched. `write_seconds` comes before."""
        return min(self._read(block, threads, os.O_DIRECT) for block in READ_BLOCKS for threads in READ_THREADS)

    def read_warm_seconds(self) -> float:
        """Reads by two threads of a file that is in the page cache. `write_seconds` comes before."""
        page_cache.fill(self._path.parent)
        return min(self._read(block, 2, 0) for block in READ_BLOCKS)

    def remove(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def _write(self, block_bytes: int, flags: int = NEW_FILE) -> float:
        return timed(lambda: write_directly(self._path, memoryview(self._buffer), block_bytes, 2, flags))

    def _read(self, block_bytes: int, threads: int, flag: int) -> float:
        return timed(lambda: read_into(self._path, memoryview(self._buffer), block_bytes, threads, flag))


def plan_moves(sources: Sequence[tuple[int, int]], target: mmap.mmap) -> list[tuple[int, int, int]]:
    """Moves of pieces of memory, by address and length, to one place after the other: to, from and how many bytes."""
    to, moves = address_of(target), []
    for source, size_bytes in sources:
        for begin in range(0, size_bytes, _COPY_BYTES):
            length = min(_COPY_BYTES, size_bytes - begin)
            moves.append((to, source + begin, length))
            to += length
    return moves


def move_all(moves: Sequence[tuple[int, int, int]]) -> None:
    """**Blocks.** Makes the moves in this thread."""
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
    """Where it lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


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
    """Transfers each block once, each thread taking every so-manieth."""

    def work(first: int) -> None:
        for begin in range(first * block_bytes, size_bytes, threads * block_bytes):
            transfer(begin, min(begin + block_bytes, size_bytes))

    _together([lambda number=number: work(number) for number in range(threads)])  # type: ignore[misc]


def _together(jobs: Sequence[Callable[[], None]]) -> None:
    """Runs the jobs in a thread each, the first in this one; raises the first error."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  It is raised below, in the thread that asked.
            errors.append(error)

    others = [threading.Thread(target=guarded, args=(job,)) for job in jobs[1:]]
    for thread in others:
        thread.start()
    guarded(jobs[0])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
