"""The orders of a contender that saves the state of one process, trains, or measures the machine."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

from benchmarks.harness.contender import THREADS
from benchmarks.harness.limits import ALONE, BareCopy, Limits, address_of
from benchmarks.harness.worker import Duties
from benchmarks.peers import make_peer
from benchmarks.states.workloads import Place, make_workload, place_tensors, state_shapes


class LimitDuties(Duties):
    """Measures the machine."""

    def __init__(self, workload: str, scale: float, directory: str, memory: int) -> None:
        places, size_bytes = place_tensors(state_shapes(make_workload(workload, scale)))
        self._memory = mmap.mmap(memory, size_bytes)
        self._limits = Limits(Path(directory), _pieces(self._memory, places), ALONE)

    def measure(self) -> dict[str, float]:
        """All limits, once."""
        try:
            return self._limits.measure()
        finally:
            self._limits.close()


class PeerDuties(Duties):
    """Saves and restores state that comes from shared memory."""

    def __init__(
        self, peer: str, workload: str, scale: float, directory: str, memory: int, keep: int | None = None
    ) -> None:
        """Makes the state.

        Args:
            peer: The way of saving.
            workload: The name of what is saved.
            scale: How large it is, 1 for the real size.
            directory: Where to write.
            memory: The descriptor of the memory that holds the tensors, and after them as much for bare copies.
            keep: How many saves are kept without an order to remove the others; None for all.
        """
        self._peer, self._directory, self._keep = make_peer(peer), Path(directory), keep
        limit_threads()
        made = make_workload(workload, scale)
        places, size_bytes = place_tensors(state_shapes(made))
        # Their page tables are filled here, so that no peer pays for that.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        shared = mmap.mmap(memory, size_bytes, flags=flags)
        target = mmap.mmap(memory, size_bytes, flags=flags, offset=size_bytes)
        self._copy = BareCopy(_pieces(shared, places), target, THREADS)
        self._state = self._peer.make_state(made, shared)
        self.note = self._peer.makes_last

    def open(self) -> None:
        """Opens the peer."""
        self._peer.open(self._directory, self._state, self._keep)

    def touch(self) -> None:
        """Reads all that is saved, as a step of training does before a save."""
        self._state.touch()

    def copy(self) -> dict[str, float]:
        """One bare copy of the tensors, under the same conditions as a save."""
        return {"copy": self._copy.seconds()}

    def save(self, step: int) -> dict[str, float]:
        """One save, until it is durable."""
        self._peer.prepare()
        begun_at = time.perf_counter()
        self._peer.save(step)
        stall_seconds = time.perf_counter() - begun_at
        wait_seconds = self._peer.wait_copied()
        self._peer.wait_durable()
        return {
            "stall": stall_seconds,
            "held": stall_seconds + wait_seconds,
            "durable": time.perf_counter() - begun_at,
            "settling_saves": self._peer.settling_saves,
        }

    def restore(self, step: int) -> dict[str, float]:
        """One restore; the values are then where they were before."""
        self._state.forget()
        begun_at = time.perf_counter()
        parts = self._peer.restore(step)
        seconds = time.perf_counter() - begun_at
        self._state.come_home()
        return {"restore": seconds, **parts}

    def retain(self, step: int) -> None:
        """Removes what need not be kept."""
        self._peer.retain(step)

    def remove(self, step: int) -> None:
        """Removes a save."""
        self._peer.remove(step)

    def close(self) -> None:
        """Closes the peer."""
        self._peer.close()


class TrainingDuties(Duties):
    """Trains, and saves while it does."""

    def __init__(self, peer: str, scale: float, directory: str) -> None:
        self._peer = make_peer(peer)
        limit_threads()
        self._training = self._peer.make_training(scale)
        self._peer.open(Path(directory), self._training.state)

    def train(self, first_step: int, pairs: int, interval_steps: int) -> dict[str, float]:
        """One stretch of training."""
        figures = self._training.measure(self._peer, first_step, pairs, interval_steps)
        return {**figures, "size_bytes": self._training.state.size_bytes}

    def close(self) -> None:
        """Closes the peer."""
        self._peer.close()


class SmallDuties(Duties):
    """Measures what has no state, and no torch."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def measure(self) -> dict[str, float]:
        """All small figures, once."""
        from benchmarks.one_process.small import start_seconds, step_seconds

        return {**start_seconds(), **step_seconds(self._directory)}


def limit_threads() -> None:
    """Frameworks that a peer has imported compute with as many threads as the others."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(THREADS)


def _pieces(memory: mmap.mmap, places: list[Place]) -> list[tuple[int, int]]:
    """The tensors' addresses and lengths; the memory has to be kept."""
    source = address_of(memory)
    return [(source + place.begin, place.end - place.begin) for place in places]
