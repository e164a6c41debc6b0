"""Trains a small network with Lightning's Trainer. Kill it at any moment and start it again: it resumes.

python examples/train_lightning.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS = 20_000


class Network(LightningModule):
    """Replace it by your own module: holdfast asks nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch: how far the network is from the sum of the numbers."""
        (numbers,) = batch
        loss: torch.Tensor = (self.layers(numbers)[:, 0] - numbers.sum(1)).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Prints a line each 100 steps."""
        if self.global_step % 100 == 0:
            print(f"step {self.global_step}: loss {outputs['loss'].item():.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    torch.set_num_threads(1)  # the fastest for so small a model; remove it for yours
    seed_everything(1)
    loader = DataLoader(TensorDataset(torch.randn(10_000, 4)), batch_size=32, shuffle=True)  # replace it, too
    trainer = Trainer(
        max_steps=STEPS,
        callbacks=[holdfast.lightning.Resumable(directory, save_every=500, keep=3)],
        enable_checkpointing=False,  # holdfast saves
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Network(), loader)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
