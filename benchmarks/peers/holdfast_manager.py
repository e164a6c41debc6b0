"""holdfast, with the settings that it has by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import holdfast as hf
from benchmarks.peers.peer import Peer
from benchmarks.state import State


class Holdfast(Peer):
    """One manager for all saves; each restore is a restarted job's, with a manager of its own."""

    makes_last = "files, names and directories"

    def open(self, directory: Path, state: State) -> None:
        """Makes the manager."""
        super().open(directory, state)
        self._checkpoint = hf.Checkpoint(**state.objects)
        self._manager = hf.CheckpointManager(directory, self._checkpoint)
        self._handles: dict[int, hf.SaveHandle] = {}

    def save(self, step: int) -> None:
        """Copies; the rest goes on behind."""
        self._handles[step] = self._manager.save(step)

    def wait_durable(self) -> None:
        """Waits for the commit, and for what is cleaned up behind it."""
        self._manager.wait()

    def restore(self, step: int) -> dict[str, float]:
        """Reads and checks every byte."""
        with hf.CheckpointManager(self.directory, self._checkpoint) as manager:
            manager.restore(step)
        return {}

    def remove(self, step: int) -> None:
        """Removes the step's directory; the run goes on with the next."""
        shutil.rmtree(self._handles.pop(step).path)

    def close(self) -> None:
        """Ends the threads."""
        self._manager.close()
