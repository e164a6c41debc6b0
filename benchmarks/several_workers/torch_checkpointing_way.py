"""torch_checkpointing with several workers."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.peers.torch_checkpointing_manager import TorchCheckpointing
from benchmarks.several_workers.ways import Removing, sync_some


class WorkersTorchCheckpointing(Removing, TorchCheckpointing):
    """Each worker writes what it holds into files of its own."""

    def wait_durable(self) -> None:
        """Waits until all workers have written, then adds the fsyncs, a part by each worker."""
        self._wait_written()
        dist.barrier()
        sync_some(self._newest)
