"""A fit of Keras, with torch unless `KERAS_BACKEND` says otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from torch.utils.data import DataLoader

import holdfast as hf
from benchmarks.frameworks.fit import Clock, Fit, Samples
from benchmarks.frameworks.sizes import FitSize


class KerasFit(Fit):
    """`BackupAndRestore` of holdfast, or of Keras."""

    def make(self, size: FitSize, steps: int, clock: Clock, every: int | None) -> Callable[[], object]:
        """The model's `fit`."""
        callbacks: list[Any] = [_Watch(clock)]
        if every is not None:
            backup = hf.keras if self.way == "holdfast" else keras.callbacks
            callbacks.append(backup.BackupAndRestore(str(self.directory / "backup"), save_freq=every))
        model = _make_model(size)
        data = DataLoader(Samples(size, steps), batch_size=size.batch, shuffle=True)
        return lambda: model.fit(data, epochs=1, verbose=0, callbacks=callbacks)


def _make_model(size: FitSize) -> Any:
    tokens = keras.Input((), dtype="int32")
    x = keras.layers.Embedding(size.vocabulary, size.width, trainable=False)(tokens)
    for _ in range(size.layers):
        x = keras.layers.Dense(size.width, activation="relu")(x) + x
    model = keras.Model(tokens, x)
    model.compile(optimizer=keras.optimizers.AdamW(1e-4), loss=_loss)
    return model


def _loss(labels: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.square(outputs - keras.ops.reshape(labels, (-1, 1))))


class _Watch(keras.callbacks.Callback):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._clock.begin_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._clock.end_step(batch + 1)
