"""Saves a checkpoint of Lightning in a bucket, and trains on from it: `lightning_io.py URL`."""

from __future__ import annotations

import sys

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import holdfast


class Model(LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def train(epochs: int, begin: str | None) -> Trainer:
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[holdfast.lightning.HoldfastCheckpointIO()],
    )  # fmt: skip
    torch.manual_seed(1)
    batches = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
    trainer.fit(Model(), batches, ckpt_path=begin)
    return trainer


def main(url: str) -> None:
    first = train(2, None)
    first.save_checkpoint(url)
    saved = {name: value.clone() for name, value in first.lightning_module.state_dict().items()}
    loaded = holdfast.lightning.HoldfastCheckpointIO().load_checkpoint(url)
    print("equal", all(torch.equal(value, loaded["state_dict"][name]) for name, value in saved.items()))
    print("ends", train(2, None).global_step, train(3, url).global_step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
