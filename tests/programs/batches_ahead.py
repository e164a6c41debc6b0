"""A worker that takes each batch before the step that trains it: DIRECTORY STORE SIGNAL STEP."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import holdfast as hf
from file_engine import join_in_directory

directory, store, how, at = sys.argv[1:]
rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
cluster: Any = join_in_directory(Path(store), rank, workers, timeout_seconds=60) if workers > 1 else "alone"
sampler = hf.ResumableSampler(16, batch_size=4, seed=3, rank=rank, world_size=workers)
own: dict[str, Any] = {"trained": [], "steps_after": 0, "epochs_after": 0}
checkpoint = hf.Checkpoint(sampler=sampler, own=hf.PerWorker(own))
manager = hf.CheckpointManager(directory, checkpoint, save_every=hf.Steps(3), cluster=cluster)


def train_step(batch: list[int]) -> None:
    step = handler.total_run_calls
    (Path(store) / f"{step}.{rank}").touch()
    while workers > 1 and len(list(Path(store).glob(f"{step}.*"))) < workers:
        time.sleep(0.001)  # As in a collective.
    own["trained"].append(batch)
    if step + 1 == int(at):
        if how == "SIGKILL":
            manager.wait()
        if how == "SIGKILL" or rank == 0:
            os.kill(os.getpid(), getattr(signal, how))


with manager, hf.PreemptionCheckpointHandler(manager) as handler:
    for _ in sampler.epochs(3):
        for batch in sampler.batches(sampler):
            handler.run(train_step, batch)
            own["steps_after"] += 1  # As a scheduler that steps after the call.
        own["epochs_after"] += 1
    manager.wait()
    print(own["steps_after"], own["epochs_after"], *(sample for batch in own["trained"] for sample in batch))
