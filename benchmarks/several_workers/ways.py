"""The ways of saving that several workers compare, each as in one process but for what the workers must agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch.distributed as dist

import holdfast as hf
from benchmarks.harness.timing import timed
from benchmarks.harness.worker import load
from benchmarks.peers import check_installed
from benchmarks.peers.dcp import InThreadCached, Synchronous
from benchmarks.peers.holdfast_manager import Holdfast
from benchmarks.peers.peer import TorchPeer, sync_path
from benchmarks.several_workers import DCP, DCP_SYNC, HOLDFAST, NEEDS, OVERLAPPED, TORCH_CHECKPOINTING
from benchmarks.states.torch_state import State


class WorkersHoldfast(Holdfast):
    """A save is durable once it is committed; what is cleaned up after that may go on when the next one begins."""

    def open(self, directory: Path, state: State, keep: int | None = None) -> None:
        """Makes the manager, on all workers."""
        super().open(directory, state, keep)
        self._restarted: hf.CheckpointManager | None = None
        dist.barrier()

    def prepare(self) -> None:
        """Closes what a restarted job has opened."""
        super().prepare()
        restarted, self._restarted = self._restarted, None
        if restarted is not None:
            restarted.close()

    def restore(self, step: int) -> dict[str, float]:
        """Reads and checks every byte, with a manager of its own as in a restarted job, which is closed later."""
        self._restarted = hf.CheckpointManager(self.directory, self._checkpoint)
        self._restarted.restore(step)
        return {}

    def wait_durable(self) -> None:
        """Waits for the commit alone."""
        assert self._newest is not None
        self._newest.wait_committed()

    def retain(self, step: int) -> None:
        """The manager does it; here its clean-up is waited for."""
        self._manager.wait()

    def close(self) -> None:
        """Ends the threads."""
        self.prepare()
        super().close()


class WorkersOverlapped(WorkersHoldfast):
    """Parameters and optimizer state are copied while training goes on; the optimizer's step waits by itself."""

    options = {"overlap_copy": True}  # noqa: RUF012  As in the class that it derives from.

    def wait_copied(self) -> float:
        """The wait of the optimizer's step, if it came at once."""
        assert self._newest is not None
        return timed(self._newest.wait_staged)


class Removing(TorchPeer):
    """One that leaves all that it has saved: the first worker removes it."""

    def retain(self, step: int) -> None:
        """Removes all but the step, once all workers have saved it."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self.directory.glob("step-*"):
                if path != self.path(step):
                    super().remove(int(path.name.removeprefix("step-")))
        dist.barrier()

    def remove(self, step: int) -> None:
        """The first worker removes it for all."""
        dist.barrier()
        if dist.get_rank() == 0:
            super().remove(step)
        dist.barrier()


class WorkersDcp(Removing, InThreadCached):
    """Its threads meet in a group of their own, as training has collectives of its own meanwhile."""

    def join_group(self) -> dist.ProcessGroup | None:
        """One more group, on all workers."""
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        return group


class WorkersDcpSync(Removing, Synchronous):
    """`dcp.save` in the default group."""


def make_way(name: str) -> TorchPeer:
    """The way of saving of that name.

    Raises:
        MissingError: If a package that it needs is not installed.
    """
    check_installed(NEEDS[name])
    way = load(f"benchmarks.several_workers.{_WAYS[name]}")()
    assert isinstance(way, TorchPeer)
    return way


_WAYS: Final = {
    HOLDFAST: "ways:WorkersHoldfast",
    OVERLAPPED: "ways:WorkersOverlapped",
    DCP: "ways:WorkersDcp",
    DCP_SYNC: "ways:WorkersDcpSync",
    # Imported only where its package is installed.
    TORCH_CHECKPOINTING: "torch_checkpointing_way:WorkersTorchCheckpointing",
}


def sync_some(path: Path) -> None:
    """Makes a directory last that all workers have written: each worker syncs its share of the files, and the names."""
    workers, rank = dist.get_world_size(), dist.get_rank()
    for entry in sorted(path.rglob("*"))[rank::workers]:
        sync_path(entry)
    sync_path(path)
    sync_path(path.parent)
