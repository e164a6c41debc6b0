"""A fit of the Trainer of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import holdfast as hf
from benchmarks.frameworks.fit import Clock, Fit, Model, Samples, Stream
from benchmarks.frameworks.sizes import FitSize


class TransformersFit(Fit):
    """`Resumable`, or `save_steps`."""

    def make(self, size: FitSize, steps: int, clock: Clock, every: int | None) -> Callable[[], object]:
        """The Trainer's `train`."""
        callbacks: list[Any] = [_Watch(clock)]
        saves: dict[str, Any] = {"save_strategy": "no"}
        resumed = False
        if self.way == "holdfast" and every is not None:
            callbacks.append(hf.transformers.Resumable(self.directory / "run", save_every=hf.Steps(every), quiet=True))
        elif every is not None:
            # As many as holdfast keeps.
            saves = {"save_strategy": "steps", "save_steps": every, "save_total_limit": 3}
            resumed = any(self.directory.glob("out/checkpoint-*"))
        arguments = TrainingArguments(
            str(self.directory / "out"),
            num_train_epochs=1,
            per_device_train_batch_size=size.batch,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            **saves,
        )
        samples = Samples(size, steps)
        data = Stream(samples) if size.is_stream else samples
        trainer = Trainer(_Module(size), arguments, train_dataset=data, data_collator=_collate, callbacks=callbacks)
        return lambda: trainer.train(resume_from_checkpoint=resumed or None)


class _Module(torch.nn.Module):
    def __init__(self, size: FitSize) -> None:
        super().__init__()
        self.model = Model(size)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(tokens, labels)}


def _collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    tokens, labels = zip(*samples, strict=True)
    return {"tokens": torch.tensor(tokens), "labels": torch.tensor(labels)}


class _Watch(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._clock.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._clock.end_step(state.global_step)
