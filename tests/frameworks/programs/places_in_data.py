"""Trains with one of three frameworks, with data of many kinds, and tells which samples each step takes."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from telling import tell
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import holdfast as hf


class Samples(Dataset[Any]):
    """Samples that are their numbers."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(index)), "labels": torch.tensor(0)}


class Weighted(Sampler[int]):
    """Draws by weights, with a generator that it has under a name of its own."""

    def __init__(self, length: int) -> None:
        self.weights, self.drawn_from = np.arange(length), np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Any:
        return iter(self.drawn_from.choice(len(self), len(self), p=self.weights / self.weights.sum()).tolist())


class Buckets:
    """No class of torch's: it gives whole batches, in the order of another sampler and of a list that it shuffles."""

    def __init__(self, length: int) -> None:
        self.base, self.order, self._passes = Weighted(length), list(range(length // 4)), 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        self._passes += 1
        np.random.default_rng(self._passes).shuffle(self.order)
        drawn = sorted(self.base)
        return iter([drawn[4 * number : 4 * number + 4] for number in self.order])


class Stream(IterableDataset[Any]):
    """A stream without state, shuffled by a generator that goes on from one epoch to the next."""

    def __init__(self, length: int) -> None:
        self._samples, self.drawn_from = Samples(length), np.random.default_rng(0)

    def __iter__(self) -> Any:
        return (self._samples[index] for index in self.drawn_from.permutation(len(self._samples)).tolist())


def make_stream(kind: str, length: int) -> Any:
    """A stream of `datasets`."""
    import datasets  # type: ignore[import-not-found, unused-ignore]

    def rows(first: int, count: int) -> Any:
        table = datasets.Dataset.from_dict({"x": list(range(first, first + count)), "labels": [0] * count})
        return table.to_iterable_dataset(num_shards=2)

    stream = rows(0, length)
    if "filtered" in kind:
        stream = stream.filter(lambda row: row["x"] % 5 > 0)
    if "shuffled" in kind:
        stream = stream.shuffle(seed=3, buffer_size=7)
    if "mapped" in kind:
        stream = stream.map(lambda batch: {"y": batch["x"]}, batched=True, batch_size=5).remove_columns("y")
    if "interleaved" in kind:
        stream = datasets.interleave_datasets([stream, rows(100, length // 2)], stopping_strategy="all_exhausted")
    return stream.with_format("torch")


def make_loader(given: argparse.Namespace) -> Any:
    """The loader."""
    kind, length, batch, workers = given.data, given.length, given.batch, given.workers
    if kind == "buckets":
        return DataLoader(Samples(length), batch_sampler=Buckets(length), num_workers=workers)
    if kind in ("shuffle", "weighted", "in order"):
        sampler = Weighted(length) if kind == "weighted" else None
        shuffle = kind == "shuffle"
        return DataLoader(Samples(length), batch, sampler=sampler, shuffle=shuffle, num_workers=workers)
    stream = Stream(length) if kind == "stream" else make_stream(kind, length)
    return DataLoader(stream, batch, num_workers=workers)


class Net(torch.nn.Module):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: Any, labels: Any = None) -> Any:
        """The loss."""
        return {"loss": self.layer(x.float()[:, None] / 10).square().mean()}


class Telling:
    """Tells each step when it is complete; asks the job to leave at the end of one."""

    def __init__(self, leaves_after: int) -> None:
        self._leaves_after, self._told = leaves_after, 0
        self._seen: list[int] = []

    def take(self, numbers: Any) -> None:
        """Notes the samples of a batch."""
        self._seen += numbers.long().tolist()

    def tell_step(self, step: int, epoch: int) -> None:
        """Tells a step."""
        tell(step=step, epoch=epoch, seen=self._seen)
        self._seen = []
        self._told += 1
        if self._told == self._leaves_after:
            os.kill(os.getpid(), signal.SIGTERM)


def train_accelerate(given: argparse.Namespace, telling: Telling, save_every: Any) -> None:
    """With Accelerate."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=given.accumulate)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(given))
    with hf.accelerate.resumable(accelerator, given.directory, save_every=save_every) as run:
        for epoch in range(loader.iteration, given.epochs):
            for rows in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**rows)["loss"])
                    optimizer.step()
                    optimizer.zero_grad()
                telling.take(rows["x"])
                if accelerator.sync_gradients:
                    telling.tell_step(run.step + 1, epoch)
                run.finish_step()


def train_lightning(given: argparse.Namespace, telling: Telling, save_every: Any) -> None:
    """With Lightning."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, rows: Any, number: int) -> Any:
            telling.take(rows["x"])
            return self.net(**rows)["loss"]

        def on_train_batch_end(self, *_: Any) -> None:
            if not self.trainer.fit_loop._should_accumulate():
                telling.tell_step(self.trainer.global_step, self.trainer.current_epoch)

        def validation_step(self, rows: Any, number: int) -> None:
            pass

        def on_validation_epoch_start(self) -> None:
            tell(validates=self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-4)

    trainer = pl.Trainer(
        max_epochs=given.epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accumulate_grad_batches=given.accumulate,
        num_sanity_val_steps=0,
        callbacks=[hf.lightning.Resumable(given.directory, save_every=save_every)],
    )
    trainer.fit(Module(), make_loader(given), DataLoader(Samples(4), 4) if given.validates else None)


def train_transformers(given: argparse.Namespace, telling: Telling, save_every: Any) -> None:
    """With the Trainer of transformers."""
    import transformers

    class Trainer(transformers.Trainer):  # type: ignore[misc, unused-ignore]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(make_loader(given))

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            telling.take(inputs["x"])
            return super().training_step(model, inputs, *rest)

    class Steps(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            telling.tell_step(state.global_step, int(state.epoch - 1e-9))

    has_length = given.data in ("shuffle", "weighted", "buckets", "in order")
    arguments = transformers.TrainingArguments(
        str(given.directory / "out"),
        num_train_epochs=given.epochs,
        max_steps=-1 if has_length else given.max_steps,
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulate,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    resumable = hf.transformers.Resumable(given.directory / "run", save_every=save_every)
    Trainer(Net(), arguments, train_dataset=Samples(given.length), callbacks=[Steps(), resumable]).train()


def train_keras(given: argparse.Namespace, telling: Telling, save_every: Any) -> None:
    """With Keras."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)

    class Model(keras.Model):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, numbers: Any, training: bool = False) -> Any:
            if training:
                telling.take(numbers[:, 0])
            return self.layer(numbers / 10)

    class Steps(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            telling.tell_step(int(self.model.optimizer.iterations), self.epoch)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

    numbers = np.arange(given.length, dtype=np.float32)[:, None]
    model = Model()
    model.compile("sgd", "mse", run_eagerly=True)
    model(numbers[:1])
    resumable = hf.keras.Resumable(given.directory, save_every=save_every)
    model.fit(numbers, 0 * numbers, given.batch, given.epochs, verbose=0, callbacks=[Steps(), resumable])


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--framework", default="accelerate")
    parser.add_argument("--data", default="shuffle")
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--leaves-after", type=int, default=-1)
    parser.add_argument("--validates", action="store_true")
    given = parser.parse_args()
    if "RANK" in os.environ:
        hf.init_process_group("gloo")
    torch.manual_seed(0)
    train = {"accelerate": train_accelerate, "lightning": train_lightning, "transformers": train_transformers}
    train["keras"] = train_keras
    train[given.framework](given, Telling(given.leaves_after), hf.Steps(2))
    tell(ended=True)


if __name__ == "__main__":
    main()
