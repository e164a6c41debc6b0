"""Processes that open a run: `python owners.py PHASE DIRECTORY ...`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np

import holdfast as hf


def back_up(directory: str, epoch: str) -> None:
    weights = np.zeros(3)
    with hf.WorkerTrainingState(directory, hf.Checkpoint(weights=weights)) as state:
        state.restore()
        state.back_up(int(epoch)).wait_committed()
        print("backed up", epoch)


def delete_after(directory: str, *container: str) -> None:
    """Deletes the backups after another container has backed up: both are process 1 of theirs."""
    weights = np.zeros(3)
    with hf.WorkerTrainingState(directory, hf.Checkpoint(weights=weights)) as state:
        state.restore()
        subprocess.run([*container, sys.executable, __file__, "back_up", directory, "2"], check=True)
        state.delete_backup()


def enter(directory: str) -> None:
    with hf.resumable(directory, weights=np.zeros(3)) as run:
        print("entered", run.step)


def train(directory: str) -> None:
    with hf.resumable(directory, weights=np.zeros(3)) as run:
        for _ in run.steps(4):
            pass


def die(directory: str) -> None:
    """Dies by SIGKILL with the run open, and leaves a child."""
    manager = hf.CheckpointManager(directory, hf.Checkpoint(weights=np.zeros(3)))
    manager.save(1)
    manager.wait()
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
