"""Reads arrays of a step's files into live memory: plans pieces, reads and checks them, fills the arrays.

Of each stored array a target takes all, or a share: a box of it. Both are read by whole spans, in the order of the
file, several spans at once. A span of an array that one target takes as a whole is read where it belongs, if that is
contiguous host memory. All others are read into memory of their own first, and copied from there once checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec

from holdfast.errors import DamageError
from holdfast.format.digests import DIGEST_CHARACTERS
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.index import Index, LeafRecord
from holdfast.format.shapes import Box, byte_ranges, intersect, shift, split_range
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.records import Part
from holdfast.state.leaves import ArrayBackend, Target
from holdfast.storage.buffers import Extent, Scratch, memory_between, take_pages
from holdfast.storage.protocol import FileReader, Storage

PIECE_BYTES: Final = 8 << 20
"""How much one thread reads at a time, if no span is longer: large enough that threads seldom wait for each
other, small enough that they end together.
"""

_MOST_SPANS: Final = 1 << 12
"""The most spans of one piece, so that an index with spans of a few bytes takes little memory."""

_OPEN_FILES: Final = 64
"""How many files are open at once, besides those that the caller has open."""


class Share(msgspec.Struct, frozen=True):
    """The part of a stored array that one target takes.

    Attributes:
        target: The target.
        inner: The part of the stored array.
        at: Its place in the target's array.
    """

    target: Target
    inner: Box
    at: Box


@dataclass(slots=True)
class Order:
    """The reads of one file, by the number of a stored array in its index.

    Attributes:
        whole: The target that takes all of the array.
        shares: The parts that other targets take of it.
    """

    whole: dict[int, Target] = field(default_factory=dict)
    shares: dict[int, list[Share]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.whole or self.shares)


class Piece(msgspec.Struct, frozen=True):
    """One read: spans of arrays that follow each other in a data file without gaps.

    The spans are stored in columns, because there may be very many.

    Attributes:
        leaves: The number of the array in the index.
        begins: Where the span begins in the file.
        digests: The digest that it must have.
        end: Where the last span ends in the file, exclusive.
    """

    leaves: list[int]
    begins: list[int]
    digests: list[str]
    end: int

    @property
    def begin(self) -> int:
        """Where the first span begins in the file."""
        return self.begins[0]

    @property
    def size_bytes(self) -> int:
        """How many bytes are read."""
        return self.end - self.begins[0]

    @property
    def ends(self) -> list[int]:
        """Where each span ends in the file, exclusive."""
        return [*self.begins[1:], self.end]


Parts: TypeAlias = Sequence[memoryview]
"""The memory of each span of a piece."""


def plan_pieces(index: Index, numbers: Iterable[int], boxes: Mapping[int, Sequence[Box]]) -> Iterator[Piece]:
    """**Pure.** Plans reads, in the order of the file.

    Each consists of whole spans, so that each can be checked by itself.

    Args:
        index: The index of the file.
        numbers: The arrays that are read, in order.
        boxes: Of those arrays that are not read as a whole, the boxes that are needed.
    """
    span_bytes = index.span_bytes
    leaves: list[int] = []
    begins: list[int] = []
    digests: list[str] = []
    piece_end = -1
    room_end = 0
    for number in numbers:
        leaf = index.leaves[number]
        runs = _list_runs(leaf, span_bytes, boxes[number]) if number in boxes else ((leaf.begin, leaf.end),)
        for begin, end in runs:
            place = (begin - leaf.begin) // span_bytes * DIGEST_CHARACTERS
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


def _list_runs(leaf: LeafRecord, span_bytes: int, boxes: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """**Pure.** Yields where the spans with something of some boxes are in the file: runs of spans, in order."""
    runs = sorted(
        (begin // span_bytes, -(-end // span_bytes))
        for box in boxes
        for begin, end in byte_ranges(leaf.shape, box, ITEM_BYTES[leaf.dtype], span_bytes)
    )
    first = last = 0
    for begin, end in [*runs, (-1, -1)]:
        if not first <= begin <= last:
            if last > first:
                yield leaf.begin + first * span_bytes, min(leaf.begin + last * span_bytes, leaf.end)
            first = begin
        last = max(last, end)


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


_PAGE_BYTES: Final = 4096


class ScratchParts:
    """Memory for the spans of pieces that go nowhere, or not as they are; one piece to a thread."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def of(self, piece: Piece) -> Parts:
        """Returns memory for each span; the arrays are aligned in memory as they are in the file."""
        first = piece.begin - piece.begin % _PAGE_BYTES
        memory = self._scratch.take(piece.end - first)
        return [memory[begin - first : end - first] for begin, end in zip(piece.begins, piece.ends, strict=True)]


_LARGE_BYTES: Final = 2 << 20
"""From this size on, an array gets pages of its own, which may be huge ones."""

_UNITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


