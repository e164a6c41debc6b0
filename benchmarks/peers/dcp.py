"""torch's distributed checkpoint (DCP), in one process: synchronous, and asynchronous with three ways of staging."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks.peers.peer import Peer, sync_path
from benchmarks.state import State


class Synchronous(Peer):
    """`dcp.save`."""

    makes_last = "files"

    def save(self, step: int) -> None:
        """Returns when the files last."""
        self._newest = self.path(step)
        save(self.state.tree(), checkpoint_id=self._newest)

    def wait_durable(self) -> None:
        """Adds the fsyncs of the two directories."""
        sync_path(self._newest)
        sync_path(self.directory)

    def restore(self, step: int) -> dict[str, float]:
        """DCP fills the tensors that it is given; the rest goes through `load_state_dict`."""
        tree = self.state.tree()
        load(tree, checkpoint_id=self.path(step))
        self.state.load_tree(tree)
        return {}


class InThread(Synchronous):
    """`dcp.async_save` as it comes: each save copies into memory of its own, and a thread writes it."""

    kind = AsyncCheckpointerType.THREAD

    def open(self, directory: Path, state: State) -> None:
        """DCP asks for a process group, also for one process."""
        super().open(directory, state)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
        self._stager = self.make_stager()
        self._future: Future[Any] | None = None

    def make_stager(self) -> AsyncStager | None:
        """What copies; None for what DCP makes for each save."""
        return None

    def save(self, step: int) -> None:
        """DCP leaves it to its user that no two saves are in flight."""
        if self._future is not None:
            self._future.result()
        self._newest = self.path(step)
        future = async_save(
            self.state.tree(),
            checkpoint_id=self._newest,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        self._future = future

    def wait_durable(self) -> None:
        """Waits for the upload, then adds the fsyncs of the directories."""
        if self._future is not None:
            self._future.result()
            self._future = None
        super().wait_durable()

    def close(self) -> None:
        """Ends the stager and the process group."""
        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


class InThreadCached(InThread):
    """The stager is kept, and with it the memory that it copies into."""

    def make_stager(self) -> AsyncStager:
        """Pinned memory, streams and asynchronous staging need an accelerator."""
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
            )
        )


class InProcess(InThread):
    """The stager is kept and copies into memory that a second process shares, which writes it."""

    kind = AsyncCheckpointerType.PROCESS

    def make_stager(self) -> AsyncStager:
        """As for a thread, but shared."""
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
