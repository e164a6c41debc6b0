"""Trains a small network with the Trainer of Hugging Face. Kill it and start it again: it ends as if nothing happened.

python examples/transformers_trainer.py runs/trainer
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

import holdfast


class Network(torch.nn.Module):
    """Two layers that learn to add."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as the Trainer expects it."""
        return {"loss": (self.layers(numbers)[:, 0] - labels).pow(2).mean()}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of samples."""
    numbers = torch.stack([sample[0] for sample in samples])
    return {"numbers": numbers, "labels": numbers.sum(1)}


def main(directory: str) -> None:
    """Trains for ten epochs, those of earlier processes included."""
    torch.manual_seed(1)
    trainer = Trainer(
        Network(),
        TrainingArguments(
            f"{directory}-output",
            num_train_epochs=10,
            per_device_train_batch_size=32,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            use_cpu=True,
        ),
        data_collator=collate,
        train_dataset=TensorDataset(torch.randn(2000, 4)),
        callbacks=[holdfast.transformers.Resumable(directory, save_every=holdfast.Steps(50))],
    )
    result = trainer.train()
    print(f"step {result.global_step}: loss {result.training_loss}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/trainer")
