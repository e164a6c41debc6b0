"""Reads arrays of a data file into live memory: plans pieces, reads and checks them, fills the arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from holdfast.errors import DamageError
from holdfast.format.digests import DIGEST_CHARACTERS
from holdfast.format.index import Index
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.records import Parts, Piece
from holdfast.state.leaves import ArrayBackend, Target
from holdfast.storage.buffers import Extent, Scratch, memory_between, take_pages
from holdfast.storage.protocol import FileReader

PIECE_BYTES: Final = 8 << 20
"""How much one thread reads at a time, if no span is longer: large enough that threads seldom wait for each
other, small enough that they end together.
"""

_MOST_SPANS: Final = 1 << 12
"""The most spans of one piece, so that an index with spans of a few bytes takes little memory."""


def plan_pieces(index: Index, wanted: Container[str] | None) -> Iterator[Piece]:
    """**Pure.** Plans reads, in the order of the file. `wanted` is None for all arrays.

    Each consists of whole spans, so that each can be checked by itself.
    """
    span_bytes = index.span_bytes
    leaves: list[int] = []
    begins: list[int] = []
    digests: list[str] = []
    piece_end = -1
    room_end = 0
    for number, leaf in enumerate(index.leaves):
        begin, end = leaf.begin, leaf.end
        if wanted is not None and leaf.name not in wanted:
            continue
        place = 0
        while begin < end:
            span_end = min(begin + span_bytes, end)
            if begin != piece_end or span_end > room_end or len(leaves) == _MOST_SPANS:
                if leaves:
                    yield Piece(leaves, begins, digests, piece_end)
                    leaves, begins, digests = [], [], []
                room_end = begin + PIECE_BYTES
            leaves.append(number)
            begins.append(begin)
            digests.append(leaf.spans[place : place + DIGEST_CHARACTERS])
            place += DIGEST_CHARACTERS
            begin = piece_end = span_end
    if leaves:
        yield Piece(leaves, begins, digests, piece_end)


_LARGE_BYTES: Final = 2 << 20
"""From this size on, an array gets pages of its own, which may be huge ones."""


class GatheredArrays:
    """**Thread-safe.** Arrays that are gathered in host memory, and filled when their last byte has arrived."""

    def __init__(self) -> None:
        # Guards the two below: what is being gathered, and how much of each has yet to come.
        self._lock = threading.Lock()
        self._memory: dict[int, memoryview] = {}
        self._left_bytes: dict[int, int] = {}

    def view(self, key: int, size_bytes: int) -> memoryview:
        """Returns the memory for an array's bytes until `receive` has had all of them."""
        with self._lock:
            data = self._memory.get(key)
            if data is None:
                data = memoryview(bytearray(size_bytes)) if size_bytes < _LARGE_BYTES else take_pages(size_bytes)
                self._memory[key], self._left_bytes[key] = data, size_bytes
            return data

    def receive(self, key: int, size_bytes: int, target: Target) -> None:
        """Counts what has arrived, and fills the array if that was the last."""
        with self._lock:
            self._left_bytes[key] -= size_bytes
            if self._left_bytes[key]:
                return
            del self._left_bytes[key]
            data = self._memory.pop(key)
        target.backend.copy_in(target.array, data)


class Destinations:
    """The memory of each span that is read.

    An array whose host memory has the stored layout is its own destination. Any other one is gathered in host memory
    first, and filled from there when its last span has arrived. The same holds for arrays that share memory: one might
    be filled while the other is checked.

    Attributes:
        overlapping: The targets that may share memory.
    """

    def __init__(self, index: Index, targets: Mapping[str, Target]) -> None:
        """Notifies the libraries of arrays that are read in place that they are about to change.

        The targets, by leaf, keep the arrays alive, and with them the memory.
        """
        self._leaves = index.leaves
        self._targets = targets
        # For each leaf that is read in place, the memory of its array.
        self._extents: list[Extent | None] = [None] * len(index.leaves)
        self._has_others = False
        self._gathered = GatheredArrays()
        lenders: dict[ArrayBackend, tuple[list[int], list[Any]]] = {}
        numbers: list[int] = []
        begins: list[int] = []
        ends: list[int] = []
        for number, leaf in enumerate(index.leaves):
            target = targets.get(leaf.name)
            if target is None:
                continue
            if target.address is None:
                self._has_others = True
                extent = target.backend.extent(target.array)
                if extent is not None:
                    numbers.append(number)
                    begins.append(extent[0])
                    ends.append(extent[1])
                continue
            if target.spec.dtype != leaf.dtype or target.spec.shape != leaf.shape:
                raise ValueError(f"{leaf.name}: the array does not have the stored dtype and shape")
            numbers.append(number)
            begins.append(target.address)
            ends.append(target.address + leaf.end - leaf.begin)
            lender = lenders.get(target.backend)
            if lender is None:
                lender = lenders[target.backend] = [], []
            lender[0].append(number)
            lender[1].append(target.array)
        for backend, (lent, arrays) in lenders.items():
            for number, extent in zip(lent, backend.lend_memory(arrays), strict=True):
                self._extents[number] = extent
        self.overlapping: list[Target] = []
        for number in sorted(find_overlapping(begins, ends)):
            self._extents[numbers[number]] = None
            self._has_others = True
            self.overlapping.append(targets[index.leaves[numbers[number]].name])

    def parts_of(self, piece: Piece) -> Parts:
        """**Thread-safe.** Returns the memory of each span of a piece."""
        parts = []
        extents, leaves = self._extents, self._leaves
        for number, begin, end in zip(piece.leaves, piece.begins, piece.ends, strict=True):
            extent = extents[number]
            if extent is None:
                leaf = leaves[number]
                data = self._gathered.view(number, leaf.end - leaf.begin)
                parts.append(data[begin - leaf.begin : end - leaf.begin])
            else:
                shift = extent[0] - leaves[number].begin
                parts.append(memory_between(begin + shift, end + shift, extent))
        return parts

    def receive(self, piece: Piece) -> None:
        """**Thread-safe.** Counts a piece that has arrived; fills the arrays of which it was the last."""
        if not self._has_others:
            return
        for number, begin, end in zip(piece.leaves, piece.begins, piece.ends, strict=True):
            if self._extents[number] is None:
                self._gathered.receive(number, end - begin, self._targets[self._leaves[number].name])


