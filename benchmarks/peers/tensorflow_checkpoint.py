"""TensorFlow's asynchronous checkpoint, by its `CheckpointManager`, on variables."""

from __future__ import annotations

import mmap
from pathlib import Path

import tensorflow as tf

from benchmarks.peers.peer import Peer, sync_path
from benchmarks.states.tensorflow_state import TensorFlowState, TensorFlowTraining, Update, make_state
from benchmarks.states.training import Training
from benchmarks.states.workloads import Workload


class TensorFlowAsync(Peer[TensorFlowState]):
    """The copy shares the variables' memory, until the first change of each variable copies it."""

    makes_last = "nothing"
    # The first save makes the copies, the second traces the function that fills them.
    settling_saves = 2

    def make_state(self, workload: Workload, memory: mmap.mmap) -> TensorFlowState:
        """Variables with the values in the given memory."""
        state = make_state(workload, memory)
        # Made here, so that its memory does not count as the checkpoint's.
        self._update = Update(state)
        return state

    def make_training(self, scale: float) -> Training[TensorFlowState]:
        """A loop in TensorFlow."""
        return TensorFlowTraining(scale)

    def open(self, directory: Path, state: TensorFlowState, keep: int | None = None) -> None:
        """Makes the manager."""
        super().open(directory, state, keep)
        self._checkpoint = tf.train.Checkpoint(state=state.variables)
        self._manager = tf.train.CheckpointManager(
            self._checkpoint, str(directory), max_to_keep=keep, checkpoint_name="step"
        )
        self._options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
        self._update_seconds = 0.0

    def prepare(self) -> None:
        """Measures a change of all variables while nothing is saved."""
        super().prepare()
        self._update.seconds()
        self._update_seconds = self._update.seconds()

    def save(self, step: int) -> None:
        """Waits for the save before by itself."""
        self._newest = step
        self._manager.save(checkpoint_number=step, options=self._options)

    def wait_copied(self) -> float:
        """How much longer the same change takes now."""
        return max(0.0, self._update.seconds() - self._update_seconds)

    def wait_durable(self) -> None:
        """Waits for the thread, then adds all fsyncs."""
        self._checkpoint.sync()
        for path in self._files(self._newest):
            sync_path(path)
        sync_path(self.directory / "checkpoint")
        sync_path(self.directory)

    def restore(self, step: int) -> dict[str, float]:
        """Assigns the values to the variables, by a checkpoint of its own as in a restarted job."""
        checkpoint = tf.train.Checkpoint(state=self.state.variables)
        checkpoint.restore(str(self.path(step))).assert_existing_objects_matched()
        return {}

    def retain(self, step: int) -> None:
        """The manager does it."""
        return

    def remove(self, step: int) -> None:
        """Removes the files of a save."""
        for path in self._files(step):
            path.unlink()

    def path(self, step: int) -> Path:
        """The beginning of the names of a save's files."""
        return self.directory / f"step-{step}"

    def _files(self, step: int) -> list[Path]:
        return sorted(self.directory.glob(f"step-{step}.*"))
