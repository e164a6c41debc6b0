"""The interface of a way of saving that is measured."""

from __future__ import annotations

import mmap
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from benchmarks.states.live import LiveState
from benchmarks.states.workloads import Workload

if TYPE_CHECKING:
    # The process that compares the peers imports this file, and needs no torch.
    from benchmarks.states.torch_state import State
    from benchmarks.states.training import Training

S = TypeVar("S", bound=LiveState)


class Peer(ABC, Generic[S]):
    """One way of saving, set up as its own documents say is best.

    Attributes:
        makes_last: What it makes durable by itself. What is missing is added by `wait_durable`, so that the times until
            durable mean the same for all.
        settling_saves: How many saves it takes until a save is like the next one.
        waits_by_itself: True if a training loop need not call `wait_copied`.
    """

    makes_last: str
    settling_saves = 1
    waits_by_itself = True

    @abstractmethod
    def make_state(self, workload: Workload, memory: mmap.mmap) -> S:
        """The live objects of a workload, with values from the given memory."""

    @abstractmethod
    def make_training(self, scale: float) -> Training[S]:
        """A training loop whose state it can save."""

    def open(self, directory: Path, state: S, keep: int | None = None) -> None:
        """Called once, before all else; `keep` is how many saves to keep, None for all."""
        self.directory = directory
        self.state = state
        self.keep = keep

    def prepare(self) -> None:
        """Called before each save, and not counted."""
        self.state.take()

    @abstractmethod
    def save(self, step: int) -> None:
        """Saves the live state; returns when training may go on. Waits for the save before, if it has to."""

    def wait_copied(self) -> float:
        """**Blocks** until the live state may be changed.

        Returns:
            The seconds that this has cost beyond the call of `save`.
        """
        return 0.0

    @abstractmethod
    def wait_durable(self) -> None:
        """**Blocks** until the newest save would outlive a power cut."""

    @abstractmethod
    def restore(self, step: int) -> dict[str, float]:
        """Gives the live state the saved values; returns seconds of parts that are worth a figure of their own."""

    def retain(self, step: int) -> None:
        """Called after each save that is durable: removes what is not to be kept."""
        if self.keep is not None and step > self.keep:
            self.remove(step - self.keep)

    def remove(self, step: int) -> None:
        """Removes what a save has written."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def path(self, step: int) -> Path:
        """Where a step is saved, as a file or as a directory."""
        return self.directory / f"step-{step}"

    def close(self) -> None:
        """Called once, after all else."""
        return


class TorchPeer(Peer["State"]):
    """One that saves torch's tensors."""

    def make_state(self, workload: Workload, memory: mmap.mmap) -> State:
        """Tensors in the given memory."""
        from benchmarks.states.torch_state import make_state

        return make_state(workload, memory)

    def make_training(self, scale: float) -> Training[State]:
        """A loop in torch."""
        from benchmarks.states.torch_state import make_training

        return make_training(scale)


def sync_path(path: Path) -> None:
    """Makes a file, or the names in a directory, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes a directory last, with all files and directories below it and its own name."""
    for entry in sorted(path.rglob("*")):
        sync_path(entry)
    sync_path(path)
    sync_path(path.parent)
