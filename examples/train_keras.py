"""Trains a small network with `fit` of Keras. Kill it at any moment and start it again: it resumes where it was.

KERAS_BACKEND=torch python examples/train_keras.py
"""

from __future__ import annotations

import sys

import keras
import numpy as np
from keras import layers

import holdfast

EPOCHS = 50


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    # Replace these by your own data and model.
    keras.utils.set_random_seed(1)
    numbers = np.random.default_rng(1).normal(size=(10_000, 4)).astype("float32")
    sums = numbers.sum(axis=1, keepdims=True)
    network = [layers.Input((4,)), layers.Dense(64, activation="relu"), layers.Dropout(0.1), layers.Dense(1)]
    model = keras.Sequential(network)
    model.compile("adam", "mse")

    model.fit(
        numbers,
        sums,
        batch_size=32,
        epochs=EPOCHS,
        validation_split=0.1,
        verbose=0,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(patience=3),
            holdfast.keras.Resumable(directory, save_every=100, keep=3),
            keras.callbacks.LambdaCallback(on_epoch_end=print_epoch),
        ],
    )


def print_epoch(epoch: int, logs: dict[str, float]) -> None:
    """Prints a line for each epoch."""
    print(f"epoch {epoch + 1}: loss {logs['loss']:.6f}, val_loss {logs['val_loss']:.6f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/keras")
