"""Trains a small model and says each step: DIRECTORY [--case CASE] [--backup FREQ] [--without] [--log FILE] [...].

Each line is an event of the driver; the last one is a digest of all that there is at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import keras
import keras_cases
import numpy as np

import holdfast as hf


class Doubling(keras.Sequential):
    """A model whose steps have a figure that is no metric."""

    def train_step(self, *given: Any) -> Any:
        told = super().train_step(*given)
        # With JAX, a step has a state too.
        logs, *state = told if isinstance(told, tuple) else (told,)
        logs = {**logs, "double": 2 * logs["loss"]}
        return (logs, *state) if state else logs


class Told(keras.callbacks.Callback):
    """Prints a line for each step, and for each batch of an evaluation; asks itself to leave behind one of them."""

    def __init__(self, leave: str) -> None:
        super().__init__()
        self.epoch, self.leave = 0, leave

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tell("step", batch, f"{float(logs['loss']).hex()} {float(logs['mae']).hex()}")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.tell("test", batch, float(logs["loss"]).hex())

    def tell(self, kind: str, batch: int, figures: str) -> None:
        print(json.dumps({kind: f"{self.epoch} {batch}", "figures": figures}), flush=True)
        if f"{kind} {self.epoch} {batch}" == self.leave:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--case", default="dataset")
    parser.add_argument("--backup", default="")
    parser.add_argument("--at-epochs", action="store_true", help="save at the end of each epoch")
    parser.add_argument("--without", action="store_true", help="train as without holdfast")
    parser.add_argument("--log", help="beside the directory if it is not given")
    parser.add_argument("--leave", default="", help="the beginning of a line, such as 'step 2 1'")
    given = parser.parse_args()
    keras.utils.set_random_seed(7)
    model, callbacks = keras_cases.make_model(Doubling), keras_cases.make_callbacks()
    log = Path(given.log or f"{given.directory}.csv")
    best = keras.callbacks.ModelCheckpoint(f"{log}.weights.h5", "val_loss", save_best_only=True, save_weights_only=True)
    callbacks += [keras.callbacks.CSVLogger(str(log)), best]
    if given.without:
        own = keras.callbacks.Callback()
    elif given.backup:
        freq: Any = "epoch" if given.backup == "epoch" else int(given.backup) or False
        own = hf.keras.BackupAndRestore(given.directory, freq, delete_checkpoint=False, save_before_preemption=True)
    else:
        own = hf.keras.Resumable(given.directory, save_every="epoch" if given.at_epochs else hf.Steps(3))
    inputs, targets = keras_cases.INPUTS, keras_cases.TARGETS
    model.fit(
        **keras_cases.CASES[given.case](),
        epochs=6,
        verbose=0,
        validation_data=(inputs[:18], targets[:18]),
        validation_batch_size=3,
        callbacks=[*callbacks, own, Told(given.leave)],
    )
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [np.asarray(keras.ops.convert_to_numpy(each)).tobytes() for each in variables]
    plain = [model.history.history, model.history.epoch, callbacks[0].best, callbacks[0].wait, callbacks[1].wait]
    plain += [best.best, log.read_text(), keras_cases.read_buffers(model)]
    text = json.dumps([[float(value).hex() for value in values] for values in plain[0].values()]) + repr(plain[1:])
    print(json.dumps({"ended": hashlib.sha256(b"".join(arrays) + text.encode()).hexdigest()}), flush=True)


if __name__ == "__main__":
    main()
