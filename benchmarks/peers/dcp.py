"""torch's distributed checkpoint (DCP), in one process: synchronous, and asynchronous with each way of staging.

Pinned memory and copies that do not block need an accelerator, and without one `DefaultStager` refuses them. All but
the first two keep their stager and with it the memory that it copies into, keep their plan, and write with two threads;
the writer loses some I/O errors then, but is a good deal faster.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
    save,
)

from benchmarks.harness.timing import timed
from benchmarks.peers.peer import TorchPeer, sync_path
from benchmarks.states.torch_state import State


class Synchronous(TorchPeer):
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


class KeptStager(DefaultStager):
    """Serves all saves. torch 2.11 empties a stager after each, and fails in the next (pytorch/pytorch#183413)."""

    def __init__(self, config: StagingOptions) -> None:
        super().__init__(config)
        self._empty: Callable[[], None] = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def end(self) -> None:
        """Frees its memory, and ends its thread."""
        super().close()
        self._empty()


class InThread(Synchronous):
    """`dcp.async_save` with its default settings: each save copies into memory of its own, and a thread writes it."""

    kind = AsyncCheckpointerType.THREAD
    writers = 1

    def open(self, directory: Path, state: State, keep: int | None = None) -> None:
        """Makes what it keeps."""
        super().open(directory, state, keep)
        self._group = self.join_group()
        self._stager = self.make_stager()
        self._planner = DefaultSavePlanner(enable_plan_caching=True) if self._stager is not None else None
        self._staged: Future[Any] | None = None
        self._uploaded: Future[Any] | None = None

    def join_group(self) -> dist.ProcessGroup | None:
        """The group in which its threads meet; None for the default one. DCP asks for one also for one process."""
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{_free_port()}", rank=0, world_size=1)
        return None

    def make_stager(self) -> KeptStager | None:
        """The stager; None for one that DCP makes for each save."""
        return None

    def save(self, step: int) -> None:
        """DCP leaves it to its user that no two saves are in flight."""
        self._wait_uploaded()
        self._newest = self.path(step)
        answer = async_save(
            self.state.tree(),
            checkpoint_id=self._newest,
            storage_writer=FileSystemWriter(self._newest, thread_count=self.writers),
            planner=self._planner,
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._uploaded = answer.staging_completion, answer.upload_completion
        else:
            self._uploaded = answer

    def wait_durable(self) -> None:
        """Waits for the upload, then adds the fsyncs of the directories."""
        self._wait_uploaded()
        super().wait_durable()

    def close(self) -> None:
        """Ends the stager and the process group."""
        if self._stager is not None:
            self._stager.end()
        dist.destroy_process_group(self._group)

    def _wait_uploaded(self) -> None:
        if self._uploaded is not None:
            self._uploaded.result()
            self._uploaded = None


class InThreadCached(InThread):
    """The stager is kept, and copies before the call returns."""

    writers = 2
    overlapped = False
    pinned = False

    def make_stager(self) -> KeptStager:
        """As fast as it goes; without an accelerator `pinned` is refused."""
        return KeptStager(
            StagingOptions(
                use_pinned_memory=self.pinned,
                use_shared_memory=self.kind is AsyncCheckpointerType.PROCESS,
                use_async_staging=self.overlapped,
                use_non_blocking_copy=self.pinned,
            )
        )


class InThreadOverlapped(InThreadCached):
    """A thread copies; the training loop has to wait for it before the optimizer's step."""

    overlapped = True
    waits_by_itself = False

    def wait_copied(self) -> float:
        """Waits for the stager."""
        staged, self._staged = self._staged, None
        return timed(staged.result) if staged is not None else 0.0


class InProcess(InThreadCached):
    """Copies into memory that a second process shares, which writes it."""

    kind = AsyncCheckpointerType.PROCESS

    def open(self, directory: Path, state: State, keep: int | None = None) -> None:
        """By itself torch holds a descriptor for each tensor; for too many, its documents say to share by name."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(state.tensors()) > files // 4:
            torch.multiprocessing.set_sharing_strategy("file_system")
        super().open(directory, state, keep)


class InProcessOverlapped(InProcess, InThreadOverlapped):
    """A thread copies into memory that a second process shares."""


class InThreadPinned(InThreadOverlapped):
    """For state on a GPU: copies on a stream of their own, into pinned memory."""

    writers = 8
    pinned = torch.cuda.is_available()


class InProcessPinned(InProcessOverlapped):
    """The same, into memory that a second process shares."""

    writers = 8
    pinned = torch.cuda.is_available()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
