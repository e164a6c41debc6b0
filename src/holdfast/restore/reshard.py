"""Fills live arrays whose boxes differ from the stored ones.

It reads the files of several workers, no more of them than needed: stored arrays that are needed whole like any others,
and of others the spans that contain something needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

from holdfast.errors import DamageError
from holdfast.format.digests import DIGEST_CHARACTERS
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.index import Index, LeafRecord
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.format.shapes import Box, byte_ranges, intersect, shift, split_range
from holdfast.restore.files import Part, list_parts, open_part
from holdfast.restore.read import PIECE_BYTES, GatheredArrays, ScratchParts, find_damages, read_pieces, read_targets
from holdfast.restore.records import OpenedStep, Parts, Piece
from holdfast.restore.reshard_plan import Assignment, Order, Share
from holdfast.restore.verify import read_rank
from holdfast.state.leaves import ArraySpec, Target
from holdfast.storage.buffers import Extent, memory_between
from holdfast.storage.protocol import FileReader, Storage


def assign_parts(
    storage: Storage, opened: OpenedStep, targets: Sequence[Target], leaves: Mapping[str, ArraySpec]
) -> list[tuple[Part, Order]]:
    """**Blocks.** Finds out what to read from which file, before anything is read.

    The index that was read already comes first: with unchanged workers, it has everything that only they held. Then
    come those that it names, and only if something is still missing, the others, the likeliest first. Raises
    `DamageError` if an index is damaged, or the step lacks something.
    """
    manifest = opened.manifest
    assignment = Assignment(targets, leaves, step=manifest.step)
    orders: list[tuple[Part, Order]] = []

    def take(index: Index) -> None:
        own = OpenedStep(opened.directory, manifest, (index,))
        for part in list_parts(own):
            order = assignment.offer(part.index, part.path)
            if order:
                orders.append((part, order))

    for index in opened.indexes:
        take(index)
    known = {index.rank for index in opened.indexes}
    for rank in _list_ranks(opened.indexes, assignment, manifest.world_size):
        if assignment.is_complete:
            break
        if rank not in known:
            known.add(rank)
            take(read_rank(storage, opened.directory, manifest, rank))
    try:
        assignment.check_complete()
    except DamageError as damage:
        path = join(opened.directory, MANIFEST_NAME)
        raise DamageError(
            f"{opened.directory or storage.url}: {damage.message}", step=manifest.step, path=path, tensor=damage.tensor
        ) from damage
    return orders


def _list_ranks(indexes: Sequence[Index], assignment: Assignment, world_size: int) -> Iterator[int]:
    """Returns the workers whose indexes to read, the likeliest first.

    Those that are named come first, and then those near the place at which something is missing: if all were read from
    the first on, a job of many workers would read more of indexes than of its state.
    """
    missing = assignment.list_missing()
    hinted = {rank for index in indexes for leaf in index.elsewhere if leaf.name in missing for rank in leaf.ranks}
    yield from sorted(hinted)
    guess = int(assignment.guess_place() * world_size)
    yield from sorted(range(world_size), key=lambda rank: abs(rank - guess))


def read_orders(
    storage: Storage,
    orders: Sequence[tuple[Part, Order]],
    readers: Mapping[str, FileReader],
    *,
    threads: int,
) -> int:
    """**Blocks.** Fills all targets, with `readers` that are open already or others; returns how much was read.

    When it raises `DamageError`, targets may have been filled, some with bad bytes.
    """
    size_bytes = 0
    for part, order in orders:
        reader = readers.get(part.path)
        if reader is not None:
            size_bytes += _read_order(reader, part, order, threads)
        else:
            with closing(open_part(storage, part, storage)) as opened:
                size_bytes += _read_order(opened, part, order, threads)
    return size_bytes


def _read_order(reader: FileReader, part: Part, order: Order, threads: int) -> int:
    size_bytes = 0
    try:
        if order.whole:
            size_bytes += read_targets(reader, part.index, part.path, order.whole, threads=threads)
        if order.shares:
            size_bytes += read_shares(reader, part.index, part.path, order.shares, threads=threads)
    except DamageError as damage:
        raise part.explain(damage) from damage
    return size_bytes


_UNITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


def plan_spans(record: LeafRecord, span_bytes: int, boxes: Sequence[Box]) -> Iterator[range]:
    """**Pure.** Returns the spans of an array that contain something of given boxes of it: ordered runs of their
    numbers."""
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
    """**Pure.** Plans reads of some arrays, by their numbers in the index, in the order of the file.

    As with whole arrays, each consists of adjacent whole spans; spans that are not needed are left out.
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

    An array that is contiguous in host memory is filled in place, with bytes that have been checked; any other one is
    gathered in host memory first, and filled from there when its last element has arrived.
    """

    def __init__(self, shares: Mapping[int, Sequence[Share]]) -> None:
        """Notes what will arrive; notifies the libraries of arrays that are filled in place."""
        # By the identity of a target that is filled where it is, the memory of its array.
        self._extents: dict[int, Extent] = {}
        self._gathered = GatheredArrays()
        for share in (share for wanted in shares.values() for share in wanted):
            target = share.target
            if target.address is not None:
                (self._extents[id(target)],) = target.backend.lend_memory([target.array])

    def view(self, target: Target) -> memoryview:
        """Returns the memory of a target, or its replacement."""
        size_bytes = target.spec.size_bytes
        if target.address is None:
            return self._gathered.view(id(target), size_bytes)
        return memory_between(target.address, target.address + size_bytes, self._extents[id(target)])

    def receive(self, target: Target, size_bytes: int) -> None:
        """Counts what has arrived for a target, and fills it if that was the last."""
        if target.address is None:
            self._gathered.receive(id(target), size_bytes, target)


def read_shares(
    reader: FileReader,
    index: Index,
    path: str,
    shares: Mapping[int, Sequence[Share]],
    *,
    threads: int,
) -> int:
    """**Blocks.** Reads what targets need of the arrays of one file; every byte is checked before it is used.

    Like `read_targets`, but for `shares`: by the number of an array in the index, what is needed of it.
    """
    patchwork = Patchwork(shares)
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
    import numpy as np

    shape, inner, at = record.shape, share.inner, share.at
    target_shape = share.target.spec.shape
    unit = ITEM_BYTES[record.dtype]
    if begin % unit or data.nbytes % unit:
        # A span may end within an element: then bytes are counted, as a further dimension.
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
