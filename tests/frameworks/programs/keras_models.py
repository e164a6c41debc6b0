"""Trains models of TensorFlow that have only a `train_step`: DIRECTORY KIND [LAST]. KIND is gan or encoder.

Each line is a step, with digests of the weights and of the optimizers; the process is killed after step LAST.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import keras
import keras_cases
import numpy as np
import tensorflow as tf

import holdfast as hf


class Adversarial(keras.Model):
    """Two networks, each with an optimizer that is built within the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        self.judge = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(data[0] + keras.random.normal((4,)))
            fooled = tf.reduce_mean(self.judge(made) ** 2)
            judged = tf.reduce_mean((self.judge(data[0]) - 1) ** 2) - fooled
        for optimizer, net, loss in zip(self.optimizers, (self.maker, self.judge), (fooled, judged), strict=True):
            weights = net.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": judged}


class Encoder(keras.Model):
    """A network, trained by the optimizer of `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
        self.seed = keras.random.SeedGenerator(5)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            noise = keras.random.normal(tf.shape(data[0]), seed=self.seed)
            loss = tf.reduce_mean((self.net(data[0] + noise) - data[0]) ** 2)
        weights = self.net.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Told(keras.callbacks.Callback):
    """Prints each step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.count = last, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        model = self.model
        optimizers = getattr(model, "optimizers", None) or [model.optimizer]
        states = [digest(variables) for variables in (model.variables, *(each.variables for each in optimizers))]
        print("step", int(optimizers[0].iterations.numpy()), float(logs["loss"]).hex(), *states, flush=True)
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(variables: Iterable[Any]) -> str:
    values = [np.asarray(keras.ops.convert_to_numpy(each)).tobytes() for each in variables]
    return hashlib.sha256(b"".join(values)).hexdigest()[:12]


def main() -> None:
    directory, kind, *rest = sys.argv[1:]
    keras.utils.set_random_seed(7)
    model = Adversarial() if kind == "gan" else Encoder()
    model.compile(keras.optimizers.Adam(0.01))
    own = hf.keras.Resumable(directory, save_every=hf.Steps(1))
    model.fit(**keras_cases.arrays(), epochs=3, verbose=0, callbacks=[own, Told(int(rest[0]) if rest else 0)])


if __name__ == "__main__":
    main()
