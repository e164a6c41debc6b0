"""One worker of a job that torchrun's agent starts: trains replicas with `hf.resumable`, and dies where it is told to.

python tests/programs/elastic.py joint_training 2 1 RUN 12 1:7

With `flip` in place of a rank and a step, a bit of one weight of rank 1 flips in the last step but one.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast as hf
from holdfast.format.digests import digest
from holdfast.testing.cluster_scenarios import say


def main(directory: str, steps: str, death: str) -> None:
    total = int(steps)
    hf.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # In which order the gradients of more than two workers are added up depends on how many steps a process has done,
    # and so do the last bits; unless all have the same gradients.
    part = rank if world_size == 2 else 0
    torch.manual_seed(part + 10)
    own = {"seen": torch.zeros(1)}
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "rng": hf.RNG(), "own": hf.PerWorker(own)}
    options: dict[str, Any] = {"keep": hf.Latest(2), "check_replicas": death == "flip", "sinks": [tell_diverged]}
    # How long the others wait for one that was killed.
    options["liveness_seconds"] = 5.0
    with hf.resumable(directory, save_every=hf.Steps(3), **options, **objects) as run:
        say({"rank": rank, "start": start, "begun": run.step})
        for step in run.steps(total):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * world_size + part))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            own["seen"] += inputs.sum() + rank
            if death == "flip" and rank == 1 and step == total - 2:
                with torch.no_grad():
                    model.module[0].weight.view(torch.int32)[3, 5] ^= 1
            if start == 0 and death == f"{rank}:{step}":
                os.kill(os.getpid(), signal.SIGKILL)
    state = b"".join(tensor.detach().numpy().tobytes() for tensor in [*model.state_dict().values(), own["seen"]])
    say({"rank": rank, "ended": digest(state), "restored": run.restored.step if run.restored else None})
    dist.destroy_process_group()


def tell_diverged(event: hf.events.Event) -> None:
    if isinstance(event, hf.events.Diverged):
        say({"diverged": event.step, "tensor": event.tensor, "ranks": event.ranks})
