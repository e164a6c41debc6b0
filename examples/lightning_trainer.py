"""Trains a small network with Lightning's Trainer. Kill it and start it again: it ends as if nothing had happened.

python examples/lightning_trainer.py runs/lightning
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import holdfast


class Network(LightningModule):
    """Two layers that learn to add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        (numbers,) = batch
        loss: torch.Tensor = (self.layers(numbers)[:, 0] - numbers.sum(1)).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Prints the loss of the epoch."""
        print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss_epoch'].item()}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(directory: str) -> None:
    """Trains for ten epochs, those of earlier processes included."""
    seed_everything(1)
    trainer = Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[holdfast.lightning.Resumable(directory, save_every=holdfast.Steps(50))],
    )
    trainer.fit(Network(), DataLoader(TensorDataset(torch.randn(2000, 4)), batch_size=32, shuffle=True))
    print(f"step {trainer.global_step}: loss {trainer.callback_metrics['loss_epoch'].item()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
