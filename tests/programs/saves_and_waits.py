"""Saves one step into the run that is its argument, says so, and waits to be killed."""

from __future__ import annotations

import sys

import numpy as np

import holdfast as hf

with hf.CheckpointManager(sys.argv[1], hf.Checkpoint(model={"weight": np.ones(8)})) as manager:
    manager.save(1)
    manager.wait()
    print("saved", flush=True)
    sys.stdin.read()
