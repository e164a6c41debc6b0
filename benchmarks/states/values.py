"""The bytes that all contenders save and restore."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash
from benchmarks.states.workloads import ITEM_BYTES, Place

_POOL_ITEMS: Final = 1 << 24
"""More than any compressor looks back."""


class Values:
    """Fills memory with numbers, wipes it, and knows whether they have come back."""

    def __init__(self, memory: mmap.mmap, places: Sequence[Place]) -> None:
        self._items = np.frombuffer(memory, dtype=np.float32)
        self._places = places
        self._random = np.random.default_rng(0)
        self._pool = self._random.standard_normal(min(_POOL_ITEMS, max(1 << 12, self._items.size)), dtype=np.float32)
        self._digest = ""

    def change(self, places: Sequence[Place] | None = None) -> None:
        """Gives every tensor new values, or those at the places alone; no two have the same, and none compress."""
        for place in self._places if places is None else places:
            begin, end = place.begin // ITEM_BYTES, place.end // ITEM_BYTES
            first = int(self._random.integers(self._pool.size))
            while begin < end:
                part = self._pool[first : first + end - begin]
                self._items[begin : begin + part.size] = part
                begin += part.size
                first = 0
        self._digest = self._compute_digest()

    def wipe(self) -> None:
        """Sets all to zero, so that what a restore leaves out shows."""
        self._items[:] = 0

    def are_back(self) -> bool:
        """True if all is as it was when `change` was last called."""
        return self._compute_digest() == self._digest

    def release(self) -> None:
        """Lets go of the memory, so that it can be closed."""
        del self._items

    def _compute_digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._items.data)
