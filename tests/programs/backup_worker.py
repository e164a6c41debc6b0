"""A worker of a training that is backed up by all of its workers together; the tests start several."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import holdfast as hf
from file_engine import join_in_directory
from holdfast.testing.cluster_scenarios import say

EPOCHS = 6
LIVENESS_SECONDS = 2.0
PATIENCE_SECONDS = 60.0


def main(directory: str, store: str, dies_in: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cluster = join_in_directory(Path(store), rank, world_size, timeout_seconds=60)
    shared, own = np.zeros(100_000), np.zeros(10)
    checkpoint = hf.Checkpoint(shared=shared, own=hf.PerWorker(own))
    options = {"cluster": cluster, "liveness_seconds": LIVENESS_SECONDS, "failures_allowed": 0}
    with hf.WorkerTrainingState(directory, checkpoint, **options) as state:  # type: ignore[arg-type]
        state.restore()
        first = state.maybe_load_initial_epoch_from_ckpt(0, "train", epochs=EPOCHS)
        assert (shared == first).all()
        assert (own == first * (rank + 1)).all()
        say({"first": first})
        for epoch in range(first, EPOCHS):
            shared += 1
            own += rank + 1
            if epoch == dies_in and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            state.back_up(epoch).wait_committed()
        say({"kept": not state.delete_backup(), "own": own.tolist()})


def lose_one(directory: str, store: str, how: str) -> None:
    """Rank 1 comes to its end in the third epoch; the others train on for as long as they may."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cluster = join_in_directory(Path(store), rank, world_size, timeout_seconds=60)
    checkpoint = hf.Checkpoint(shared=np.zeros(1000), own=hf.PerWorker(np.zeros(10)))
    with hf.WorkerTrainingState(directory, checkpoint, cluster=cluster, liveness_seconds=LIVENESS_SECONDS) as state:
        state.restore()
        first = state.maybe_load_initial_epoch_from_ckpt(0, "train")
        for epoch in range(first, first + 2):
            state.back_up(epoch).wait_committed()
        if rank == 1:
            end(how)
            return
        end_at = time.monotonic() + PATIENCE_SECONDS
        epoch = first + 2
        while time.monotonic() < end_at:
            try:
                state.back_up(epoch)
            except hf.errors.PeerError as error:
                say({"rank": error.rank, "kind": error.kind, "message": error.message})
                raise
            epoch += 1
    say({"trained to": epoch})


def end(how: str) -> None:
    match how:
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fails":
            raise ValueError("the loss is no number")
        case "is asked to leave":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(PATIENCE_SECONDS)  # A long epoch: a thread of holdfast ends the process in the middle of it.
        case "exits":
            sys.exit(3)


if __name__ == "__main__":
    if sys.argv[3].lstrip("-").isdigit():
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        lose_one(*sys.argv[1:])
