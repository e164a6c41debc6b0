"""Jobs of epochs with a `WorkerTrainingState`: MODE DIRECTORY [MORE]."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.events import Event, NoticeHeard
from holdfast.storage import LocalStorage


def fit(place: str, epochs: int, ending: str) -> None:
    """As Keras writes it; prints the epochs that it trains, and what the weights say of them."""
    weights = np.zeros(10)
    with hf.WorkerTrainingState(place, hf.Checkpoint(weights=weights), quiet=True) as state:
        state.restore()
        trained = []
        for epoch in range(state.maybe_load_initial_epoch_from_ckpt(0, "train"), epochs):
            weights += 1
            trained.append(epoch)
            state.back_up(epoch)
        if ending == "dies":
            state.close()
            os._exit(9)
        if ending == "deletes":
            print(state.delete_backup(), end=" ")
    print(trained, int(weights[0]))


def back_up_epoch_9(place: str) -> None:
    with hf.WorkerTrainingState(place, hf.Checkpoint(weights=np.ones(10))) as state:
        state.restore()
        state.back_up(9)


def count_epochs(place: str) -> None:
    """Prints the first epoch, and each one when its backup has begun: the test kills it."""
    weights = np.zeros(300_000)
    with hf.WorkerTrainingState(place, hf.Checkpoint(weights=weights)) as state:
        state.restore()
        first = state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=60)
        assert (weights == first).all(), (weights[0], first)
        print(first, flush=True)
        for epoch in range(first, 60):
            weights += 1
            state.back_up(epoch)
            print("epoch", epoch, flush=True)
        state.delete_backup()
    print("done", (weights == 60).all(), flush=True)


class Slow(LocalStorage):
    """A storage that holds up the second backup until the notice is heard."""

    heard: threading.Event | None = None

    def create(self, path: str, size_bytes: int) -> Any:
        if self.heard is not None and path.startswith("step-000000002"):
            assert self.heard.wait(100)
        return super().create(path, size_bytes)


def leave_when_asked(place: str, way: str) -> None:
    heard = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, NoticeHeard):
            heard.set()

    storage = Slow(place + "/backup")
    if way == "epochs":
        storage.heard = heard  # The notice comes while this backup is in flight.
    weights = np.zeros(10)
    checkpoint = hf.Checkpoint(weights=weights)
    handler = None
    if way == "beside":
        handler = hf.PreemptionCheckpointHandler(hf.CheckpointManager(place + "/steps", checkpoint))
    with hf.WorkerTrainingState(storage, checkpoint, save_freq=3, sinks=[note]) as state:
        backup = state.restore()
        first, done = state.maybe_load_initial_counters_from_ckpt(10, 0, "train", epochs=3)
        print(first, done, int(weights[0]), flush=True)
        if way == "first":
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigwait([signal.SIGUSR1])
        if backup is None or way == "batches":
            train_two_epochs(state, weights, first, done, way, asked_at=(1, 3 if backup is None else 7))
            weights += 1  # The next epoch, which goes on for ever.
            if way == "over":
                state.delete_backup()
            if handler is not None:
                handler.run(np.zeros(1).fill, 0)
            os.kill(os.getpid(), signal.SIGINT if way == "ctrl-c" else signal.SIGTERM)
            if handler is not None:
                handler.run(np.zeros(1).fill, 0)
            signal.sigwait([signal.SIGUSR1])


def train_two_epochs(
    state: hf.WorkerTrainingState, weights: Any, first: int, done: int, way: str, asked_at: tuple[int, int]
) -> None:
    for epoch in range(first, 2):
        for batch in range(done, 10):
            weights += 1
            if way == "batches":
                state.back_up_if_due(epoch, batch)
                if (epoch, batch) == asked_at:
                    os.kill(os.getpid(), signal.SIGTERM)
        done = 0
        state.back_up(epoch)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fit", place, epochs, *endings]:
            fit(place, int(epochs), *(endings or [""]))
        case ["back up epoch 9", place]:
            back_up_epoch_9(place)
        case ["count epochs", place]:
            count_epochs(place)
        case ["leave when asked", place, way]:
            leave_when_asked(place, way)
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
