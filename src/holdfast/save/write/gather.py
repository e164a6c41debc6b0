"""Writes those arrays of a snapshot that have changed, as a data file of their own."""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import msgspec

from holdfast.format.layout import ALIGNMENT_BYTES, Layout
from holdfast.storage.protocol import FileWriter
from holdfast.storage.worker_pool import WorkerPool

_PIECE_BYTES: Final = 8 << 20
"""One write."""

_GATHERED_BYTES: Final = 1 << 20
"""One write where anything has to be gathered: each thread has memory of its own for that, fresh with each save."""


class Move(msgspec.Struct, frozen=True):
    """Adjacent bytes of the image that are adjacent in the file as well.

    Attributes:
        begin: Where they begin in the file.
        end: Where they end in the file, exclusive.
        image_begin: Where they begin in the image.
    """

    begin: int
    end: int
    image_begin: int


def plan_moves(layout: Layout, image_begins: Mapping[str, int]) -> list[Move]:
    """**Pure.** Where the arrays of a file come from, in the order of the file, as few moves as possible.

    Args:
        layout: The file.
        image_begins: Where each of its arrays begins in the image.
    """
    moves: list[Move] = []
    for place in layout.places:
        image_begin = image_begins[place.name]
        if place.begin == place.end:
            continue
        last = moves[-1] if moves else None
        if last is not None and image_begin - last.image_begin == place.begin - last.begin:
            moves[-1] = Move(last.begin, place.end, last.image_begin)
        else:
            moves.append(Move(place.begin, place.end, image_begin))
    return moves


def write_gathered(image: memoryview, layout: Layout, moves: list[Move], writer: FileWriter, pool: WorkerPool) -> None:
    """**Blocks.** Writes the file that a layout describes, all but its last sync.

    A piece that lies in the image as it lies in the file, page for page, is written from there; any other one is
    gathered in aligned memory first.

    Args:
        image: The host memory that the moves are from; it begins on a page.
        layout: The file.
        moves: Where its arrays come from.
        writer: The open file.
        pool: The threads that write.

    Raises:
        StorageError: If the place fails.
    """
    lies_alike = len(moves) == 1 and (moves[0].image_begin - moves[0].begin) % ALIGNMENT_BYTES == 0
    # The header is gathered in any case, by one thread.
    piece_bytes = _PIECE_BYTES if lies_alike else _GATHERED_BYTES
    pool.run(_pieces(_Gathering(image, layout, writer, piece_bytes), moves, piece_bytes))


def _pieces(gathering: _Gathering, moves: list[Move], piece_bytes: int) -> Iterator[Callable[[], None]]:
    size_bytes = gathering.layout.size_bytes
    ahead = 0
    for begin in range(0, size_bytes, piece_bytes):
        end = min(begin + piece_bytes, size_bytes)
        while ahead < len(moves) and moves[ahead].end <= begin:
            ahead += 1
        last = ahead
        while last < len(moves) and moves[last].begin < end:
            last += 1
        yield partial(gathering.write_piece, begin, end, moves[ahead:last])


class _Gathering:
    """**Thread-safe.** One file in the making."""

    def __init__(self, image: memoryview, layout: Layout, writer: FileWriter, piece_bytes: int) -> None:
        self.layout = layout
        self._image = image
        self._image_address = _address_of(image)
        self._writer = writer
        self._scratch_bytes = min(piece_bytes, layout.padded_bytes)
        self._scratches: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    def write_piece(self, begin: int, end: int, moves: list[Move]) -> None:
        first = moves[0] if moves else None
        if first is not None and first.begin <= begin and end <= first.end:
            image_begin = first.image_begin + begin - first.begin
            if image_begin % ALIGNMENT_BYTES == 0:
                self._writer.write_at(begin, self._image[image_begin : image_begin + end - begin])
                return
        scratch = self._take_scratch()
        try:
            self._gather(scratch, begin, end, moves)
            padded_bytes = -(-(end - begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._writer.write_at(begin, memoryview(scratch)[:padded_bytes])
        finally:
            self._scratches.put(scratch)

    def _gather(self, scratch: mmap.mmap, begin: int, end: int, moves: list[Move]) -> None:
        header = self.layout.header[begin:end]
        scratch[: len(header)] = header
        address = _address_of(scratch) - begin
        for move in moves:
            first, last = max(move.begin, begin), min(move.end, end)
            # Unlike an assignment of views, this lets the other threads work.
            ctypes.memmove(address + first, self._image_address + move.image_begin + first - move.begin, last - first)
        # What was in it before is nobody's business.
        padding_bytes = -(end - begin) % ALIGNMENT_BYTES
        scratch[end - begin : end - begin + padding_bytes] = bytes(padding_bytes)

    def _take_scratch(self) -> mmap.mmap:
        try:
            return self._scratches.get_nowait()
        except queue.Empty:
            return mmap.mmap(-1, self._scratch_bytes)


def _address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
