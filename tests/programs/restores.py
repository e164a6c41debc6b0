"""Restores a run, whose reads the test lets go wrong: DIRECTORY."""

from __future__ import annotations

import sys

import numpy as np

import holdfast as hf

array = np.zeros(100_000)
try:
    restored = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(a=array)).restore()
except KeyboardInterrupt:
    print("interrupted")
else:
    assert restored is not None
    print(restored.step, array.min(), array.max(), len(restored.passed_over), array.sum())
