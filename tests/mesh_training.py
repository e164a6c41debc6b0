"""One worker of a training job that `torchrun` starts: trains in some layout and saves, or restores and compares.

torchrun --standalone --nproc-per-node 4 tests/mesh_training.py save 2x2 RUN
torchrun --standalone --nproc-per-node 2 tests/mesh_training.py check fsdp RUN
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast as hf
from holdfast.catalog import open_generation
from holdfast.format.names import StepName
from holdfast.format.workers import Worker
from holdfast.storage import LocalStorage
from simulated_job import commit_parts, restore_part, save_part


class Net(nn.Module):
    """Sizes that two workers divide evenly, and three do not; and a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.outer = nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(5, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Any:
        self.count += 1
        return self.outer(torch.relu(self.inner(batch))) * self.scale.sum()


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net: Any = Net()
    world_size = dist.get_world_size()
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        fully_shard(net.inner, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif layout in ("2x2", "hsdp"):
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("outer", "inner"))
        if layout == "2x2":
            plan = {"inner": ColwiseParallel(use_local_output=True), "outer": RowwiseParallel()}
            parallelize_module(net, mesh["inner"], plan)
            fully_shard(net, mesh=mesh["outer"])
        else:
            fully_shard(net, mesh=mesh)
    elif layout == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def whole(tensor: Any) -> Any:
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().clone().contiguous()


def read_state(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors, whole, by name; every worker has to take part."""
    inner = net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net
    state = {name: whole(tensor) for name, tensor in inner.state_dict().items()}
    for name, parameter in inner.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            state[f"{name}/{key}"] = whole(tensor)
    return state


def main(mode: str, layout: str, directory: str) -> None:
    dist.init_process_group("gloo")
    worker = Worker(dist.get_rank(), dist.get_world_size())
    storage = LocalStorage(directory)
    net, optimizer = build(layout)
    objects = {"model": net, "optimizer": optimizer, "rng": hf.RNG(), "own": hf.PerWorker({"rank": worker.rank})}
    if mode == "save":
        train(net, optimizer, 2)
        shared: list[Any] = [open_generation(storage) if worker.rank == 0 else None]
        dist.broadcast_object_list(shared)
        name = StepName(2, shared[0])
        receipts: list[Any] = [None] * worker.world_size
        dist.all_gather_object(receipts, save_part(storage, objects, name, worker))
        state = read_state(net, optimizer)
        if worker.rank == 0:
            commit_parts(storage, receipts, name)
            save_file(state, Path(directory) / "expected.safetensors")
        dist.barrier()
    else:
        if mode == "check-stepped":
            train(net, optimizer, 1)
        restoration = restore_part(storage, objects, worker)
        state, expected = read_state(net, optimizer), load_file(Path(directory) / "expected.safetensors")
        wrong = [name for name in state.keys() | expected.keys() if not same(state.get(name), expected.get(name))]
        assert not wrong, wrong
        own: Any = objects["own"]
        if restoration.manifest.world_size == worker.world_size:
            assert own.value == {"rank": worker.rank}
        train(net, optimizer, 1)
    dist.destroy_process_group()
    # Without the end that Python would make of this: there torch may take a process group apart with the interpreter's
    # lock held, while a thread of gloo waits for that lock to let go of a tensor, and the process hangs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool(torch.equal(one, other))


if __name__ == "__main__":
    main(*sys.argv[1:])
