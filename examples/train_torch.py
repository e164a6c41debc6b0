"""Trains a small network with PyTorch. Kill it at any moment and start it again: it resumes where it was.

python examples/train_torch.py
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

STEPS = 5_000


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    # Replace these by your own dataset, model, optimizer and schedule.
    torch.manual_seed(0)
    points = torch.rand(10_000, 2) * 2 - 1
    dataset = TensorDataset(points, (points.square().sum(1, keepdim=True) < 0.5).float())
    model = nn.Sequential(
        nn.Linear(2, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS)
    loader = holdfast.ResumableDataLoader(dataset, batch_size=100, seed=1)
    batches = loader.stream()  # epoch after epoch, without end

    with holdfast.resumable(
        directory,
        model=model,  # what is named here is saved and restored: name all that training changes
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        rng=holdfast.RNG(),
        save_every=500,
        keep=3,
    ) as run:
        for step in run.steps(STEPS):  # the steps that remain
            inputs, targets = next(batches)
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 100 == 99:
                run.report(loss=loss.item())  # stored with the next checkpoint; `holdfast list` shows it
                print(f"step {step + 1}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/torch")
