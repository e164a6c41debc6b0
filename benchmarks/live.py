"""What every live state has in common, whatever framework holds it."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from typing import Final

import numpy as np

from benchmarks.workloads import ITEM_BYTES, Workload, place_tensors, state_shapes

THREADS: Final = 2
"""How many threads each contender computes with."""


class LiveState(ABC):
    """The state of one process. Its values come from memory that all contenders share, and go back there."""

    def take(self) -> None:
        """Takes the values over, before a save. Nothing to do for tensors that lie in that memory."""
        return

    def touch(self) -> None:
        """Reads all values, as training does before a save: what was not touched for long is copied more slowly."""
        self.take()

    def forget(self) -> None:
        """Loses all values, before a restore. Nothing to do for tensors that lie in that memory."""
        return

    @abstractmethod
    def come_home(self) -> None:
        """Sees to it, after a restore, that the values lie in that memory."""


def view_arrays(workload: Workload, memory: mmap.mmap) -> dict[str, np.ndarray]:
    """All tensors of a workload as arrays that lie in the given memory."""
    places, _ = place_tensors(state_shapes(workload))
    return {
        place.name: np.frombuffer(
            memory, dtype=np.float32, count=(place.end - place.begin) // ITEM_BYTES, offset=place.begin
        ).reshape(place.shape)
        for place in places
    }
