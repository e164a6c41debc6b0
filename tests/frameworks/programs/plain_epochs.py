"""Trains with a framework, in epochs of three steps, and saves each by `save_every="1 epoch"`; it may die in a step.

python plain_epochs.py PLACE FRAMEWORK EPOCHS [DIE_AFTER]

With `ENDPOINT` in the environment the place is the URL of a bucket of that service.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from typing import Any

import holdfast

STEPS = 3
COMMITTED = threading.Condition()
steps: set[int] = set()


def note(event: holdfast.events.Event) -> None:
    if isinstance(event, holdfast.events.Committed):
        with COMMITTED:
            steps.add(event.step)
            COMMITTED.notify_all()


OPTIONS: dict[str, Any] = {"save_every": "1 epoch", "keep": "all", "grace": "5s", "sinks": [note]}


def die_at(step: int) -> None:
    """Kills this process in a step, once the epochs before it are saved."""
    if step == DIE_AFTER:
        with COMMITTED:
            assert COMMITTED.wait_for(lambda: step // STEPS * STEPS in steps, timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)


def make_loader() -> Any:
    import torch

    inputs = torch.arange(12.0).reshape(12, 1) / 12
    rows: Any = [{"x": row, "labels": row} for row in inputs]
    return torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)


def train_lightning(place: Any, epochs: int) -> None:
    import lightning
    import torch

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            return (self.layer(batch["x"]) - batch["labels"]).square().mean()

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.training_step(batch, number))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            die_at(self.trainer.global_step)

    resumable = holdfast.lightning.Resumable(place, **OPTIONS)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[resumable],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), make_loader(), make_loader())


def train_transformers(place: Any, epochs: int) -> None:
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    class Dying(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            die_at(state.global_step)

    resumable = holdfast.transformers.Resumable(place, **OPTIONS)
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data: Any = make_loader().dataset
    transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[resumable, Dying()]).train()


def train_keras(place: Any, epochs: int) -> None:
    import keras
    import numpy as np

    class Dying(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        step = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            die_at(int(self.model.optimizer.iterations))

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    inputs = np.arange(12.0).reshape(12, 1) / 12
    resumable = holdfast.keras.Resumable(place, **OPTIONS)
    model.fit(inputs, inputs, batch_size=4, epochs=epochs, callbacks=[resumable, Dying()], verbose=0)


def train_accelerate(place: Any, epochs: int) -> None:
    import accelerate
    import torch

    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    with holdfast.accelerate.resumable(accelerator, place, **OPTIONS) as run:
        for _ in range(loader.iteration, epochs):
            for batch in loader:
                die_at(run.step)
                accelerator.backward((model(batch["x"]) - batch["labels"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                run.finish_step()


if __name__ == "__main__":
    DIE_AFTER = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    place: Any = sys.argv[1]
    if endpoint := os.environ.get("ENDPOINT"):
        place = holdfast.open_storage(place, endpoint=endpoint)
    globals()[f"train_{sys.argv[2]}"](place, int(sys.argv[3]))
