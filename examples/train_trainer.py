"""Trains a small network with the Trainer of Hugging Face. Kill it at any moment and start it again: it resumes.

python examples/train_trainer.py
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

import holdfast

STEPS = 20_000


class Network(nn.Module):
    """Replace it by your own model, such as one from `AutoModel`: holdfast asks nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def forward(self, numbers: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as the Trainer expects it."""
        return {"loss": (self.layers(numbers)[:, 0] - labels).square().mean()}


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch of samples. Replace it by your own collator."""
    numbers = torch.stack([sample[0] for sample in samples])
    return {"numbers": numbers, "labels": numbers.sum(1)}


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    torch.set_num_threads(1)  # the fastest for so small a model; remove it for yours
    torch.manual_seed(1)
    trainer = Trainer(
        Network(),
        TrainingArguments(
            f"{directory}-output",
            max_steps=STEPS,
            per_device_train_batch_size=32,
            logging_steps=100,
            save_strategy="no",  # holdfast saves
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        data_collator=collate,
        train_dataset=TensorDataset(torch.randn(10_000, 4)),  # replace it, too
        callbacks=[holdfast.transformers.Resumable(directory, save_every=500, keep=3)],
    )
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/trainer")
