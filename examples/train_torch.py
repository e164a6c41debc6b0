"""Trains a small network with PyTorch. Kill it at any moment and start it again: it resumes where it was.

python examples/train_torch.py
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

EPOCHS = 100


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    torch.set_num_threads(1)  # the fastest for so small a model; remove it for yours
    # Replace these by your own dataset, loader, model, optimizer and schedule.
    torch.manual_seed(0)
    points = torch.rand(10_000, 2) * 2 - 1
    dataset = TensorDataset(points, (points.square().sum(1, keepdim=True) < 0.5).float())
    loader = DataLoader(dataset, batch_size=100, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=EPOCHS * len(loader))

    with holdfast.resumable(
        directory,
        model=model,  # what is named here is saved and restored: name all that training changes
        optimizer=optimizer,
        schedule=schedule,
        rng=holdfast.RNG(),
        save_every=500,
        keep=holdfast.Latest(3) | holdfast.Best("loss"),  # and so RUN@best is the step with the lowest loss
    ) as run:
        for _epoch in run.epochs(EPOCHS):  # the epochs that remain
            for inputs, targets in run.batches(loader):  # the batches that remain; their place is saved too
                loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                if run.step % 100 == 99:
                    run.report(loss=loss.item())  # stored with the next checkpoint; `holdfast list` shows it
                    print(f"step {run.step + 1}: loss {loss.item():.6f}", flush=True)
                run.finish_step()  # counts the step, and saves it if a save is due


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/torch")
