"""Reads parts of stored arrays, as they are wanted where state is divided otherwise than it was when it was stored."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from holdfast.format.boxes import Box, byte_ranges, intersect, shift, split_range
from holdfast.format.digests import DIGEST_CHARACTERS
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.index import Index, LeafRecord
from holdfast.restore.plan import PIECE_BYTES
from holdfast.restore.read import ScratchParts, find_damages, read_pieces
from holdfast.restore.records import Parts, Piece
from holdfast.restore.reshard_plan import Share
from holdfast.state.leaves import Target
from holdfast.storage.addresses import Extent, memory_between
from holdfast.storage.protocol import FileReader
from holdfast.storage.scratch import take_pages

_UNITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


def plan_spans(record: LeafRecord, span_bytes: int, boxes: Sequence[Box]) -> Iterator[range]:
    """**Pure.** The spans of an array that hold something of some boxes of it: runs of their numbers, in order."""
    runs = sorted(
        (begin // span_bytes, -(-end // span_bytes))
        for box in boxes
        for begin, end in byte_ranges(record.shape, box, ITEM_BYTES[record.dtype], span_bytes)
    )
    first = last = 0
    for begin, end in runs:
        if begin > last:
            if last > first:
                yield range(first, last)
            first = begin
        last = max(last, end)
    if last > first:
        yield range(first, last)


def plan_share_pieces(index: Index, shares: Mapping[int, Sequence[Share]]) -> Iterator[Piece]:
    """**Pure.** Cuts what is wanted of some arrays into reads, in the order of the file.

    As with whole arrays, each consists of whole spans that lie one behind the other; spans of which nothing is wanted
    are left out.

    Args:
        index: What lies in the file.
        shares: By the number of an array in the index, what is wanted of it.
    """
    piece = Piece([], [], [], -1)
    for number in sorted(shares):
        record = index.leaves[number]
        for run in plan_spans(record, index.span_bytes, [share.inner for share in shares[number]]):
            for span in run:
                begin = record.begin + span * index.span_bytes
                end = min(begin + index.span_bytes, record.end)
                if piece.leaves and (begin != piece.end or end - piece.begin > PIECE_BYTES):
                    yield piece
                    piece = Piece([], [], [], -1)
                piece.leaves.append(number)
                piece.begins.append(begin)
                piece.digests.append(record.spans[span * DIGEST_CHARACTERS :][:DIGEST_CHARACTERS])
                piece = Piece(piece.leaves, piece.begins, piece.digests, end)
    if piece.leaves:
        yield piece


class Patchwork:
    """**Thread-safe.** The live arrays that take shares of the arrays of one file.

    An array that lies contiguous in host memory is filled where it is, with bytes that have been checked; any other
    one is gathered in host memory first, and filled from there when its last element has come.
    """

    def __init__(self) -> None:
        # By the identity of a target that is filled where it is, the memory of its array.
        self._extents: dict[int, Extent] = {}
        # Guards the two below.
        self._lock = threading.Lock()
        self._gathered: dict[int, memoryview] = {}
        self._left_bytes: dict[int, int] = {}

    def expect(self, shares: Mapping[int, Sequence[Share]]) -> None:
        """Notes what will come; the libraries of arrays that are filled where they are hear of it."""
        for share in (share for wanted in shares.values() for share in wanted):
            target = share.target
            if target.address is not None:
                (self._extents[id(target)],) = target.backend.lend_memory([target.array])
            else:
                self._left_bytes[id(target)] = target.spec.size_bytes

    def view(self, target: Target) -> memoryview:
        """The memory of a target, or what stands for it."""
        size_bytes = target.spec.size_bytes
        if target.address is not None:
            return memory_between(target.address, target.address + size_bytes, self._extents[id(target)])
        with self._lock:
            data = self._gathered.get(id(target))
            if data is None:
                data = memoryview(bytearray(size_bytes)) if size_bytes < PIECE_BYTES else take_pages(size_bytes)
                self._gathered[id(target)] = data
            return data

    def receive(self, target: Target, size_bytes: int) -> None:
        """Takes note of what has come for a target, and fills it if that was the last."""
        if target.address is not None:
            return
        with self._lock:
            self._left_bytes[id(target)] -= size_bytes
            if self._left_bytes[id(target)]:
                return
            data = self._gathered.pop(id(target))
        target.backend.copy_in(target.array, data)


def read_shares(
    reader: FileReader,
    index: Index,
    path: str,
    shares: Mapping[int, Sequence[Share]],
    patchwork: Patchwork,
    *,
    threads: int,
) -> int:
    """**Blocks.** Reads what targets want of the arrays of one file; every byte is checked before it is used.

    Args:
        reader: The open data file.
        index: What lies in it.
        path: Its path, for errors.
        shares: By the number of an array in the index, what is wanted of it.
        patchwork: Where it goes.
        threads: How many threads read.

    Returns:
        How many bytes were read.

    Raises:
        DamageError: If a span does not match its digest.
        MemoryError: If there is no memory for arrays that cannot be filled where they are.
        StorageError: If the place fails.
    """
    size_bytes = 0

    def pieces() -> Iterator[Piece]:
        nonlocal size_bytes
        for piece in plan_share_pieces(index, shares):
            size_bytes += piece.size_bytes
            yield piece

    def receive(piece: Piece, parts: Parts, found: list[str]) -> None:
        for damage in find_damages(index, path, piece, found):
            raise damage
        for number, begin, part in zip(piece.leaves, piece.begins, parts, strict=True):
            record = index.leaves[number]
            for share in shares[number]:
                _copy(record, begin - record.begin, part, share, patchwork)

    read_pieces(reader, pieces(), ScratchParts().of, receive, threads=threads)
    return size_bytes


def _copy(record: LeafRecord, begin: int, data: memoryview, share: Share, patchwork: Patchwork) -> None:
    """Copies what a share takes of one span of an array."""
    import numpy as np

    shape, inner, at = record.shape, share.inner, share.at
    target_shape = share.target.spec.shape
    unit = ITEM_BYTES[record.dtype]
    if begin % unit or data.nbytes % unit:
        # A span may end amid an element: then bytes are what is counted, a dimension more.
        shape, target_shape = (*shape, unit), (*target_shape, unit)
        inner = Box((*inner.offsets, 0), (*inner.shape, unit))
        at = Box((*at.offsets, 0), (*at.shape, unit))
        unit = 1
    source = np.frombuffer(data, _UNITS[unit])
    goal: Any = None
    place = copied = 0
    for slab in split_range(shape, begin // unit, (begin + data.nbytes) // unit):
        common = intersect(slab, inner)
        if common is not None:
            if goal is None:
                goal = np.frombuffer(patchwork.view(share.target), _UNITS[unit]).reshape(target_shape)
            origin = tuple(map(int.__sub__, inner.offsets, at.offsets))
            rows = source[place : place + slab.elements].reshape(slab.shape)
            goal[_slices(shift(common, origin))] = rows[_slices(shift(common, slab.offsets))]
            copied += common.elements
        place += slab.elements
    if copied:
        patchwork.receive(share.target, copied * unit)


def _slices(box: Box) -> tuple[Any, ...]:
    # The ellipsis makes it a view also where there is no dimension left.
    return (*map(slice, box.offsets, box.ends), ...)
