"""Trains a small network in a loop of Accelerate. Kill it and start it again: it ends as if nothing happened.

python examples/accelerate_loop.py runs/loop
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main(directory: str) -> None:
    """Trains for ten epochs, those of earlier processes included."""
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    network = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(2000, 4)), batch_size=32, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    loss = torch.tensor(float("nan"))
    with holdfast.accelerate.resumable(accelerator, directory, loss=loss, save_every=holdfast.Steps(50)) as run:
        for epoch in range(loader.iteration, 10):
            for (numbers,) in loader:
                with accelerator.accumulate(network):
                    error = (network(numbers)[:, 0] - numbers.sum(1)).pow(2).mean()
                    accelerator.backward(error)
                    optimizer.step()
                    optimizer.zero_grad()
                loss.copy_(error.detach())
                run.finish_step()
            print(f"epoch {epoch + 1}: loss {loss.item()}", flush=True)
    print(f"step {run.step}: loss {loss.item()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/loop")
