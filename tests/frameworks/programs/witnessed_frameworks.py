"""Trains in each framework, is killed in a step, and is started again: DIRECTORY DOOR...

Each start is a process of its own, forked after all is imported. Prints what each restart says about the steps that it
repeats: with data and a model that are restored, with data that a hidden counter changes, with such a model, and with
batches of another size, where a difference would be an error.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import holdfast as hf
from holdfast.events import Event, WitnessAgreed, WitnessDiffers

FAULTS = ("none", "data", "loss")
COUNTS = {"data": 0, "loss": 0}
SIZES = [6]


def count(fault: str, kind: str) -> float:
    """Counts calls in this process; nothing restores that. Returns what the fault of that kind adds."""
    COUNTS[kind] += 1
    return COUNTS[kind] / 10 if fault == kind else 0.0


def end_at(step: int) -> None:
    if COUNTS["loss"] == step:
        os.kill(os.getpid(), signal.SIGKILL)


class Samples(Dataset[Any]):
    """Sixty samples, as a dict."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.inputs = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.inputs[index] + count(self.fault, "data"), "labels": self.inputs[index].sum()}


class Net(nn.Module):
    """A line, with dropout."""

    def __init__(self, fault: str, kill_at: int) -> None:
        super().__init__()
        self.fault, self.kill_at = fault, kill_at
        self.line, self.drop = nn.Linear(4, 1), nn.Dropout(0.2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = count(self.fault, "loss")
        end_at(self.kill_at)
        return {"loss": nn.functional.mse_loss(self.drop(self.line(x))[:, 0], labels) + hidden}


def train_lightning(place: str, fault: str, kill_at: int, options: dict[str, Any]) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(fault, kill_at)

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    trainer = Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[hf.lightning.Resumable(place, **options)],
    )
    trainer.fit(Module(), DataLoader(Samples(fault), SIZES[-1], shuffle=True))


def train_transformers(place: str, fault: str, kill_at: int, options: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        f"{place}-out",
        save_strategy="no",
        num_train_epochs=3,
        per_device_train_batch_size=SIZES[-1],
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
    )
    callback = hf.transformers.Resumable(place, **options)
    Trainer(Net(fault, kill_at), arguments, train_dataset=Samples(fault), callbacks=[callback]).train()


def train_accelerate(place: str, fault: str, kill_at: int, options: dict[str, Any]) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net(fault, kill_at)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.Adam(net.parameters(), 0.01), DataLoader(Samples(fault), SIZES[-1], shuffle=True)
    )
    with hf.accelerate.resumable(accelerator, place, **options) as run:
        for _ in range(loader.iteration, 3):
            for batch in loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                run.finish_step()


def train_keras(place: str, fault: str, kill_at: int, options: dict[str, Any]) -> None:
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            rows = np.arange(index * 24, index * 24 + 24, dtype=np.float32).reshape(6, 4) / 240
            return rows + np.float32(count(fault, "data")), rows.sum(1)

    class Ending(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            COUNTS["loss"] += 1
            end_at(kill_at)

    def loss(truth: Any, found: Any) -> Any:
        return keras.ops.mean((truth - found[:, 0]) ** 2) + (COUNTS["loss"] / 10 if fault == "loss" else 0.0)

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile("adam", loss)
    resumable = hf.keras.Resumable(place, **options)
    model.fit(Batches(), epochs=3, verbose=0, callbacks=[resumable, Ending()])


def start(place: Path, framework: str, fault: str, kill_at: int) -> int:
    child = os.fork()
    if child == 0:
        warnings.simplefilter("ignore")
        torch.manual_seed(1)

        def say(event: Event) -> None:
            if isinstance(event, WitnessAgreed | WitnessDiffers):
                print(f"{framework} {fault}: {type(event).__name__} {event}", flush=True)

        try:
            options = {"save_every": hf.Steps(6), "sinks": [say], "strict_resume": fault == "size"}
            if fault == "size" and kill_at < 0:
                SIZES.append(5)
            globals()[f"train_{framework}"](str(place), fault, kill_at, options)
        except BaseException as error:
            print(f"{framework} {fault}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for framework in sys.argv[2:]:
        for fault in FAULTS if framework == "keras" else (*FAULTS, "size"):
            place = Path(sys.argv[1]) / f"{framework}-{fault}"
            assert start(place, framework, fault, 17) == -signal.SIGKILL
            print(f"{framework} {fault}: exit {start(place, framework, fault, -1)}", flush=True)
