"""Orbax, by its `CheckpointManager`, on JAX arrays."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, ClassVar

import jax
import orbax.checkpoint as ocp

from benchmarks.peers.peer import Peer, sync_tree
from benchmarks.states.jax_state import JaxState, JaxTraining, make_state
from benchmarks.states.training import Training
from benchmarks.states.workloads import Workload


class OrbaxAsync(Peer[JaxState]):
    """Copies before the call returns; threads compress and write.

    Attributes:
        options: What its handler of trees is made with, beyond what it has by itself.
    """

    makes_last = "files, but not their last names"
    options: ClassVar[dict[str, Any]] = {}

    def make_state(self, workload: Workload, memory: mmap.mmap) -> JaxState:
        """JAX arrays with the values in the given memory."""
        return make_state(workload, memory)

    def make_training(self, scale: float) -> Training[JaxState]:
        """A loop in JAX."""
        return JaxTraining(scale)

    def open(self, directory: Path, state: JaxState, keep: int | None = None) -> None:
        """Makes the manager."""
        super().open(directory, state, keep)
        self._manager = self._make_manager()

    def save(self, step: int) -> None:
        """Waits for the save before by itself."""
        self._newest = self.path(step)
        self._manager.save(step, args=ocp.args.PyTreeSave(_tree(self.state.arrays)))

    def wait_durable(self) -> None:
        """Waits for the threads, then adds what fsyncs may be left."""
        self._manager.wait_until_finished()
        sync_tree(self._newest)

    def restore(self, step: int) -> dict[str, float]:
        """Makes new arrays, by a manager of its own as in a restarted job."""
        homes = self.state.shapes()
        wanted = _tree(homes)
        with self._make_manager() as manager:
            how = ocp.checkpoint_utils.construct_restore_args(wanted)
            read = manager.restore(step, args=ocp.args.PyTreeRestore(wanted, restore_args=how))
        jax.block_until_ready(read)
        self.state.arrays = {name: read[name.replace("/", ":")] for name in homes}
        return {}

    def retain(self, step: int) -> None:
        """The manager does it."""
        return

    def remove(self, step: int) -> None:
        """Removes the step."""
        self._manager.delete(step)

    def path(self, step: int) -> Path:
        """Where a step is saved, as a directory."""
        return self.directory / str(step)

    def close(self) -> None:
        """Ends the threads."""
        self._manager.close()

    def _make_manager(self) -> Any:
        return ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=self.keep, enable_async_checkpointing=True),
            item_handlers=ocp.PyTreeCheckpointHandler(**self.options),
        )


class OrbaxUncompressed(OrbaxAsync):
    """Numbers of a model hardly get smaller, and not to try is a good deal faster."""

    options: ClassVar[dict[str, Any]] = {"use_compression": False}


def _tree(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays by names without slashes."""
    return {name.replace("/", ":"): array for name, array in arrays.items()}
