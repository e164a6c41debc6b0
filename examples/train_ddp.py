"""Trains a small network with DDP. Kill a worker, or all of them, at any moment and start them again: they resume.

torchrun --standalone --nproc-per-node 2 --max-restarts 10 examples/train_ddp.py

If a worker dies, torchrun starts all of them again. The number of workers may change between two epochs; with a
`holdfast.ResumableDataLoader` it may change in the middle of an epoch, too.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

EPOCHS = 50


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    holdfast.init_process_group("gloo")  # on GPUs: "nccl", and move the model and each batch to the worker's GPU
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Replace these by your own dataset, loader, model and optimizer. All workers begin with the same weights and data.
    torch.manual_seed(0)
    points = torch.rand(9_600, 2) * 2 - 1
    dataset = TensorDataset(points, (points.square().sum(1, keepdim=True) < 0.5).float())
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Each worker gets its part of the data, in batches of this size; `set_epoch` is called for you.
    loader = DataLoader(dataset, batch_size=48, sampler=DistributedSampler(dataset))

    with holdfast.resumable(
        directory,
        model=model,  # what is named here is saved and restored: name all that training changes
        optimizer=optimizer,
        rng=holdfast.RNG(),
        save_every=500,
        keep=3,
    ) as run:
        print(f"worker {rank} of {world_size}, process {os.getpid()}, begins with step {run.step}", flush=True)
        for _epoch in run.epochs(EPOCHS):  # the epochs that remain
            for inputs, targets in run.batches(loader):  # the batches that remain; their place is saved too
                loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.finish_step()  # counts the step, and saves it if a save is due
                if run.step % 100 == 0 and rank == 0:
                    print(f"step {run.step}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/ddp")
