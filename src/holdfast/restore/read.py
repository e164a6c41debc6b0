"""Reads pieces of a data file, checks them, and hands them over."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.errors import DamageError
from holdfast.format.digests import DIGEST_CHARACTERS, digest
from holdfast.format.index import Index
from holdfast.restore.handoffs import Piece
from holdfast.restore.plan import PIECE_BYTES, plan_pieces
from holdfast.state.leaves import Target
from holdfast.storage.crew import Crew
from holdfast.storage.protocol import FileReader


@dataclass(frozen=True, slots=True)
class Delivery:
    """A piece that has been read.

    Attributes:
        piece: Which one.
        data: Its bytes; the view holds until the receiver returns.
        in_place: True if `data` is the destination itself.
    """

    piece: Piece
    data: memoryview
    in_place: bool


def find_damages(index: Index, path: str, delivery: Delivery) -> Iterator[DamageError]:
    """The spans of a piece that do not match their digests."""
    origin = delivery.piece.begin
    for part in delivery.piece.slices:
        leaf = index.leaves[part.leaf]
        span = part.offset // index.span_bytes
        for begin in range(part.begin, part.end, index.span_bytes):
            end = min(begin + index.span_bytes, part.end)
            expected = leaf.spans[span * DIGEST_CHARACTERS : (span + 1) * DIGEST_CHARACTERS]
            if digest(delivery.data[begin - origin : end - origin]) != expected:
                yield DamageError(
                    f"{path}: bytes {begin} to {end} do not match their digest; they belong to {leaf.name!r}",
                    step=index.step,
                    path=path,
                    offset_bytes=begin,
                    tensor=leaf.name,
                )
            span += 1


def read_pieces(
    reader: FileReader,
    pieces: Sequence[Piece],
    view_of: Callable[[int], memoryview | None],
    receive: Callable[[Delivery], None],
    *,
    threads: int,
) -> None:
    """**Blocks.** Reads pieces with several threads, straight to where they belong where that is possible.

    Args:
        reader: The open data file.
        pieces: What to read.
        view_of: The destination of an array, by its number in the index, or None if it has to be handed over in
            scratch memory.
        receive: Called with each piece, from any thread.
        threads: How many threads read, the calling one among them.

    Raises:
        DamageError: If the file ends too early.
        StorageError: If the place fails.
    """
    scratch = _Scratch()

    def read(piece: Piece) -> None:
        size_bytes = piece.end - piece.begin
        view = view_of(piece.slices[0].leaf) if len(piece.slices) == 1 else None
        if view is not None:
            offset = piece.slices[0].offset
            data = view[offset : offset + size_bytes]
        else:
            data = scratch.take(size_bytes)
        reader.read_into(piece.begin, data)
        receive(Delivery(piece, data, view is not None))

    crew = Crew(max(1, min(threads, len(pieces))), "holdfast-read")
    try:
        crew.start()
        crew.run(partial(read, piece) for piece in pieces)
    finally:
        crew.close()


class _Scratch(threading.local):
    """Memory for one piece, one to a thread, kept from piece to piece."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def take(self, size_bytes: int) -> memoryview:
        if len(self._memory) < size_bytes:
            self._memory = mmap.mmap(-1, size_bytes)
        return memoryview(self._memory)[:size_bytes]


def read_targets(reader: FileReader, index: Index, path: str, targets: Mapping[str, Target], *, threads: int) -> int:
    """**Blocks.** Fills each target from the data file; every byte is checked.

    Args:
        reader: The open data file.
        index: What lies in it.
        path: Its path, for errors.
        targets: By leaf, where its bytes are wanted.
        threads: How many threads read.

    Returns:
        How many bytes were read.

    Raises:
        DamageError: If a span does not match its digest; targets may have been filled by then, some with bad bytes.
        StorageError: If the place fails.
    """
    pieces = plan_pieces(index, targets.keys())
    destinations = _Destinations(index, targets)

    def receive(delivery: Delivery) -> None:
        for damage in find_damages(index, path, delivery):
            raise damage
        if not delivery.in_place:
            destinations.deliver(delivery)

    read_pieces(reader, pieces, destinations.view_of, receive, threads=threads)
    destinations.finish()
    return sum(piece.end - piece.begin for piece in pieces)


class _Destinations:
    """Where the arrays of one file go.

    An array in contiguous host memory is its own destination. Another one is gathered in host memory first if it comes
    in more than one piece.
    """

    def __init__(self, index: Index, targets: Mapping[str, Target]) -> None:
        self._index = index
        self._targets = targets
        self._views: dict[int, memoryview | None] = {}
        self._gathered: dict[int, memoryview] = {}
        for number, leaf in enumerate(index.leaves):
            target = targets.get(leaf.name)
            if target is None:
                continue
            view = target.backend.writable_view(target.array)
            if view is None and leaf.end - leaf.begin > PIECE_BYTES:
                view = self._gathered[number] = memoryview(mmap.mmap(-1, leaf.end - leaf.begin))
            self._views[number] = view

    def view_of(self, leaf: int) -> memoryview | None:
        return self._views[leaf]

    def deliver(self, delivery: Delivery) -> None:
        for part in delivery.piece.slices:
            data = delivery.data[part.begin - delivery.piece.begin : part.end - delivery.piece.begin]
            view = self._views[part.leaf]
            if view is not None:
                view[part.offset : part.offset + len(data)] = data
            else:
                target = self._targets[self._index.leaves[part.leaf].name]
                target.backend.copy_in(target.array, data)

    def finish(self) -> None:
        for number, data in self._gathered.items():
            target = self._targets[self._index.leaves[number].name]
            target.backend.copy_in(target.array, data)
