"""What a `fit` leaves behind for the next one in the same process: DIRECTORY."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import keras_cases
import torch

import holdfast as hf


class Epochs(keras.callbacks.Callback):
    """Notes the epochs that are trained; fails in one, or stops behind one."""

    def __init__(self, fail: int | None = None, stop: int | None = None) -> None:
        super().__init__()
        self.fail, self.stop = fail, stop
        self.seen: Any = iter([])
        self.number = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        SEEN.append(epoch)
        if epoch == self.fail:
            raise keras_cases.InterruptedFitError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.stop:
            self.model.stop_training = True


class TwoOptimizers(keras.Model):
    """Trains its two parts with an optimizer each, which are created at the first step, as those of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(8), keras.layers.Dense(1)
        self.first.build((None, 4))
        self.second.build((None, 8))
        self.optimizers = {"first": keras.optimizers.Adam(0.05), "second": keras.optimizers.SGD(0.05, momentum=0.9)}
        self.unused = keras.optimizers.Adam()
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.second(self.first(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        loss = keras.ops.mean(keras.ops.square(self(inputs) - targets))
        loss.backward()
        for name, optimizer in self.optimizers.items():
            variables = getattr(self, name).trainable_variables
            optimizer.apply([each.value.grad for each in variables], variables)
        return {"loss": loss}


def fit_two_optimizers(directory: Path, fail: int | None) -> list[bytes]:
    keras.utils.set_random_seed(7)
    model = TwoOptimizers()
    model.compile()
    with suppress(keras_cases.InterruptedFitError):
        fit(model, [hf.keras.Resumable(directory, save_every="epoch", quiet=True)], 3, Epochs(fail=fail))
    variables = [*model.variables, *(each for one in model.optimizers.values() for each in one.variables)]
    return [keras.ops.convert_to_numpy(each).tobytes() for each in variables]


SEEN: list[int] = []


def fit(model: Any, callbacks: list[Any], epochs: int, *noted: Any) -> list[int]:
    SEEN.clear()
    model.fit(**keras_cases.arrays(), epochs=epochs, verbose=0, callbacks=[*callbacks, *(noted or [Epochs()])])
    return [*SEEN]


def main() -> None:
    directory = Path(sys.argv[1])
    keras.utils.set_random_seed(7)  # Of one model in twelve, the loss rises in the second epoch.
    handler = signal.getsignal(signal.SIGTERM)
    backups = directory / "backups"
    backups.mkdir()
    (backups / "own.txt").write_text("mine")
    model, backup = keras_cases.make_model(), hf.keras.BackupAndRestore(backups)
    fit(model, [backup], 2)
    gone = not list(backups.rglob("*.safetensors")) and not list(backups.glob("step*"))
    print(
        json.dumps(
            {"a backup that was finished is gone": gone, "what is not its own stays": (backups / "own.txt").exists()}
        )
    )
    without = fit(model, [], 3)
    again = fit(model, [backup], 2)
    print(
        json.dumps(
            {"epochs of a fit without a callback": len(without), "epochs of the same callback again": len(again)}
        )
    )
    run = hf.keras.Resumable(directory / "run", save_every="epoch", quiet=True)
    raised = refused = False
    try:
        fit(keras_cases.make_model(), [run], 5, Epochs(fail=3))
    except keras_cases.InterruptedFitError:
        raised = True
    two = [hf.keras.Resumable(directory / "run", quiet=True), hf.keras.BackupAndRestore(directory / "two")]
    try:
        fit(keras_cases.make_model(), two, 5)
        is_one = False
    except hf.errors.UsageError as error:
        is_one = "a fit takes one Resumable" in str(error)
    other = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse", metrics=["mae"])
    try:
        fit(other, [hf.keras.Resumable(directory / "run", quiet=True)], 5)
    except hf.errors.MismatchError:
        refused = True
    print(
        json.dumps(
            {
                "a changed model is refused": refused,
                "a second one is refused": is_one,
                "the error of a step comes through": raised,
                "signals are as before": signal.getsignal(signal.SIGTERM) == handler,
            }
        )
    )
    on = fit(keras_cases.make_model(), [hf.keras.Resumable(directory / "run", quiet=True)], 5)
    stopped = hf.keras.Resumable(directory / "stopped", save_every="epoch", quiet=True)
    fit(keras_cases.make_model(), [stopped], 5, Epochs(stop=1))
    left = fit(keras_cases.make_model(), [hf.keras.Resumable(directory / "stopped", quiet=True)], 5)
    print(json.dumps({"stopped early, it stays so": len(left), "more epochs go on": on}))
    weights = []
    for _ in range(2):
        # The loss falls, so the first epoch stays the best.
        model = keras_cases.make_model()
        early = keras.callbacks.EarlyStopping("loss", mode="max", patience=2, restore_best_weights=True)
        fit(model, [early, hf.keras.Resumable(directory / "best", save_every="epoch", quiet=True)], 9)
        weights.append([weight.tobytes() for weight in model.get_weights()])
    keep = hf.Latest(1) | hf.Best("loss", mode="max")
    fit(
        keras_cases.make_model(), [hf.keras.Resumable(directory / "keep", save_every="epoch", keep=keep, quiet=True)], 4
    )
    steps = [int(path.name.split("-")[1].split(".")[0]) for path in (directory / "keep").glob("step-*")]
    place_of_its_own = carried_over = False
    data = keras_cases.make_loader()["x"].dataset
    loader = torch.utils.data.DataLoader(data, batch_sampler=hf.ResumableSampler(data, batch_size=8))
    try:
        keras_cases.make_model().fit(loader, verbose=0, callbacks=[hf.keras.Resumable(directory / "own")])
    except hf.errors.UsageError:
        place_of_its_own = True
    # Data that its workers have loaded goes on from one epoch to the next.
    rows = keras_cases.Rows(workers=2)
    try:
        keep = hf.keras.Resumable(directory / "carried")
        keras_cases.make_model().fit(rows, steps_per_epoch=4, verbose=0, callbacks=[keep])
    except hf.errors.UsageError as error:
        carried_over = "PyDataset with workers" in str(error)
    print(
        json.dumps(
            {
                "best weights are put back again": weights[0] == weights[1],
                "steps kept": sorted(steps),
                "a loader with a place of its own is refused": place_of_its_own,
                "workers of which batches are carried over are refused": carried_over,
            }
        )
    )
    ends = [fit_two_optimizers(directory / place, fail) for place, fail in (("one", None), ("two", 2), ("two", None))]
    print(json.dumps({"two optimizers of a model go on": ends[0] == ends[2] != ends[1]}))
    logs = []
    for name, own, fail in (("plain", [], None), ("kept", [directory / "log"], 1), ("kept", [directory / "log"], None)):
        log = directory / f"{name}.csv"
        # The save is of the first epoch, and the log has the row of that epoch when training is interrupted.
        runs = [hf.keras.Resumable(one, save_every=hf.Steps(4), quiet=True) for one in own]
        keras.utils.set_random_seed(7)
        with suppress(keras_cases.InterruptedFitError):
            fit(keras_cases.make_model(), [keras.callbacks.CSVLogger(str(log)), *runs], 3, Epochs(fail=fail))
        logs.append(log.read_text())
    print(json.dumps({"a log whose rows are trained again is as without": logs[0] == logs[2] != logs[1]}))


if __name__ == "__main__":
    main()
