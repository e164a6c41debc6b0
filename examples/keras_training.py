"""Trains a small network with `fit` of Keras. Kill it and start it again: it ends as if nothing had happened.

KERAS_BACKEND=torch python examples/keras_training.py runs/keras
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import holdfast


def main(directory: str) -> None:
    """Trains for ten epochs, those of earlier processes included."""
    keras.utils.set_random_seed(1)
    numbers = np.random.default_rng(1).normal(size=(2000, 4)).astype("float32")
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    history = model.fit(
        numbers,
        numbers.sum(axis=1, keepdims=True),
        batch_size=32,
        epochs=10,
        validation_split=0.1,
        verbose=2,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(patience=1),
            holdfast.keras.Resumable(directory, save_every=holdfast.Steps(20)),
        ],
    ).history
    print(f"epoch {len(history['loss'])}: loss {history['loss'][-1]}, val_loss {history['val_loss'][-1]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/keras")
