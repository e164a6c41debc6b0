"""Trains a small network that torch.distributed.checkpoint saves. Kill it and start it again: it goes on exactly.

python examples/dcp_training.py runs/dcp
torchrun --standalone --nproc-per-node 2 examples/dcp_training.py runs/dcp

Started by torchrun, each worker has a part of each parameter (FSDP2). Start it with another number of workers, and it
goes on as well.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

TOTAL_STEPS = 600


class Training:
    """All that is saved, as torch's tutorial has it."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer, self.step = net, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        """The state, which dcp.save calls for."""
        net, optimizer = get_state_dict(self.net, self.optimizer)
        return {"net": net, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what dcp.load has read."""
        set_state_dict(self.net, self.optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def main(directory: str) -> None:
    """Trains for 600 steps, those of earlier processes included."""
    torch.manual_seed(1)
    net: Any = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    rank, group = 0, None
    if "WORLD_SIZE" in os.environ:
        holdfast.init_process_group("gloo")
        rank = dist.get_rank()
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        # A save in the background has a group of its own: in one, its messages and those of training would mix.
        group = dist.new_group(backend="gloo")
    training = Training(net, torch.optim.AdamW(net.parameters(), lr=0.01))

    reader = holdfast.dcp.StorageReader(directory)
    if reader.latest_step() is not None:
        dcp.load({"training": training}, storage_reader=reader)
        print(f"resumed at step {training.step}", file=sys.stderr)

    writer = holdfast.dcp.StorageWriter(directory, keep=holdfast.Latest(3))
    saving: Future[Any] | None = None
    while training.step < TOTAL_STEPS:
        numbers = torch.randn(32, 4, generator=torch.Generator().manual_seed(training.step))
        loss = (net(numbers)[:, 0] - numbers.sum(1)).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.step += 1
        if training.step % 50 == 0:
            if rank == 0:
                print(f"step {training.step}: loss {loss.item()}", flush=True)
            if saving is not None:
                saving.result()  # One save at a time; what has failed in it is raised here.
            writer.step = training.step
            answer: Any = dcp.async_save({"training": training}, storage_writer=writer, process_group=group)
            saving = answer
    if saving is not None:
        saving.result()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/dcp")
