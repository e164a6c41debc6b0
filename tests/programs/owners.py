"""Processes that open a run: `python owners.py PHASE DIRECTORY ...`."""

from __future__ import annotations

import ctypes
import multiprocessing
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


def back_up_on(directory: str) -> None:
    with hf.WorkerTrainingState(directory, hf.Checkpoint(weights=np.zeros(3))) as state:
        state.restore()
        for epoch in range(1, 4):
            state.back_up(epoch)
            print("trained", epoch)


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


def hold(directory: str) -> None:
    """Has the run open, without a save, until there is input; then takes nine steps."""
    with hf.resumable(directory, weights=np.zeros(3)) as run:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        for _ in run.steps(9):
            pass
    print("left")


def save(directory: str) -> None:
    """A manager alone, which restores and then saves."""
    with hf.CheckpointManager(directory, hf.Checkpoint(weights=np.zeros(3))) as manager:
        manager.restore()
        manager.save(7).wait_committed()


def delete_backup(directory: str) -> None:
    weights = np.zeros(3)
    with hf.WorkerTrainingState(directory, hf.Checkpoint(weights=weights)) as state:
        state.restore()
        state.delete_backup()


def start(directory: str, how: str) -> None:
    """Starts a process that lives on, with the run open."""
    with hf.CheckpointManager(directory, hf.Checkpoint(weights=np.zeros(3))) as manager:
        manager.save(1)
        manager.wait()
        if how == "multiprocessing":
            child = multiprocessing.get_context("fork").Process(target=signal.pause)
            child.start()
            number = child.pid
        elif how == "exec":
            number = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL).pid
        elif not (number := os.fork() if how == "fork" else ctypes.CDLL(None).fork()):
            signal.pause()
        print(number, flush=True)
        sys.stdin.read()


def train_in_child(directory: str, how: str) -> None:
    """Has the run open in the parent, as a notebook may, and trains in a child."""
    multiprocessing.set_start_method(how)
    with hf.resumable(directory, weights=np.zeros(3), preemption="off") as run:
        child = multiprocessing.Process(target=train, args=(directory,))
        child.start()
        child.join()
        assert run.step == 0
        multiprocessing.Process(target=enter, args=(directory,)).start()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
