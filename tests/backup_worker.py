"""A worker of a training that is backed up by all of its workers together; the tests start several."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

import holdfast as hf
from file_engine import join_in_directory
from holdfast.testing.cluster_scenarios import say

EPOCHS = 6
LIVENESS_SECONDS = 2.0


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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
