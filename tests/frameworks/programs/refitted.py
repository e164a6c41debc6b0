"""Trains three steps, and again with a model of another size, which a restore refuses: DIRECTORY KIND."""

from __future__ import annotations

import sys
from typing import Any

import torch

import holdfast

DATA = torch.randn(24, 4, generator=torch.manual_seed(1))


def train_by_trainer(directory: str, size: int) -> None:
    import transformers

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, size)

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(x).square().mean()}

    given: dict[str, Any] = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = transformers.TrainingArguments(f"{directory}-out", max_steps=3, per_device_train_batch_size=4, **given)
    resumable = holdfast.transformers.Resumable(directory)
    data: Any = [{"x": row, "labels": 0} for row in DATA]
    transformers.Trainer(Net(), args, train_dataset=data, callbacks=[resumable]).train()


def train_by_lightning(directory: str, size: int) -> None:
    import lightning

    class Net(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, size)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.layer(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters())

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    resumable = holdfast.lightning.Resumable(directory)
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", callbacks=[resumable], **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA), batch_size=4))


def train_by_keras(directory: str, size: int) -> None:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(size)])
    model.compile("sgd", "mse")
    resumable = holdfast.keras.Resumable(directory)
    model.fit(DATA.numpy(), torch.zeros(24, size).numpy(), callbacks=[resumable], verbose=0)


train = {"transformers": train_by_trainer, "lightning": train_by_lightning, "keras": train_by_keras}[sys.argv[2]]
train(sys.argv[1], 2)
train(sys.argv[1], 3)
