"""Trains a model with a loss that has parameters: DIRECTORY KIND SEED, where SEED is for the first values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast as hf

DATA = [{"x": row, "labels": int(row.sum() > 0)} for row in torch.randn(24, 4, generator=torch.manual_seed(1))]


class Head(nn.Module):
    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(8, 2)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("center", torch.zeros(8))

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.center = 0.9 * self.center + 0.1 * features.detach().mean(0)
        loss: torch.Tensor = nn.functional.cross_entropy(self.classifier(features - self.center), labels)
        return loss * self.temperature


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        features: torch.Tensor = self.body(x)
        return features


def note(step: int, head: Head) -> None:
    print(
        json.dumps({"step": step, "sums": [one.double().sum().item() for one in head.state_dict().values()]}),
        flush=True,
    )


def train_by_trainer(place: Path) -> None:
    import transformers

    class Training(transformers.Trainer):  # type: ignore[misc]
        criterion: Head

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return self.criterion(model(inputs["x"]), inputs["labels"])

        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.criterion.parameters()], lr=0.01)
            return self.optimizer

    class Notes(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            note(state.global_step, trainer.criterion)

    arguments = transformers.TrainingArguments(
        str(place / "out"),
        max_steps=12,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    resumable = hf.transformers.Resumable(place / "run", save_every=hf.Steps(1))
    trainer = Training(Net(), arguments, train_dataset=DATA, callbacks=[resumable, Notes()])
    trainer.criterion = Head()
    trainer.train()


def train_by_accelerate(place: Path) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, head = Net(), Head()
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.01)
    loader: Any = torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with hf.accelerate.resumable(accelerator, place / "run", save_every=hf.Steps(1)) as run:
        for _ in range(loader.iteration, 2):
            for batch in loader:
                accelerator.backward(head(model(batch["x"]), batch["labels"]))
                optimizer.step()
                optimizer.zero_grad()
                run.finish_step()
                note(run.step, head)


if __name__ == "__main__":
    directory, kind, seed = sys.argv[1:]
    torch.manual_seed(int(seed))
    {"trainer": train_by_trainer, "accelerate": train_by_accelerate}[kind](Path(directory))
