"""One worker of a job that changes what it saves between its saves, and restores each of them over other values.

python tests/programs/elastic.py kept_plans 2 0 plain RUN
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import holdfast as hf
from holdfast.testing.cluster_scenarios import say
from mesh_training import compare, whole

LAYERS = 10


class Job:
    """A divided module with its optimizer, a module that all workers hold, and tensors by themselves."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(1)
        self.net: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(LAYERS)))
        for layer in self.net:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.net, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.plain: Any = nn.Sequential(*(nn.Linear(3, 3) for _ in range(LAYERS)))
        self.loose: dict[str, Any] = {f"t{n}": self.divide(torch.full((5, 3), float(n))) for n in range(2 * LAYERS)}
        self.counts: dict[str, Any] = {f"c{number}": number for number in range(2 * LAYERS)}
        self.steps = 0

    def divide(self, tensor: torch.Tensor, placement: Any = None) -> Any:
        return distribute_tensor(tensor, self.mesh, None if placement is None else [placement])

    def objects(self) -> dict[str, Any]:
        return {
            "net": self.net,
            "optimizer": self.optimizer,
            "plain": self.plain,
            "loose": self.loose,
            "n": self.counts,
        }

    def train(self) -> None:
        self.steps += 1
        self.optimizer.zero_grad()
        self.net(torch.randn(4, 6, generator=torch.Generator().manual_seed(self.steps))).square().mean().backward()
        self.optimizer.step()
        self.counts.update({name: number + 1 for name, number in self.counts.items()})

    def evaluate(self) -> None:
        with torch.no_grad():  # It leaves the parameters gathered.
            self.net(torch.ones(1, 6))

    def replace_a_parameter(self) -> None:
        self.plain[3].weight = nn.Parameter(torch.full((4, 3), 7.0))

    def swap_a_module(self) -> None:
        self.plain[5] = nn.Bilinear(2, 2, 2)

    def remove_a_module(self) -> None:
        del self.plain[7]

    def move_memory(self) -> None:
        for parameter in self.plain.parameters():
            parameter.data = parameter.data.clone()

    def resize_in_place(self) -> None:
        self.plain[0].bias.requires_grad_(False).resize_(9).fill_(3.0)
        self.plain[0].bias.requires_grad_(True)

    def divide_otherwise(self) -> None:
        self.loose["t3"] = self.divide(torch.arange(15.0).reshape(5, 3), Replicate())
        self.loose["t4"] = self.divide(torch.arange(15.0).reshape(5, 3))

    def another_mesh(self) -> None:
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
        self.loose["t5"] = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh)

    def tie(self) -> None:
        self.loose["t6"] = self.loose["t7"]

    def load_state(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def add_a_group(self) -> None:
        more: Any = nn.Sequential(nn.Linear(4, 4))
        fully_shard(more, mesh=self.mesh)
        self.net.append(more)
        self.optimizer.add_param_group({"params": list(more.parameters()), "lr": 0.5})

        def forward(batch: Any) -> Any:
            for layer in list(self.net)[:LAYERS]:
                batch = layer(batch)
            return batch + 0 * more(batch[:, :4]).sum()

        self.net.forward = forward

    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def tensors_of(job: Job) -> dict[str, Any]:
    """All live tensors, by name."""
    found = {
        **job.net.state_dict(),
        **{f"plain.{name}": one for name, one in job.plain.state_dict().items()},
        **job.loose,
    }
    for number, state in enumerate(job.optimizer.state.values()):
        found.update({f"{number}/{key}": value for key, value in state.items()})
    return found


def check(manager: hf.CheckpointManager, job: Job, step: int) -> None:
    """Saves, puts other values into everything, and restores."""
    job.net.eval()
    for layer in job.net.modules():
        getattr(layer, "reshard", lambda: None)()
    manager.save(step).wait_committed()
    expected = {name: whole(one) for name, one in tensors_of(job).items()}
    counts = dict(job.counts)
    with torch.no_grad():
        for tensor in tensors_of(job).values():
            (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).fill_(0)
    job.counts.update(dict.fromkeys(job.counts, -1))
    assert manager.restore(step) is not None
    compare({name: whole(one) for name, one in tensors_of(job).items()}, expected)
    assert manager.checkpoint["n"] == counts, (manager.checkpoint["n"], counts)
    job.counts = manager.checkpoint["n"]


def main(mode: str, directory: str) -> None:
    hf.init_process_group("gloo")
    job = Job()
    job.train()
    changes: list[Callable[[], None]] = [
        *(job.evaluate, job.replace_a_parameter, job.swap_a_module, job.remove_a_module, job.move_memory),
        *(
            job.resize_in_place,
            job.divide_otherwise,
            job.another_mesh,
            job.tie,
            job.load_state,
            job.add_a_group,
            job.fork,
        ),
    ]
    checkpoint = hf.Checkpoint(**job.objects())
    with hf.CheckpointManager(directory, checkpoint, overlap_copy=mode == "overlapped", keep=hf.Latest(2)) as manager:
        step = 0
        for change in changes:
            for _ in range(2):
                step += 1
                job.train()
                check(manager, job, step)
            change()
            step += 1
            check(manager, job, step)
    say({"ended": dist.get_rank()})
    dist.barrier()
    dist.destroy_process_group()
