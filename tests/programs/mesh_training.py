"""One worker of a training job that torchrun's agent starts: trains in some layout and saves, or restores and compares.

python tests/programs/elastic.py mesh_training 4 1 train 2x2 RUN 3:7
python tests/programs/elastic.py mesh_training 2 0 check fsdp RUN

The first one trains twice: once untouched, and once so that worker 3 (or `all`) is killed in step 7 and all go on from
the newest checkpoint. Both have to end with the same bits.
"""

from __future__ import annotations

import os
import signal
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
from holdfast.testing.cluster_scenarios import say

TOTAL = 8
SAVE_EVERY = 3


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
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net.inner, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif layout in ("2x2", "hsdp"):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
        if layout == "2x2":
            plan = {"inner": ColwiseParallel(use_local_output=True), "outer": RowwiseParallel()}
            parallelize_module(net, mesh["inner"], plan)
            fully_shard(net, mesh=mesh["outer"])
        else:
            fully_shard(net, mesh=mesh)
    elif layout == "ddp":
        net = nn.parallel.DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
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


def run_job(layout: str, directory: Path, death: str) -> dict[str, Any]:
    """Trains to the end, or until the death that is given as a rank and a step; all tensors of the end."""
    rank = dist.get_rank()
    net, optimizer = build(layout)
    diverged: list[hf.events.Event] = []

    def listen(event: hf.events.Event) -> None:
        if isinstance(event, hf.events.Diverged):
            diverged.append(event)

    objects: dict[str, Any] = {"model": net, "optimizer": optimizer, "own": hf.PerWorker({"rank": rank})}
    # Without buffers that each worker counts up by itself, all replicas are alike.
    options: dict[str, Any] = {"keep": hf.All(), "check_replicas": True, "sinks": [listen]}
    # How long the others wait for one that was killed.
    options["liveness_seconds"] = 5.0
    with hf.resumable(directory, save_every=hf.Steps(SAVE_EVERY), rng=hf.RNG(), **options, **objects) as run:
        say({"rank": rank, "begun": run.step, "start": os.environ["TORCHELASTIC_RESTART_COUNT"]})
        for step in run.steps(TOTAL):
            train(net, optimizer, step)
            if death in (f"{rank}:{step}", f"all:{step}"):
                os.kill(os.getpid(), signal.SIGKILL)
    assert not diverged, diverged
    assert objects["own"].value == {"rank": rank}
    return read_state(net, optimizer)


def check_restored(layout: str, directory: Path, expected: dict[str, Any], has_stepped: bool) -> None:
    """Restores what another job has saved, and makes sure that it can go on with it."""
    net, optimizer = build(layout)
    if has_stepped:
        train(net, optimizer, 100)
    objects: dict[str, Any] = {"model": net, "optimizer": optimizer, "own": hf.PerWorker({"rank": dist.get_rank()})}
    with hf.CheckpointManager(directory, hf.Checkpoint(rng=hf.RNG(), **objects)) as manager:
        assert manager.restore(TOTAL) is not None
        compare(read_state(net, optimizer), expected)
        assert objects["own"].value == {"rank": dist.get_rank()}
        train(net, optimizer, TOTAL)
        manager.save(TOTAL + 1).wait_committed()


def compare(state: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = [name for name in state.keys() | expected.keys() if not same(state.get(name), expected.get(name))]
    assert not wrong, wrong


def main(mode: str, layout: str, directory: str, death: str = "") -> None:
    hf.init_process_group("gloo")
    run, file = Path(directory) / "run", Path(directory) / "expected.safetensors"
    if mode == "train":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            expected = run_job(layout, Path(directory) / "untouched", "")
            if dist.get_rank() == 0:
                save_file(expected, file)
            dist.barrier()
            run_job(layout, run, death)
            raise AssertionError("no process was killed")
        compare(run_job(layout, run, ""), load_file(file))
        say({"ended": dist.get_rank()})
    else:
        check_restored(layout, run, load_file(file), has_stepped=mode == "check-stepped")
    dist.barrier()
    dist.destroy_process_group()


def same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and bool(torch.equal(one, other))
