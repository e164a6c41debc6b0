"""Programs that end with a run that is still open: HOW DIRECTORY."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np

import holdfast as hf


def train(directory: str) -> Iterator[int]:
    state = {"w": np.zeros(3)}
    with hf.resumable(directory, state=state, save_every=hf.Steps(5)) as run:
        for step in run.steps(30):
            state["w"] += 1
            yield step


def train_half_a_step(directory: str) -> None:
    for number in train(directory):
        if number == 7:
            reached.set()
            threading.Event().wait()  # In the midst of a step, for as long as the program lives.


how, place = sys.argv[1:]
reached = threading.Event()
if how == "thread":
    threading.Thread(target=train_half_a_step, args=[place], daemon=True).start()
    reached.wait()
    sys.exit()
if how == "by hand":
    kept = {"w": np.zeros(3)}
    opened = hf.resumable(place, state=kept, save_every=hf.Steps(5)).__enter__()
    numbers: Iterator[int] = opened.steps(30)
else:
    numbers = train(place)
for number in numbers:
    if number == 7:
        if how == "error":
            raise ValueError("of the program")
        if how == "exit":
            sys.exit()
        break
