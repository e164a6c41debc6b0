"""Runs of `holdfast.resumable` that get signals, or are killed: MODE DIRECTORY [MORE]."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.storage import LocalStorage


class Held(LocalStorage):
    """A storage that never begins to write."""

    def create(self, path: str, size_bytes: int) -> Any:
        # Not print: a process that leaves at once finds the lock of the output taken by this thread, and aborts.
        os.write(1, b"held\n")
        threading.Event().wait(600)
        raise AssertionError("nobody ended this process")


class Killed(LocalStorage):
    """A storage in which the first look kills the process."""

    def read(self, path: str, limit_bytes: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def make_state() -> dict[str, Any]:
    return {"value": np.zeros(10)}


def wait_in_step(place: str | LocalStorage, is_endless: bool) -> None:
    """A step that takes until there is a line of input, or for ever."""
    state = make_state()
    with hf.resumable(place, state=state, save_every=hf.Steps(1000)) as run:
        for step in run.steps(1_000_000_000):
            if step == 5:
                print("ready", flush=True)
                # A signal just before one single wait would be handled behind it.
                while is_endless or not select.select([0], [], [], 0.02)[0]:
                    time.sleep(0.02)
            state["value"] += 1


def kill_in_step(directory: str) -> None:
    state = make_state()
    with hf.resumable(directory, state=state, save_every=hf.Steps(100)) as run:
        for step in run.steps(100):
            state["value"] += 1
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)


def save_by_hand(directory: str, asked_in: int) -> None:
    state = make_state()
    with hf.resumable(directory, state=state, save_every=hf.Steps(10**9), keep=hf.All()) as run:
        for step in run.steps(6):
            state["value"] += 1
            run.manager.save(step + 1)
            if step == asked_in:
                os.kill(os.getpid(), signal.SIGTERM)


def kill_at_first_look(directory: str) -> None:
    with hf.resumable(Killed(directory), epoch=1):
        pass


def evaluate_after_loop(directory: str) -> None:
    with hf.resumable(directory, a=np.zeros(3)) as run:
        for _ in run.steps(3):
            pass
        print("evaluating", flush=True)
        while True:
            time.sleep(0.02)  # Not one long wait: a signal just before it would come too late.


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["once", directory]:
            wait_in_step(directory, is_endless=False)
        case ["twice", directory]:
            wait_in_step(directory, is_endless=True)
        case ["held", directory]:
            wait_in_step(Held(directory), is_endless=False)
        case ["kill in step", directory]:
            kill_in_step(directory)
        case ["save by hand", directory, asked_in]:
            save_by_hand(directory, int(asked_in))
        case ["kill at first look", directory]:
            kill_at_first_look(directory)
        case ["evaluate", directory]:
            evaluate_after_loop(directory)
        case _:
            raise SystemExit(f"what is {sys.argv[1:]}?")
