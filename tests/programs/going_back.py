"""Trains a number that counts its updates: DIRECTORY TOTAL START_FROM KILLED_AT, with - for none; a save each 10."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import holdfast as hf


def main(directory: str, total: str, start_from: str, killed_at: str) -> None:
    state = {"updates": np.zeros(1)}
    goes_back = None if start_from == "-" else int(start_from)
    with hf.resumable(
        directory, state=state, save_every=hf.Steps(10), keep=hf.All(), start_from=goes_back, quiet=True
    ) as run:
        print(run.step, int(state["updates"][0]), flush=True)
        for step in run.steps(int(total)):
            if killed_at == str(step):
                run.manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            state["updates"] += 1
            run.report(updates=float(state["updates"][0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
