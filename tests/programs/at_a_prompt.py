"""A run that is interrupted in its fourth step, with Python's prompt after it: DIRECTORY."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import holdfast as hf

with hf.resumable(sys.argv[1], w=np.zeros(4)) as run:
    for step in run.steps(9):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