class Destinations:
    """**Thread-safe.** The memory of each span that is read of one file, until it is where it belongs.

    A whole array whose target is contiguous host memory is read in place. Other whole arrays are gathered in host
    memory. Spans of which targets take only shares are read into scratch memory; their targets are filled from there
    in place, or gathered likewise. A gathered target is filled once its last byte has been checked.
    """

    def __init__(self, index: Index, order: Order) -> None:
        """Notifies the libraries of arrays that are filled in place that they are about to change."""
        self._leaves = index.leaves
        self._order = order
        self._scratch = ScratchParts()
        for number, target in order.whole.items():
            leaf, spec = index.leaves[number], target.spec
            if spec.dtype != leaf.dtype or spec.shape != leaf.shape:
                raise ValueError(f"{leaf.name}: the array does not have the stored dtype and shape")
        # The memory of each whole array that is read in place, and of each target that takes shares in place, by its
        # identity.
        self._extents = _lend_memory(order.whole)
        self._share_extents = _lend_memory(
            {id(one.target): one.target for one in chain.from_iterable(order.shares.values())}
        )
        # Guards the two below: what is being gathered, by the identity of the target, and how much has yet to come.
        self._lock = threading.Lock()
        self._gathered: dict[int, memoryview] = {}
        self._left_bytes: dict[int, int] = {}

    def parts_of(self, piece: Piece) -> Parts:
        """Returns the memory of each span of a piece."""
        parts = []
        extents, leaves, whole = self._extents, self._leaves, self._order.whole
        scratch: Parts = ()
        for place, (number, begin, end) in enumerate(zip(piece.leaves, piece.begins, piece.ends, strict=True)):
            extent = extents.get(number)
            if extent is not None:
                distance = extent[0] - leaves[number].begin
                parts.append(memory_between(begin + distance, end + distance, extent))
            elif number in whole:
                first = leaves[number].begin
                parts.append(self._gather(whole[number])[begin - first : end - first])
            else:
                scratch = scratch or self._scratch.of(piece)
                parts.append(scratch[place])
        return parts

    def receive(self, piece: Piece, parts: Parts) -> None:
        """Copies what targets share of a piece that has been read and checked; fills what is gathered now."""
        shares, whole = self._order.shares, self._order.whole
        if not shares and len(self._extents) == len(whole):
            return
        for number, begin, part in zip(piece.leaves, piece.begins, parts, strict=True):
            leaf = self._leaves[number]
            for share in shares.get(number, ()):
                self._copy(leaf, begin - leaf.begin, part, share)
            if number in whole and number not in self._extents:
                self._count(whole[number], part.nbytes)

    def memory_of(self, target: Target) -> memoryview:
        """Returns the memory that takes the shares of a target: its own, or where it is gathered."""
        if target.address is None:
            return self._gather(target)
        return memory_between(target.address, target.address + target.spec.size_bytes, self._share_extents[id(target)])

    def _copy(self, leaf: LeafRecord, begin: int, data: memoryview, share: Share) -> None:
        """Copies what a target takes of one span, which begins there in the array."""
        import numpy as np

        shape, inner, at = leaf.shape, share.inner, share.at
        target_shape = share.target.spec.shape
        unit = ITEM_BYTES[leaf.dtype]
        if begin % unit or data.nbytes % unit:
            # A span may end within an element: then bytes are counted, as a further dimension.
            shape, target_shape = (*shape, unit), (*target_shape, unit)
            inner = Box((*inner.offsets, 0), (*inner.shape, unit))
            at = Box((*at.offsets, 0), (*at.shape, unit))
            unit = 1
        source = np.frombuffer(data, _UNITS[unit])
        goal: Any = None
        if data.nbytes == leaf.end - leaf.begin:
            # Most small arrays have one span.
            goal = np.frombuffer(self.memory_of(share.target), _UNITS[unit]).reshape(target_shape)
            goal[_slices(at)] = source.reshape(shape)[_slices(inner)]
            if share.target.address is None:
                self._count(share.target, inner.elements * unit)
            return
        place = copied = 0
        for slab in split_range(shape, begin // unit, (begin + data.nbytes) // unit):
            common = intersect(slab, inner)
            if common is not None:
                if goal is None:
                    goal = np.frombuffer(self.memory_of(share.target), _UNITS[unit]).reshape(target_shape)
                origin = tuple(map(int.__sub__, inner.offsets, at.offsets))
                rows = source[place : place + slab.elements].reshape(slab.shape)
                goal[_slices(shift(common, origin))] = rows[_slices(shift(common, slab.offsets))]
                copied += common.elements
            place += slab.elements
        if copied and share.target.address is None:
            self._count(share.target, copied * unit)

    def _gather(self, target: Target) -> memoryview:
        """Returns the memory for a target's bytes until all of them have been counted."""
        with self._lock:
            data = self._gathered.get(id(target))
            if data is None:
                size_bytes = target.spec.size_bytes
                data = memoryview(bytearray(size_bytes)) if size_bytes < _LARGE_BYTES else take_pages(size_bytes)
                self._gathered[id(target)], self._left_bytes[id(target)] = data, size_bytes
            return data

    def _count(self, target: Target, size_bytes: int) -> None:
        """Counts what has arrived of a gathered target, and fills it if that was the last."""
        with self._lock:
            self._left_bytes[id(target)] -= size_bytes
            if self._left_bytes[id(target)]:
                return
            del self._left_bytes[id(target)]
            data = self._gathered.pop(id(target))
        target.backend.copy_in(target.array, data)


def _lend_memory(targets: Mapping[int, Target]) -> dict[int, Extent]:
    """Returns the memory of those targets that are contiguous host memory, by their keys."""
    lenders: dict[ArrayBackend, tuple[list[int], list[Any]]] = {}
    for key, target in targets.items():
        if target.address is not None:
            lender = lenders.get(target.backend)
            if lender is None:
                lender = lenders[target.backend] = [], []
            lender[0].append(key)
            lender[1].append(target.array)
    extents: dict[int, Extent] = {}
    for backend, (keys, arrays) in lenders.items():
        extents.update(zip(keys, backend.lend_memory(arrays), strict=True))
    return extents


def _slices(box: Box) -> tuple[Any, ...]:
    # The ellipsis makes it a view also where there is no dimension left.
    return (*map(slice, box.offsets, box.ends), ...)


@contextmanager
def open_pool(storage: Storage, threads: int, size_bytes: int) -> Iterator[WorkerPool]:
    """**Blocks.** Starts the threads that read about that many bytes of any files of a storage, for the block."""
    size = storage.traits.read_parallel or max(1, min(threads, size_bytes // PIECE_BYTES))
    pool = WorkerPool(size, "holdfast-read")
    try:
        if size > 1:
            pool.start()
        yield pool
    finally:
        pool.close()


def list_reads(
    part: Part,
    reader: FileReader,
    pieces: Iterable[Piece],
    parts_of: Callable[[Piece], Parts],
    receive: Callable[[Piece, Parts, list[str]], None],
) -> Iterator[Callable[[], None]]:
    """Yields the jobs that read pieces of a file directly into place, and compute their digests.

    `parts_of` returns the memory of each span of a piece. `receive` gets each piece that has been read, these parts,
    and the digest of each span, in the same thread; the memory may then be used for the next.
    """

    def read(piece: Piece) -> None:
        parts = parts_of(piece)
        try:
            receive(piece, parts, reader.read_digested(piece.begin, parts))
        except DamageError as damage:
            raise part.explain(damage) from damage

    return (partial(read, piece) for piece in pieces)


def read_orders(
    storage: Storage,
    orders: Sequence[tuple[Part, Order]],
    readers: Mapping[str, FileReader],
    pool: WorkerPool,
    beside: Storage | None,
    advance: Callable[[int], object] | None = None,
) -> int:
    """**Blocks.** Fills all targets; every byte is checked before it counts. Returns how many bytes were read.

    Args:
        storage: Where the step is.
        orders: What is read of each file.
        readers: Files that are open already, by their paths; others are opened while they are read.
        pool: The threads that read.
        beside: Where the steps are that the step refers to, if that is known.
        advance: Called with the size of each piece, in the thread that has read it.

    Raises:
        DamageError: If a span does not match its digest; targets may have been filled by then, some with bad bytes.
        MemoryError: If there is no memory for arrays that cannot be read in place.
    """
    size_bytes = 0

    def list_jobs(part: Part, order: Order, reader: FileReader) -> Iterator[Callable[[], None]]:
        destinations = Destinations(part.index, order)

        def list_pieces() -> Iterator[Piece]:
            nonlocal size_bytes
            boxes = {
                number: [share.inner for share in shares]
                for number, shares in order.shares.items()
                if number not in order.whole
            }
            for piece in plan_pieces(part.index, sorted({*order.whole, *boxes}), boxes):
                size_bytes += piece.size_bytes
                yield piece

        def receive(piece: Piece, parts: Parts, found: list[str]) -> None:
            for damage in find_damages(part.index, part.path, piece, found):
                raise damage
            destinations.receive(piece, parts)
            if advance is not None:
                advance(piece.size_bytes)

        yield from list_reads(part, reader, list_pieces(), destinations.parts_of, receive)

    for first in range(0, len(orders), _OPEN_FILES):
        with ExitStack() as files:
            reads = []
            for part, order in orders[first : first + _OPEN_FILES]:
                reader = readers.get(part.path)
                if reader is None:
                    reader = files.enter_context(closing(part.open(storage, beside)))
                reads.append(list_jobs(part, order, reader))
            pool.run(chain.from_iterable(reads))
    return size_bytes
