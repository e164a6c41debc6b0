"""torch_checkpointing, by its `CheckpointManager`."""

from __future__ import annotations

import resource
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.multiprocessing
from torch_checkpointing import (
    AsyncCheckpointSaverConfig,
    CheckpointManager,
    CheckpointStagerConfig,
    CheckpointWriterConfig,
)
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.harness.timing import timed
from benchmarks.peers.peer import TorchPeer, sync_tree
from benchmarks.states.torch_state import State


class TorchCheckpointing(TorchPeer):
    """A thread copies into memory that a second process shares, which writes it; the loop takes a lock for its step."""

    makes_last = "nothing"
    waits_by_itself = False
    pinned = False
    writers = 2

    def open(self, directory: Path, state: State, keep: int | None = None) -> None:
        """Without what needs an accelerator, and without direct I/O: it writes unaligned ends, which ext4 refuses."""
        super().open(directory, state, keep)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(state.tensors()) > files // 4:
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    staging_config=CheckpointStagerConfig(
                        use_pinned_memory=self.pinned, use_non_blocking_copy=self.pinned
                    ),
                    writer_config=CheckpointWriterConfig(file_write_max_threads=self.writers),
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Waits for the save before by itself."""
        self._newest = self.path(step)
        self._written = self._manager.save(str(self._newest), self.state.tree())

    def wait_copied(self) -> float:
        """Takes the lock that its documents put around the optimizer's step."""
        with_lock = self._manager.lock()
        seconds = timed(with_lock.__enter__)
        with_lock.__exit__(None, None, None)
        return seconds

    def wait_durable(self) -> None:
        """Waits for the second process, then adds all fsyncs."""
        self._wait_written()
        sync_tree(self._newest)

    def restore(self, step: int) -> dict[str, float]:
        """It fills the tensors that it is given; the rest goes through `load_state_dict`."""
        self.state.load_tree(dict(self._manager.load(str(self.path(step)), into=self.state.tree(), strict=True)))
        return {}

    def close(self) -> None:
        """Ends the second process."""
        self._manager.close()

    def _wait_written(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None


class TorchCheckpointingPinned(TorchCheckpointing):
    """For state on a GPU: copies on a stream of their own, into pinned memory."""

    pinned = torch.cuda.is_available()
    writers = 8
