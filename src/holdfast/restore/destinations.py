"""Where the bytes of one data file go: into live arrays, or into memory from which these are filled."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from holdfast.format.index import Index
from holdfast.restore.records import Parts, Piece
from holdfast.state.leaves import ArrayBackend, Target
from holdfast.storage.addresses import Extent, memory_between
from holdfast.storage.scratch import take_pages

_LARGE_BYTES: Final = 2 << 20
"""From here on an array gets pages of its own, which may be huge ones."""


class Destinations:
    """The memory of each span that is read.

    An array that lies in host memory as it is stored is its own destination. Any other one is gathered in host memory
    first, and filled from there when its last span has come. So are arrays that lie partly in the same memory: one
    might be filled while the other is checked.

    Attributes:
        overlapping: The targets that may have something of the same memory.
    """

    def __init__(self, index: Index, targets: Mapping[str, Target]) -> None:
        """Tells the libraries of arrays that are read in place that they are about to change.

        Args:
            index: What lies in the file.
            targets: By leaf, where its bytes are wanted. They keep the arrays alive, and with them the memory.
        """
        self._leaves = index.leaves
        self._targets = targets
        # For each leaf that is read in place, the memory of its array.
        self._extents: list[Extent | None] = [None] * len(index.leaves)
        self._has_others = False
        # Guards the two fields below: what is being gathered, and how much of each has yet to come.
        self._lock = threading.Lock()
        self._gathered: dict[int, memoryview] = {}
        self._left_bytes: dict[int, int] = {}
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
                raise ValueError(f"{leaf.name}: the array is not of the form that is stored")
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
        """**Thread-safe.** The memory of each span of a piece."""
        parts = []
        extents, leaves = self._extents, self._leaves
        for number, begin, end in zip(piece.leaves, piece.begins, piece.ends, strict=True):
            extent = extents[number]
            if extent is None:
                parts.append(self._gather(number, begin, end))
            else:
                shift = extent[0] - leaves[number].begin
                parts.append(memory_between(begin + shift, end + shift, extent))
        return parts

    def receive(self, piece: Piece) -> None:
        """**Thread-safe.** Takes note of a piece that has come; fills the arrays of which it was the last."""
        if not self._has_others:
            return
        for number, begin, end in zip(piece.leaves, piece.begins, piece.ends, strict=True):
            if self._extents[number] is None:
                with self._lock:
                    self._left_bytes[number] -= end - begin
                    if self._left_bytes[number]:
                        continue
                    data = self._gathered.pop(number)
                    del self._left_bytes[number]
                target = self._targets[self._leaves[number].name]
                target.backend.copy_in(target.array, data)

    def _gather(self, number: int, begin: int, end: int) -> memoryview:
        leaf = self._leaves[number]
        with self._lock:
            data = self._gathered.get(number)
            if data is None:
                size_bytes = self._left_bytes[number] = leaf.end - leaf.begin
                data = memoryview(bytearray(size_bytes)) if size_bytes < _LARGE_BYTES else take_pages(size_bytes)
                self._gathered[number] = data
        return data[begin - leaf.begin : end - leaf.begin]


def find_overlapping(begins: Sequence[int], ends: Sequence[int]) -> set[int]:
    """**Pure.** The places, in the sequences, of ranges that have something in common with another one.

    Args:
        begins: Where each range begins.
        ends: Where each ends, exclusive; none is empty.
    """
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
