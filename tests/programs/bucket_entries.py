"""Trains by one of the entry points of holdfast: `bucket_entries.py PLACE DOOR [DIE_AT]`.

It prints where it begins, and its state at the end. With `ENDPOINT` in the environment the place is the URL of a bucket
of that service, and is opened with that option.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

import holdfast
from holdfast.errors import NoCheckpointError
from holdfast.jobs import Workspace

STEPS = 5


def open_place(text: str) -> Any:
    endpoint = os.environ.get("ENDPOINT")
    return holdfast.open_storage(text, endpoint=endpoint) if endpoint else text


class Trained:
    """What each entry trains: a step is the same in all of them."""

    def __init__(self) -> None:
        self.state = np.zeros(1000)

    def go(self, step: int) -> None:
        if step == DIE_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        self.state[:] = self.state * 3 + step


def train_resumable(place: Any, trained: Trained) -> None:
    with holdfast.resumable(place, state=trained.state, save_every=holdfast.Steps(1), cluster="alone") as run:
        print("begins", run.step)
        for step in run.steps(STEPS):
            run.manager.wait(60)
            trained.go(step)


def train_manager(place: Any, trained: Trained) -> None:
    checkpoint = holdfast.Checkpoint(state=trained.state)
    with holdfast.CheckpointManager(place, checkpoint, cluster="alone") as manager:
        found = manager.restore()
        print("begins", first := found.step + 1 if found else 0)
        for step in range(first, STEPS):
            trained.go(step)
            manager.save(step).wait_committed()


def train_worker_state(place: Any, trained: Trained) -> None:
    checkpoint = holdfast.Checkpoint(state=trained.state)
    with holdfast.WorkerTrainingState(place, checkpoint, cluster="alone") as state:
        state.restore()
        print("begins", first := state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=STEPS))
        for epoch in range(first, STEPS):
            trained.go(epoch)
            state.back_up(epoch).wait_committed()


def train_jobs(place: Any, trained: Trained) -> None:
    with holdfast.Job() as job:

        @job.init_group
        def begin(workspace: Workspace) -> None:
            workspace["state"] = np.zeros(1000)

        @job.epoch_group
        def work(workspace: Workspace) -> None:
            trained.state = workspace["state"]
            trained.go(workspace.epoch - 1)

    holdfast.epoch_limiter(job, STEPS)
    copy = open_place(f"{sys.argv[1]}-copy")
    runner = holdfast.JobRunner(
        job, holdfast.MultiNodeCheckpointManager(place), upload_task_group_builder=holdfast.jobs.UploadTo(copy)
    )
    with holdfast.LocalSession() as session:
        runner.train(session)
    print("begins", runner.result.resumed_from or 0)
    assert holdfast.MultiNodeCheckpointManager(copy).epochs() == (STEPS,)


def train_trees(place: Any, trained: Trained) -> None:
    try:
        first, trained.state = holdfast.load(place)
    except NoCheckpointError:
        first = 0
    print("begins", first)
    for step in range(first, STEPS):
        trained.go(step)
        holdfast.save(place, (step + 1, trained.state), overwrite=True)


def train_dcp(place: Any, trained: Trained) -> None:
    import torch
    from torch.distributed import checkpoint as dcp

    reader = holdfast.dcp.StorageReader(place)
    kept = {"state": torch.from_numpy(trained.state)}
    newest = reader.latest_step()
    print("begins", first := 0 if newest is None else newest + 1)
    if first:
        dcp.load(kept, storage_reader=reader)
    writer = holdfast.dcp.StorageWriter(place)
    for step in range(first, STEPS):
        trained.go(step)
        dcp.save(kept, storage_writer=writer)


def train_jax(place: Any, trained: Trained) -> None:
    import jax

    with holdfast.resumable(place, state=jax.numpy.zeros(1000), save_every=holdfast.Steps(1), cluster="alone") as run:
        print("begins", run.step)
        for step in run.steps(STEPS):
            run.manager.wait(60)
            trained.state = np.array(run.checkpoint.state)
            trained.go(step)
            run.checkpoint.state = jax.numpy.asarray(trained.state)


if __name__ == "__main__":
    DIE_AT = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    trained = Trained()
    globals()[f"train_{sys.argv[2]}"](open_place(sys.argv[1]), trained)
    print("end", float(trained.state[0]).hex(), flush=True)
