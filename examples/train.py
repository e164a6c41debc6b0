"""A training run that can be killed at any moment: `python examples/train.py runs/example`, and the same again."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

TOTAL_STEPS = 200


def main(directory: str) -> None:
    """Trains a small network to tell whether a point lies in a circle."""
    torch.manual_seed(0)
    points = torch.rand(2000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    inside = (points.square().sum(1, keepdim=True) < 0.5).float()

    model = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=TOTAL_STEPS)
    loader = holdfast.ResumableDataLoader(TensorDataset(points, inside), batch_size=50, seed=1)
    batches = loader.stream()

    with holdfast.resumable(
        directory,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        rng=holdfast.RNG(),
        save_every=holdfast.Steps(20),
        keep=holdfast.Latest(3) | holdfast.Best("loss"),
    ) as run:
        print(f"beginning with step {run.step}", flush=True)
        for step in run.steps(TOTAL_STEPS):
            inputs, targets = next(batches)
            loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.report(loss=loss.item())
            print(f"step {step}: loss {loss.item()!r}", flush=True)

    print("weights", *(parameter.double().sum().item() for parameter in model.parameters()))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
