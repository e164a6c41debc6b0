"""A fit of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast as hf
from benchmarks.frameworks.fit import Clock, Fit, Model, Samples
from benchmarks.frameworks.sizes import FitSize


class LightningFit(Fit):
    """`Resumable`, or `ModelCheckpoint` with or without a thread that writes."""

    def make(self, size: FitSize, steps: int, clock: Clock, every: int | None) -> Callable[[], object]:
        """The Trainer's `fit`."""
        callbacks: list[Any] = [_Watch(clock)]
        plugins = []
        # Of a plain loader, Lightning keeps no place in the data.
        loader: type[DataLoader[Any]] = StatefulDataLoader
        newest = None
        if self.way == "holdfast":
            loader = DataLoader
            if every is not None:
                callbacks.append(hf.lightning.Resumable(self.directory / "run", save_every=hf.Steps(every), quiet=True))
        elif every is not None:
            callbacks.append(ModelCheckpoint(self.directory, every_n_train_steps=every, save_top_k=-1))
            plugins = [AsyncCheckpointIO()] if self.way == "AsyncCheckpointIO" else []
            newest = max(self.directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=callbacks,
            plugins=plugins,
            enable_checkpointing=self.way != "holdfast" and every is not None,
            default_root_dir=self.directory,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = _Module(size)
        data = loader(Samples(size, steps), batch_size=size.batch, shuffle=True)
        return lambda: trainer.fit(module, data, ckpt_path=None if newest is None else str(newest))


class _Module(LightningModule):
    def __init__(self, size: FitSize) -> None:
        super().__init__()
        self.model = Model(size)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-4)


class _Watch(Callback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self._clock.begin_step()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._clock.end_step(trainer.global_step)
