"""A worker of a job that names an array of some length, which may not be that of the checkpoint; run as under torchrun.

python unlike_state.py DIRECTORY LENGTH VALUE
"""

from __future__ import annotations

import sys

import numpy as np

import holdfast

directory, length, value = sys.argv[1:]
with holdfast.resumable(directory, array=np.full(int(length), float(value)), preemption="off", quiet=True) as run:
    for _ in run.steps(1):
        pass
