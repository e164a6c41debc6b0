"""Trains two epochs, with the weights and the optimizer of another run if one is given: DIRECTORY [OTHER].

Prints a digest of all variables before and after.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import keras
import keras_cases
import numpy as np

import holdfast as hf


def digest(model: Any) -> str:
    """The same for the same numbers: counters and seeds have other types of integers with each backend."""
    arrays = [np.asarray(keras.ops.convert_to_numpy(each)) for each in (*model.variables, *model.optimizer.variables)]
    plain = [array if array.dtype == np.float32 else array.astype(np.int64) for array in arrays]
    return hashlib.sha256(b"".join(array.tobytes() for array in plain)).hexdigest()


def main() -> None:
    directory, *other = sys.argv[1:]
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.layers.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.optimizer.build(model.trainable_variables)
    if other:
        saved: dict[str, Any] = hf.load(other[0])
        for name, variables in (("model", model.variables), ("optimizer", model.optimizer.variables)):
            for variable, value in zip(variables, saved[name].values(), strict=True):
                variable.assign(value)
    print(digest(model), flush=True)
    model.fit(**keras_cases.arrays(), epochs=2, verbose=0, callbacks=[hf.keras.Resumable(directory)])
    print(digest(model), flush=True)


if __name__ == "__main__":
    main()
