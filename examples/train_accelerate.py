"""Trains a small network in a loop of Accelerate. Kill it at any moment and start it again: it resumes.

python examples/train_accelerate.py
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

EPOCHS = 50


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    # Replace these by your own dataset, model and optimizer.
    torch.set_num_threads(1)  # the fastest for so small a model; remove it for yours
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(10_000, 4)), batch_size=32, shuffle=True)

    accelerator = Accelerator()
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    with holdfast.accelerate.resumable(accelerator, directory, save_every=500, keep=3) as run:
        for _epoch in range(loader.iteration, EPOCHS):  # the epochs that remain
            for (numbers,) in loader:
                with accelerator.accumulate(network):
                    loss = (network(numbers)[:, 0] - numbers.sum(1)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                run.finish_step()
                if run.step % 100 == 0:
                    print(f"step {run.step}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")
