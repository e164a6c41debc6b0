"""The training that the recipes in this folder start, in one process or several. Put your own in its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

DIRECTORY = "runs/example"
TOTAL_STEPS = 1000


def leave() -> None:
    """Leaves word that all is saved, since torchrun ends with 1 whatever its workers' exit code was."""
    Path(f"{DIRECTORY}.again").touch()
    sys.exit(42)


def main() -> None:
    """Trains a small network to tell whether a point lies in a circle, each worker on its part of each batch."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    points = torch.rand(2400, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.5).float()
    model: nn.Module = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 1))
    if world_size > 1:
        holdfast.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = TensorDataset(points, inside)
    loader = holdfast.ResumableDataLoader(dataset, batch_size=48, seed=1, rank=rank, world_size=world_size)
    batches = loader.stream()

    with holdfast.resumable(
        DIRECTORY,
        model=model,
        optimizer=optimizer,
        loader=loader,
        rng=holdfast.RNG(),
        save_every=holdfast.Steps(200),
        keep=holdfast.Latest(3),
        preemption=holdfast.TerminationConfig(exit_fn=leave),
    ) as run:
        print(f"worker {rank} of {world_size}, process {os.getpid()}, begins with step {run.step}", flush=True)
        for step in run.steps(TOTAL_STEPS):
            inputs, targets = next(batches)
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 20 == 19:
                print(f"step {step}: loss {loss.item()!r}", flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