def find_overlapping(begins: Sequence[int], ends: Sequence[int]) -> set[int]:
    """**Pure.** Returns the positions of ranges, none of them empty, that overlap with another one."""
    import numpy as np

    if not begins:
        return set()
    first = np.array(begins, np.int64)
    order = np.argsort(first)
    reach = np.maximum.accumulate(np.array(ends, np.int64)[order])
    if not (first[order][1:] < reach[:-1]).any():
        return set()
    overlapping: set[int] = set()
    widest = int(order[0])
    for place in map(int, order[1:]):
        if begins[place] < ends[widest]:
            overlapping |= {widest, place}
        if ends[place] > ends[widest]:
            widest = place
    return overlapping


_PAGE_BYTES: Final = 4096


def find_damages(index: Index, path: str, piece: Piece, found: list[str]) -> Iterator[DamageError]:
    """Yields the spans of a piece whose digests are wrong."""
    if found == piece.digests:
        return
    for number, begin, end, is_digest, must_be in zip(
        piece.leaves, piece.begins, piece.ends, found, piece.digests, strict=True
    ):
        if is_digest != must_be:
            name = index.leaves[number].name
            yield DamageError(
                f"{path}: bytes {begin} to {end} do not match their digest; they belong to {name!r}",
                step=index.step,
                path=path,
                offset_bytes=begin,
                tensor=name,
            )


def read_pieces(
    reader: FileReader,
    pieces: Iterable[Piece],
    parts_of: Callable[[Piece], Parts],
    receive: Callable[[Piece, Parts, list[str]], None],
    *,
    threads: int,
) -> None:
    """**Blocks.** Reads pieces with several threads, directly into place, and computes their digests.

    `parts_of` returns the memory of each span of a piece. `receive` gets each piece that has been read, these parts,
    and the digest of each span, in the same thread; the memory may then be used for the next.
    """

    def read(piece: Piece) -> None:
        parts = parts_of(piece)
        receive(piece, parts, reader.read_digested(piece.begin, parts))

    pool = WorkerPool(max(1, min(threads, reader.size_bytes // PIECE_BYTES)), "holdfast-read")
    try:
        pool.start()
        pool.run(partial(read, piece) for piece in pieces)
    finally:
        pool.close()


class ScratchParts:
    """Memory for the spans of pieces that go nowhere, one piece to a thread."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def of(self, piece: Piece) -> Parts:
        """Returns memory for each span; the arrays are aligned in memory as they are in the file."""
        first = piece.begin - piece.begin % _PAGE_BYTES
        memory = self._scratch.take(piece.end - first)
        return [memory[begin - first : end - first] for begin, end in zip(piece.begins, piece.ends, strict=True)]


def read_targets(
    reader: FileReader,
    index: Index,
    path: str,
    targets: Mapping[str, Target],
    *,
    threads: int,
    overlapping: list[Target] | None = None,
) -> int:
    """**Blocks.** Fills each target, by leaf, from a data file; every byte is checked. Returns the number of bytes.

    `overlapping` gets the targets that may share memory.

    Raises:
        DamageError: If a span does not match its digest; targets may have been filled by then, some with bad bytes.
        MemoryError: If there is no memory for arrays that cannot be read in place.
    """
    destinations = Destinations(index, targets)
    if overlapping is not None:
        overlapping += destinations.overlapping
    size_bytes = 0

    def pieces() -> Iterator[Piece]:
        nonlocal size_bytes
        for piece in plan_pieces(index, None if len(targets) == len(index.leaves) else targets):
            size_bytes += piece.size_bytes
            yield piece

    def receive(piece: Piece, _: Parts, found: list[str]) -> None:
        for damage in find_damages(index, path, piece, found):
            raise damage
        destinations.receive(piece)

    read_pieces(reader, pieces(), destinations.parts_of, receive, threads=threads)
    return size_bytes
