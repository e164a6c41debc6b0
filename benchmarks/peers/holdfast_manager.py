"""holdfast, with its default settings and with its options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import holdfast as hf
from benchmarks.harness.timing import timed
from benchmarks.peers.peer import TorchPeer
from benchmarks.states.torch_state import State


class Holdfast(TorchPeer):
    """One manager for all saves; each restore is a restarted job's, with a manager of its own.

    Attributes:
        options: What its manager is made with, beyond what it has by itself.
    """

    makes_last = "files, names and directories"
    settling_saves = 3
    options: ClassVar[dict[str, Any]] = {}

    def open(self, directory: Path, state: State, keep: int | None = None) -> None:
        """Makes the manager."""
        super().open(directory, state, keep)
        self._checkpoint = hf.Checkpoint(**state.objects)
        retention = None if keep is None else hf.Latest(keep)
        self._manager = hf.CheckpointManager(directory, self._checkpoint, keep=retention, **self.options)
        self._handles: dict[int, hf.SaveHandle] = {}
        self._newest: hf.SaveHandle | None = None

    def save(self, step: int) -> None:
        """Copies, or sees to it; the rest goes on in the background."""
        self._newest = self._handles[step] = self._manager.save(step)

    def wait_durable(self) -> None:
        """Waits for the commit, and for what is cleaned up after it."""
        self._manager.wait()

    def restore(self, step: int) -> dict[str, float]:
        """Reads and checks every byte."""
        with hf.CheckpointManager(self.directory, self._checkpoint) as manager:
            manager.restore(step)
        return {}

    def retain(self, step: int) -> None:
        """The manager does it; here only the handle is let go."""
        self._handles.pop(step - (self.keep or 0), None)

    def remove(self, step: int) -> None:
        """Removes the step's directory, unless the manager does so: it then writes into that space again."""
        handle = self._handles.pop(step)
        if self.keep is None:
            shutil.rmtree(handle.path)

    def close(self) -> None:
        """Ends the threads."""
        self._manager.close()


class Overlapped(Holdfast):
    """Parameters and optimizer state are copied while training goes on; the optimizer's step waits by itself."""

    options: ClassVar[dict[str, Any]] = {"overlap_copy": True}

    def wait_copied(self) -> float:
        """The wait of the optimizer's step, if it came at once."""
        assert self._newest is not None
        return timed(self._newest.wait_staged)


class Reserved(Holdfast):
    """The memory that the first save needs is allocated when the manager is made."""

    options: ClassVar[dict[str, Any]] = {"reserve_bytes": "auto"}


class Incremental(Holdfast):
    """Refers to what has not changed rather than writing it."""

    options: ClassVar[dict[str, Any]] = {"incremental": True}
