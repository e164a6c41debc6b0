"""Streams the bytes of leaves, whichever workers wrote boxes of them; every byte is checked on the way.

Regardless of the state's size, one window and a few spans per reading thread are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

import msgspec

from holdfast.format.dtypes import ITEM_BYTES, array_bytes
from holdfast.format.index import StoredBox
from holdfast.format.shapes import Box, intersect, shift, split_range
from holdfast.process.worker_pool import WorkerPool
from holdfast.restore.read import Order, Share, open_pool, read_orders
from holdfast.restore.records import OpenedStep
from holdfast.state.leaves import Target, spec_of
from holdfast.storage.buffers import take_pages
from holdfast.storage.protocol import FileReader, Storage

WINDOW_BYTES: Final = 64 << 20
"""How much is assembled at a time: enough that each of several adjacent boxes contributes several spans."""

_OPEN_FILES: Final = 64
"""How many files stay open from one window to the next."""


class Extent(msgspec.Struct, frozen=True):
    """A run of a leaf's elements, in row-major order; `end` is exclusive."""

    leaf: str
    begin: int
    end: int


class StoredLeaf(msgspec.Struct, frozen=True):
    """The dtype and shape of a leaf of a step."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return array_bytes(self.dtype, self.shape)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.size_bytes // ITEM_BYTES[self.dtype]


class _BoxPlace(msgspec.Struct, frozen=True):
    """One box of a leaf: the number of its file, and its own number among the file's arrays."""

    part: int
    number: int
    stored: StoredBox


class LeafReader:
    """Reads leaves of one step in their own order. Not thread-safe; `close` closes the files.

    Attributes:
        leaves: Each leaf's dtype and shape.
        strides: The strides in memory of each leaf that was not in row-major order when it was saved.
    """

    def __init__(
        self,
        storage: Storage,
        opened: OpenedStep,
        beside: Storage | None,
        *,
        threads: int = 3,
        window_bytes: int = WINDOW_BYTES,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        """Opens nothing yet. `advance` is called with the size of each piece."""
        self._storage = storage
        self._beside = beside
        self._threads = threads
        self._window_bytes = window_bytes
        self._advance = advance
        self._window: memoryview | None = None
        self._pool: WorkerPool | None = None
        self._readers: dict[str, FileReader] = {}
        # Closes the readers and the pool.
        self._opened = ExitStack()
        self._parts = opened.list_parts()
        self._boxes: dict[str, list[_BoxPlace]] = {}
        self.leaves: dict[str, StoredLeaf] = {}
        self.strides = {one.leaf: one.strides for index in opened.indexes for one in index.strides}
        known: dict[str, set[Box]] = {}
        for place, part in enumerate(self._parts):
            for number, stored in enumerate(part.index.stored_boxes()):
                self.leaves[stored.leaf] = StoredLeaf(stored.dtype, stored.global_shape)
                boxes = known.setdefault(stored.leaf, set())
                # Several workers may have written the same box, with the same digests.
                if stored.box not in boxes:
                    boxes.add(stored.box)
                    self._boxes.setdefault(stored.leaf, []).append(_BoxPlace(place, number, stored))

    def whole(self, leaf: str) -> Extent:
        """**Pure.** Returns all of a leaf."""
        return Extent(leaf, 0, self.leaves[leaf].elements)

    def stream(self, extents: Iterable[Extent]) -> Iterator[memoryview]:
        """**Blocks.** Yields the bytes of extents, one after the other.

        Each piece belongs to one extent, and is valid until the next one is requested.

        Raises:
            DamageError: If a file is missing, or bytes are not those that were written.
            StorageError: If the storage fails.
        """
        batch: list[Extent] = []
        batch_bytes = 0
        for part, size_bytes in self._cut(extents):
            if batch and batch_bytes + size_bytes > self._window_bytes:
                yield from self._fill(batch)
                batch, batch_bytes = [], 0
            batch.append(part)
            batch_bytes += size_bytes
        yield from self._fill(batch)

    def close(self) -> None:
        """Closes the files; may be repeated."""
        self._opened.close()
        self._readers.clear()
        self._pool = None

    def _cut(self, extents: Iterable[Extent]) -> Iterator[tuple[Extent, int]]:
        """Splits extents so that each fits into a window; returns the size of each."""
        for extent in extents:
            item_bytes = ITEM_BYTES[self.leaves[extent.leaf].dtype]
            most = self._window_bytes // item_bytes
            for begin in range(extent.begin, extent.end, most):
                end = min(begin + most, extent.end)
                yield Extent(extent.leaf, begin, end), (end - begin) * item_bytes

    def _fill(self, batch: Sequence[Extent]) -> Iterator[memoryview]:
        """Reads what fits into one window together, and yields it piece by piece."""
        import numpy as np

        from holdfast.state.numpy_arrays import NumpyBackend

        if not batch:
            return
        if self._window is None:
            self._window = take_pages(self._window_bytes)
        library, window = NumpyBackend(), np.frombuffer(self._window, np.uint8)
        address = library.address(window) or 0
        shares: dict[int, dict[int, list[Share]]] = {}
        ends: list[int] = []
        place = 0
        for extent in batch:
            leaf = self.leaves[extent.leaf]
            for slab in split_range(leaf.shape, extent.begin, extent.end):
                spec = spec_of(leaf.dtype, slab.shape)
                memory = window[place : place + spec.size_bytes]
                target = Target(extent.leaf, spec, memory, library, (), address + place)
                for box in self._boxes[extent.leaf]:
                    common = intersect(box.stored.box, slab)
                    if common is not None:
                        share = Share(target, shift(common, box.stored.box.offsets), shift(common, slab.offsets))
                        shares.setdefault(box.part, {}).setdefault(box.number, []).append(share)
                place += spec.size_bytes
            ends.append(place)
        if self._pool is None:
            self._pool = self._opened.enter_context(open_pool(self._storage, self._threads, self._window_bytes))
        orders = [(self._parts[number], Order(shares=shares[number])) for number in sorted(shares)]
        for part, _ in orders:
            if part.path not in self._readers and len(self._readers) < _OPEN_FILES:
                reader = part.open(self._storage, self._beside)
                self._readers[part.path] = self._opened.enter_context(closing(reader))
        read_orders(self._storage, orders, self._readers, self._pool, self._beside)
        begin = 0
        for end in ends:
            if self._advance is not None:
                self._advance(end - begin)
            yield self._window[begin:end]
            begin = end


def take_bytes(pieces: Iterator[memoryview], size_bytes: int) -> Iterator[memoryview]:
    """**Blocks.** Returns the next pieces, as many as make up a size."""
    while size_bytes:
        piece = next(pieces)
        size_bytes -= len(piece)
        yield piece
