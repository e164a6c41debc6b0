"""Data-parallel training of which any process may be killed: see below how it is started.

torchrun --standalone --nproc-per-node 2 --max-restarts 10 examples/train_many.py runs/many

Kill one of its workers (their process ids are printed) and look: torchrun starts all of them again, and they go on from
the newest checkpoint. Start it again with another number of workers, and it goes on as well.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

TOTAL_STEPS = 200


def main(directory: str) -> None:
    """Trains a small network to tell whether a point lies in a circle, each worker on its part of each batch."""
    holdfast.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    points = torch.rand(2400, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.5).float()

    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = holdfast.ResumableDataLoader(
        TensorDataset(points, inside), batch_size=48, seed=1, rank=rank, world_size=world_size
    )
    batches = loader.stream()

    with holdfast.resumable(
        directory,
        model=model,
        optimizer=optimizer,
        loader=loader,
        rng=holdfast.RNG(),
        save_every=holdfast.Steps(20),
        keep=holdfast.Latest(3),
    ) as run:
        print(f"worker {rank} of {world_size}, process {os.getpid()}, begins with step {run.step}", flush=True)
        for step in run.steps(TOTAL_STEPS):
            inputs, targets = next(batches)
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"step {step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
