"""A job that leaves with little time, and says when the interpreter ends: DIRECTORY LEFT_SECONDS CATCHES."""

# ruff: noqa: E402  What is registered first is called last.

from __future__ import annotations

import atexit

atexit.register(print, "the end of the interpreter")

import sys

import numpy as np

import holdfast as hf
from holdfast.preemption import Demand, Notice

directory, left_seconds, catches = sys.argv[1:]
w = np.zeros(4)


def watch() -> Notice | None:
    if w[0] == 0:
        return None
    return Notice(source="mine", text="go", demand=Demand.LEAVE, left_seconds=float(left_seconds))


config = hf.TerminationConfig(sources=[], termination_watcher_fn=watch)
try:
    with hf.resumable(directory, w=w, preemption=config) as run:
        for _ in run.steps(10**9):
            w[0] += 1
except SystemExit:
    if catches == "True":
        sys.exit(3)
    raise
