"""Interrupts `fit` by an error and resumes it in the same process, once for each kind of data; prints what came of it.

python keras_cases.py DIRECTORY [CASE...]: a line of JSON for each case. KERAS_BACKEND says with which backend.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import keras
import numpy as np
import torch

import holdfast as hf

ROWS, BATCH, EPOCHS = 44, 8, 3
BATCHES: Final = 6
INPUTS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
TARGETS = INPUTS.sum(axis=1, keepdims=True)


class InterruptedFitError(Exception):
    """The machine is gone."""


class Loads:
    """Counts what a data set loads, in workers too: each load is a byte in a file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("ab", buffering=0)  # noqa: SIM115 - it goes with this object

    def note(self) -> None:
        self._file.write(b".")

    def count(self) -> int:
        return os.fstat(self._file.fileno()).st_size


class Recorder(keras.callbacks.Callback):
    """Notes the figures of each step, and interrupts training behind one of them.

    Attributes:
        trained: How many steps the present `fit` has trained. What a callback has of its class is not kept.
    """

    trained = 0

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self.last = last
        self.steps: list[Any] = []
        Recorder.trained = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append([batch, float(logs["loss"]).hex(), float(logs["mae"]).hex()])
        Recorder.trained += 1
        if Recorder.trained == self.last:
            raise InterruptedFitError


class Sums(keras.callbacks.Callback):
    """Changes what it holds where it is, and has at times again what it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.tensor = np.zeros(70_000), torch.zeros(2)
        self.begun, self.is_new = 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.is_new = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.begun, self.is_new = self.begun + self.is_new, False
        self.large[batch::7] += float(logs["loss"])
        self.tensor += float(logs["loss"])


class Rows(keras.utils.PyDataset):
    """Batches whose order it shuffles itself, at the end of each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(70_000)  # More than are copied at each save.
        self.random, self.shift = np.random.default_rng(3), 0
        self.loads = Loads()  # Not a value that could be kept.

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        self.loads.note()
        rows = (self.order[index * BATCH : (index + 1) * BATCH] + self.shift) % ROWS
        return INPUTS[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)
        self.shift = int(self.random.integers(ROWS))


