"""Trains with a framework until the weights are nan from a step on, in three epochs of six steps; it saves each second.

python gone_bad_fit.py PLACE FRAMEWORK ON_NONFINITE BAD_STEP[,BAD_STEP...]

BAD_STEP is 0 for none; of several, each start takes the next one. Each sample has a weight of its own, so the weights
tell which samples a step has trained, and how often each was trained. Where the weights are nan, the next step but one
waits until that is known.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from typing import Any

import numpy as np
import torch
from telling import tell

import holdfast
from holdfast.events import Event, NotFinite

SAMPLES, SIZE, EPOCHS, RATE = 24, 4, 3, 0.1
PLACE, FRAMEWORK, ON_NONFINITE, BAD_STEPS = sys.argv[1:5]


def count_starts() -> int:
    with open(f"{PLACE}.starts", "a+") as starts:  # noqa: PTH123 - it is next to the run, under its name
        starts.write(".")
        return starts.tell()


BAD = int(BAD_STEPS.split(",")[count_starts() - 1] if "," in BAD_STEPS else BAD_STEPS)
known = threading.Event()


def see(event: Event) -> None:
    if isinstance(event, NotFinite):
        known.set()


OPTIONS: dict[str, Any] = {
    "save_every": 2,
    "keep": holdfast.LastGood() | holdfast.Latest(1),
    "on_nonfinite": ON_NONFINITE,
    "sinks": [see],
}


class Steps:
    """What happens around each step, whose number is that of the framework."""

    def begin(self, done: int, weights: Any) -> bool:
        """Notes the weights; returns True if they are to be spoiled now."""
        self._before = np.array(weights)
        # A step is saved at the latest one step after the bad one, by all workers; that it is bad, worker 0 knows.
        if BAD and done + 1 == BAD + 2 and os.environ.get("RANK", "0") == "0":
            assert known.wait(60)
        return done + 1 == BAD

    def end(self, done: int, weights: Any) -> None:
        """Tells the step."""
        after = np.array(weights)
        changed: Any = np.flatnonzero(after != self._before) if np.isfinite(after).all() else ()
        tell(step=done, samples=[int(number) for number in changed])


steps = Steps()


def make_loader() -> Any:
    torch.manual_seed(3)
    rows: Any = [{"x": row, "labels": torch.ones(1)} for row in torch.eye(SAMPLES)]
    return torch.utils.data.DataLoader(rows, batch_size=SIZE, shuffle=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SAMPLES, 1))

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        return {"loss": (x @ self.weight - labels).square().mean()}

    def read(self) -> Any:
        return self.weight.detach().numpy().ravel()

    def begin(self, done: int) -> None:
        if steps.begin(done, self.read()):
            self.weight.data.fill_(float("nan"))


def train_lightning() -> Any:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            self.net.begin(self.trainer.global_step)

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            steps.end(self.trainer.global_step, self.net.read())

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        callbacks=[holdfast.lightning.Resumable(PLACE, **OPTIONS)],
        accelerator="cpu",
        enable_model_summary=False,
        **({"strategy": "ddp", "devices": 2} if "RANK" in os.environ else {}),
        **quiet,
    )
    module = Module()
    trainer.fit(module, make_loader())
    return module.net.read()


def train_transformers() -> Any:
    import transformers

    class Told(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            net.begin(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.end(state.global_step, net.read())

    given: dict[str, Any] = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=SIZE,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        **given,
    )
    net, data = Net(), make_loader().dataset
    callbacks = [holdfast.transformers.Resumable(PLACE, **OPTIONS), Told()]
    transformers.Trainer(net, arguments, train_dataset=data, callbacks=callbacks).train()
    return net.read()


def train_keras() -> Any:
    import keras

    def read() -> Any:
        # As seldom as possible: callbacks of JAX see no weights unless they ask for them.
        if hasattr(model, "jax_state_sync"):
            if known.is_set():
                return np.full(SAMPLES, np.nan)
            model.jax_state_sync()
        return keras.ops.convert_to_numpy(model.layers[-1].kernel).ravel()

    class Told(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
        def on_train_begin(self, logs: Any = None) -> None:
            self.done: int | None = None

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.done = int(self.model.optimizer.iterations) if self.done is None else self.done
            if steps.begin(self.done, read()):
                model.layers[-1].kernel.assign(np.full((SAMPLES, 1), np.nan, "float32"))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert self.done is not None
            self.done += 1
            steps.end(self.done, read())

    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((SAMPLES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(keras.optimizers.SGD(RATE), "mse")
    rows, labels = np.eye(SAMPLES, dtype="float32"), np.ones((SAMPLES, 1), "float32")
    resumable = holdfast.keras.Resumable(PLACE, **OPTIONS)
    model.fit(rows, labels, batch_size=SIZE, epochs=EPOCHS, callbacks=[resumable, Told()], verbose=0)
    known.clear()
    return read()


def train_accelerate() -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=RATE), make_loader())
    with holdfast.accelerate.resumable(accelerator, PLACE, **OPTIONS) as run:
        for _ in range(loader.iteration, EPOCHS):
            for batch in loader:
                net.begin(run.step)
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                steps.end(run.step + 1, net.read())
                run.finish_step()
    return net.read()


if __name__ == "__main__":
    found = globals()[f"train_{FRAMEWORK}"]()
    tell(weights=[round(float(number), 5) for number in found])
