"""What a way of saving has to be able to do to be measured."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The process that compares the peers imports this file, and needs no torch.
    from benchmarks.state import State


class Peer(ABC):
    """One way of saving, set up as its own documents say is best.

    Attributes:
        makes_last: What it makes durable by itself. What is missing is added by `wait_durable`, so that the times until
            durable mean the same for all.
    """

    makes_last: str

    def open(self, directory: Path, state: State) -> None:
        """Called once, before all else."""
        self.directory = directory
        self.state = state

    @abstractmethod
    def save(self, step: int) -> None:
        """Saves the live state; returns when training may go on. Waits for the save before, if it has to."""

    @abstractmethod
    def wait_durable(self) -> None:
        """**Blocks** until the newest save would outlive a power cut."""

    @abstractmethod
    def restore(self, step: int) -> dict[str, float]:
        """Gives the live state the saved values; returns seconds of parts that are worth a figure of their own."""

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


def sync_path(path: Path) -> None:
    """Makes a file, or the names in a directory, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
