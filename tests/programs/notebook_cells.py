"""The first cell of a notebook: the test runs it in a kernel, and then cells of its own that use these names."""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf

__all__ = ["multiprocessing", "threading"]  # Later cells use them.

state: dict[str, Any]
sampler: hf.ResumableSampler
directory = ""

Act = Callable[[Any, int], object]


def make() -> None:
    global state, sampler
    state, sampler = {"w": np.zeros(3)}, hf.ResumableSampler(40, batch_size=3, seed=5)


def batches() -> Iterator[Any]:
    while True:
        yield from sampler.batches(sampler)


def train(directory: str, act: Act = lambda run, step: None, total: int = 20) -> None:
    with hf.resumable(directory, state=state, sampler=sampler, save_every=hf.Steps(4), quiet=True) as run:
        print("begins at", run.step)
        taken = batches()
        for step in run.steps(total):
            state["w"] = state["w"] * 0.9 + np.asarray(next(taken)[:3])
            act(run, step)
    print("ends with", state["w"].tolist())


def wait_for_interrupt(run: Any) -> None:
    print("waits", flush=True)
    while not run.should_stop():
        pass


def interrupt(run: Any, step: int) -> None:
    if step == 6:
        wait_for_interrupt(run)


def fail(run: Any, step: int) -> None:
    if step == 9:
        state["w"][:] = 0
        raise ValueError("of the cell's own")


def insist(run: Any, step: int) -> None:
    if step == 11:
        state["w"][:] = 0
        wait_for_interrupt(run)
        print("goes on", flush=True)
        while True:
            pass


def lose(run: Any, step: int) -> None:
    if step == 2:
        shutil.rmtree(directory + "/lost", ignore_errors=True)
        Path(directory, "lost").touch()
        os.kill(os.getpid(), signal.SIGINT)


def ask(number: int) -> Act:
    def act(run: Any, step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)

    return act
