"""The base of the live states of all frameworks."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from benchmarks.states.workloads import ITEM_BYTES, Workload, place_tensors, state_shapes


class LiveState(ABC):
    """The state of one process. Its values come from memory that all contenders share, and go back there.

    Attributes:
        homes: That memory, by the names of the tensors.
    """

    homes: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(home.nbytes for home in self.homes.values())

    def take(self) -> None:
        """Takes the values over, before a save. Nothing to do for tensors in that memory."""
        return

    def touch(self) -> None:
        """Reads all values, as training does before a save: what was not touched for long is copied more slowly."""
        self.take()

    def forget(self) -> None:
        """Loses all values, before a restore. Nothing to do for tensors in that memory."""
        return

    @abstractmethod
    def come_home(self) -> None:
        """Puts the values into that memory, after a restore, unless they are there."""


def view_arrays(workload: Workload, memory: mmap.mmap) -> dict[str, np.ndarray]:
    """All tensors of a workload as arrays in the given memory."""
    places, _ = place_tensors(state_shapes(workload))
    return {
        place.name: np.frombuffer(
            memory, dtype=np.float32, count=(place.end - place.begin) // ITEM_BYTES, offset=place.begin
        ).reshape(place.shape)
        for place in places
    }