class Turns(torch.utils.data.Sampler[int]):
    """Another order in each epoch, which it counts."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        self.epoch += 1
        return iter(order.tolist())


def arrays(**options: Any) -> dict[str, Any]:
    return {"x": INPUTS, "y": TARGETS, "batch_size": BATCH, **options}


def make_loader(**options: Any) -> dict[str, Any]:
    loads = Loads()

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            loads.note()
            return INPUTS[index], TARGETS[index]

    generator = torch.Generator().manual_seed(5) if options.pop("own", False) else None
    options = {"batch_size": BATCH, "shuffle": "sampler" not in options, "generator": generator, **options}
    loader: Any = torch.utils.data.DataLoader(Samples(), **options)
    loader.loads = loads
    return {"x": loader}


def make_stream() -> dict[str, Any]:
    class Samples(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(INPUTS, TARGETS, strict=True))

    return {"x": torch.utils.data.DataLoader(Samples(), batch_size=BATCH)}


def stream() -> Any:
    while True:
        for begin in range(0, ROWS, BATCH):
            yield INPUTS[begin : begin + BATCH], TARGETS[begin : begin + BATCH]


def make_pipeline(**options: Any) -> dict[str, Any]:
    """A `tf.data.Dataset` that shuffles again in each epoch, and loads ahead."""
    import tensorflow as tf

    loads = Loads()

    def load(index: Any) -> Any:
        loads.note()
        return INPUTS[index], TARGETS[index]

    def load_one(index: Any) -> Any:
        row, target = tf.numpy_function(load, [index], (tf.float32, tf.float32))
        return tf.ensure_shape(row, (4,)), tf.ensure_shape(target, (1,))

    dataset: Any
    if options.pop("is_generator", False):
        spec = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((1,), tf.float32))
        dataset = tf.data.Dataset.from_generator(lambda: zip(INPUTS, TARGETS, strict=True), output_signature=spec)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(ROWS))
    elif options.pop("counts", False):
        dataset = tf.data.Dataset.range(ROWS).shuffle(20).map(load_one)
    else:
        dataset = tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS))
        cache = options.pop("cache", None)
        dataset = (dataset if cache is None else dataset.cache(cache)).shuffle(20)
        dataset = dataset.shuffle(7) if options.pop("is_shuffled_twice", False) else dataset
    dataset = dataset.repeat() if "steps_per_epoch" in options else dataset
    dataset = dataset.batch(BATCH).map(lambda x, y: (x * 1.5, y), num_parallel_calls=2).prefetch(2)
    dataset.loads = loads
    return {"x": dataset, **options}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": arrays,
    "unshuffled": lambda: arrays(shuffle=False),
    "shuffled in batches": lambda: arrays(shuffle="batch"),
    "weighted": lambda: arrays(sample_weight=np.linspace(0.5, 1.5, ROWS)),
    "fewer steps than batches": lambda: arrays(steps_per_epoch=4),
    "dataset": lambda: {"x": Rows()},
    "dataset with threads": lambda: {"x": Rows(workers=2, max_queue_size=1)},
    "dataset with processes": lambda: {"x": Rows(workers=2, max_queue_size=1, use_multiprocessing=True)},
    "dataset, fewer steps": lambda: {"x": Rows(), "steps_per_epoch": 4},
    "loader": make_loader,
    "loader with a generator": lambda: make_loader(own=True),
    "loader with a sampler": lambda: make_loader(sampler=Turns()),
    "loader with workers": lambda: make_loader(batch_size=4, num_workers=2, prefetch_factor=1),
    "loader with lasting workers": lambda: make_loader(
        batch_size=4, num_workers=2, prefetch_factor=1, persistent_workers=True
    ),
    "loader, fewer steps": lambda: {**make_loader(), "steps_per_epoch": 4},
    "stream of unknown length": make_stream,
    "pipeline": make_pipeline,
    "pipeline that counts": lambda: make_pipeline(counts=True),
    "pipeline with a cache": lambda: make_pipeline(cache=""),
    "pipeline with a cache file": lambda: make_pipeline(cache=tempfile.mkdtemp() + "/cache"),
    "pipeline with two shuffles": lambda: make_pipeline(is_shuffled_twice=True),
    "pipeline, repeated": lambda: make_pipeline(steps_per_epoch=BATCHES),
    "pipeline of a generator": lambda: make_pipeline(is_generator=True),
    "generator": lambda: {"x": stream(), "steps_per_epoch": BATCHES},
}
"""By name, what makes the data of a `fit`."""


def make_torch_layers() -> list[Any]:
    """With torch, a module of its own that has buffers."""
    if keras.backend.backend() != "torch":
        return []
    return [keras.layers.TorchModuleWrapper(torch.nn.BatchNorm1d(8))]


def read_buffers(model: Any) -> list[str]:
    """The buffers of modules of torch."""
    if keras.backend.backend() != "torch":
        return []
    return [each.numpy().tobytes().hex() for layer in model.layers for each in layer.buffers()]


def make_model(kind: Any = keras.Sequential) -> Any:
    model = kind(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            *make_torch_layers(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def make_callbacks() -> list[Any]:
    return [
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=20, min_delta=0.5, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5, cooldown=1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]


def run(directory: Path | None, make: Callable[[], dict[str, Any]], last: int | None, every: int) -> Any:
    """Trains; returns all that there is at the end, and how much of the data was loaded."""
    keras.utils.set_random_seed(7)
    torch.manual_seed(7)  # Keras seeds torch with its torch backend alone, and loaders draw their order from it.
    model, recorder, callbacks, data = make_model(), Recorder(last), make_callbacks(), make()
    own = [] if directory is None else [hf.keras.Resumable(directory, save_every=hf.Steps(every), quiet=True)]
    validation, sums = (INPUTS[:9], TARGETS[:9]), Sums()
    try:
        # Where it stands among the others does not matter.
        model.fit(
            **data,
            epochs=EPOCHS,
            verbose=0,
            validation_data=validation,
            callbacks=[callbacks[0], *own, *callbacks[1:], sums, recorder],
        )
    except InterruptedFitError:
        return None
    loads = getattr(data["x"], "loads", None)
    return {
        "steps": recorder.steps,
        "weights": [weight.tobytes().hex() for weight in model.get_weights()],
        "optimizer": [
            np.asarray(keras.ops.convert_to_numpy(each)).tobytes().hex() for each in model.optimizer.variables
        ],
        "buffers": read_buffers(model),
        "history": {name: [float(each).hex() for each in values] for name, values in model.history.history.items()},
        "epochs": model.history.epoch,
        "best": [callbacks[0].best, callbacks[0].wait, callbacks[0].best_epoch],
        "plateau": [callbacks[1].best, callbacks[1].wait, callbacks[1].cooldown_counter],
        "sums": [sums.begun, sums.large[:7].tolist(), sums.tensor.tolist()],
        "random": [random.random(), float(np.random.rand())],
        "initial epoch": model._initial_epoch,
    }, 0 if loads is None else loads.count()


def try_case(directory: Path, name: str) -> dict[str, Any]:
    """Compares one kind of data without a run, with one, and interrupted at several places."""
    make = CASES[name]
    plain, _ = run(None, make, None, 1)
    untouched, all_loads = run(directory / "untouched", make, None, 2)
    found: dict[str, Any] = {"case": name, "is as without": plain == untouched, "interrupted": []}
    steps, loader = len(untouched["steps"]), make()["x"]
    size = loader.batch_size if name.startswith("loader") else 1
    per_epoch = steps // EPOCHS
    for last, every in ((per_epoch, 1), (per_epoch + 1, per_epoch), (2 * per_epoch + 3, 2)):
        place = directory / f"at {last}"
        assert run(place, make, last, every) is None
        gc.collect()  # The workers of what was interrupted end.
        end, loads = run(place, make, None, every)
        unit = per_epoch if name == "stream of unknown length" else 1  # What a step is.
        # The step that was interrupted was not complete.
        saved = (last - 1) // unit // every * every * unit
        passes, batches = divmod(saved, len(loader) if size > 1 else BATCHES)
        found["interrupted"].append(
            {
                "differs": [part for part in end if end[part] != untouched[part]],
                "begun behind": steps - Recorder.trained,
                "saved behind": saved,
                "spared loads": all_loads - loads,
                "loads of what was trained": ROWS * passes + size * batches if size > 1 else saved,
            }
        )
    return found


def main() -> None:
    directory = Path(sys.argv[1])
    for number, name in enumerate(sys.argv[2:] or CASES):
        print(json.dumps(try_case(directory / str(number), name)), flush=True)


if __name__ == "__main__":
    main()
