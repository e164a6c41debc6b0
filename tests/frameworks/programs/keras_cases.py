"""Interrupts `fit` by an error and resumes it in the same process, once for each kind of data; prints what came of it.

python keras_cases.py DIRECTORY [CASE...]: a line of JSON for each case. KERAS_BACKEND says with which backend.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import keras
import numpy as np

import holdfast as hf

ROWS, BATCH, EPOCHS = 44, 8, 3
BATCHES: Final = 6
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


class InterruptedFitError(Exception):
    """The machine is gone."""


class Recorder(keras.callbacks.Callback):
    """Notes the figures of each step, and interrupts training behind one of them."""

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self.last, self.seen = last, 0
        self.steps: list[Any] = []
        self.begins: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begins.append(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append([batch, float(logs["loss"]).hex(), float(logs["mae"]).hex()])
        self.seen += 1
        if self.seen == self.last:
            raise InterruptedFitError


class Rows(keras.utils.PyDataset):
    """Batches whose order it shuffles itself, at the end of each epoch; notes which it loads."""

    loaded: list[int]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(ROWS)
        self.log: Any = print  # Not a value that could be kept.
        Rows.loaded = []

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        Rows.loaded.append(index)
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return INPUTS[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def arrays(**options: Any) -> dict[str, Any]:
    return {"x": INPUTS, "y": TARGETS, "batch_size": BATCH, **options}


def make_loader(**options: Any) -> dict[str, Any]:
    import torch

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            Rows.loaded.append(index)
            return INPUTS[index], TARGETS[index]

    Rows.loaded = []
    generator = torch.Generator().manual_seed(5) if options.pop("own", False) else None
    loader: Any = torch.utils.data.DataLoader(Samples(), batch_size=BATCH, shuffle=True, generator=generator, **options)
    return {"x": loader}


def stream() -> Any:
    while True:
        for begin in range(0, ROWS, BATCH):
            yield INPUTS[begin : begin + BATCH], TARGETS[begin : begin + BATCH]


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": arrays,
    "unshuffled": lambda: arrays(shuffle=False),
    "shuffled in batches": lambda: arrays(shuffle="batch"),
    "weighted": lambda: arrays(sample_weight=np.linspace(0.5, 1.5, ROWS)),
    "fewer steps than batches": lambda: arrays(steps_per_epoch=4),
    "dataset": lambda: {"x": Rows()},
    "dataset with threads": lambda: {"x": Rows(workers=2)},
    "dataset with processes": lambda: {"x": Rows(workers=2, use_multiprocessing=True)},
    "dataset, fewer steps": lambda: {"x": Rows(), "steps_per_epoch": 4},
    "loader": make_loader,
    "loader with a generator": lambda: make_loader(own=True),
    "loader with workers": lambda: make_loader(num_workers=2),
    "loader with lasting workers": lambda: make_loader(num_workers=2, persistent_workers=True),
    "loader, fewer steps": lambda: {**make_loader(), "steps_per_epoch": 4},
    "generator": lambda: {"x": stream(), "steps_per_epoch": BATCHES},
}
"""By name, what makes the data of a `fit`."""


def make_model() -> Any:
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def make_callbacks() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=20, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5, cooldown=1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]


def run(directory: Path | None, make: Callable[[], dict[str, Any]], last: int | None, every: int) -> Any:
    """Trains; returns the figures of each step, and all that there is at the end."""
    keras.utils.set_random_seed(7)
    model, recorder, callbacks, data = make_model(), Recorder(last), make_callbacks(), make()
    own = [] if directory is None else [hf.keras.Resumable(directory, save_every=hf.Steps(every), quiet=True)]
    validation = (INPUTS[:9], TARGETS[:9])
    try:
        # Where it stands among the others does not matter.
        model.fit(
            **data,
            epochs=EPOCHS,
            verbose=0,
            validation_data=validation,
            callbacks=[callbacks[0], *own, *callbacks[1:], recorder],
        )
    except InterruptedFitError:
        Rows.loaded = []
        return None
    return recorder, {
        "weights": [weight.tobytes().hex() for weight in model.get_weights()],
        "optimizer": [
            np.asarray(keras.ops.convert_to_numpy(each)).tobytes().hex() for each in model.optimizer.variables
        ],
        "history": {name: [float(each).hex() for each in values] for name, values in model.history.history.items()},
        "epochs": model.history.epoch,
        "best": [callbacks[0].best, callbacks[0].wait, callbacks[0].best_epoch],
        "plateau": [callbacks[1].best, callbacks[1].wait, callbacks[1].cooldown_counter],
        "random": [random.random(), float(np.random.rand())],
        "initial epoch": model._initial_epoch,
    }


def try_case(directory: Path, name: str) -> dict[str, Any]:
    """Compares one kind of data without a run, with one, and interrupted at several places."""
    make = CASES[name]
    plain = run(None, make, None, 1)
    untouched = run(directory / "untouched", make, None, 2)
    found = {"as without": plain[1] == untouched[1] and plain[0].steps == untouched[0].steps}
    per_epoch = len(untouched[0].steps) // EPOCHS
    for last, every in ((per_epoch + 3, 2), (per_epoch + 1, per_epoch), (per_epoch, 1), (2 * per_epoch + 2, 1), (2, 1)):
        place = directory / f"at {last}"
        assert run(place, make, last, every) is None
        if Rows.loaded:
            Rows.loaded = []
        recorder, end = run(place, make, None, every)
        begun = (last - 1) // every * every  # The step that was interrupted was not complete.
        if (last - 1) % per_epoch == 0 and every == 1 and last - 1 > 0:
            begun = last - 1
        found[f"at {last}"] = end == untouched[1] and recorder.steps == untouched[0].steps
        found[f"resumed at {last}"] = recorder.seen == len(recorder.steps) and begun
        found[f"loaded at {last}"] = len(Rows.loaded)
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    for number, name in enumerate(sys.argv[2:] or CASES):
        Rows.loaded = []
        try:
            found = try_case(directory / str(number), name)
        except Exception as error:
            import traceback

            traceback.print_exc()
            found = {"error": repr(error)}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
