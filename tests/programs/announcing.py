"""What runs say of themselves, life after life; their directories are in the working directory."""

from __future__ import annotations

import logging
import sys
from typing import Any

import holdfast as hf


class Optimizer:
    """An optimizer that has a learning rate, and nothing else."""

    def __init__(self, lr: float) -> None:
        self.param_groups: Any = [{"params": [], "lr": lr}]

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": self.param_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups = state["param_groups"]


def train(total: int, lr: float = 0.1, **options: Any) -> None:
    with hf.resumable("runs/gpt", optimizer=Optimizer(lr), save_every=hf.Steps(5), keep=hf.Latest(2), **options) as run:
        for _ in run.steps(total):
            pass
    sys.stderr.write("--\n")


def handle(total: int, **options: Any) -> None:
    with hf.CheckpointManager("runs/handled", hf.Checkpoint(optimizer=Optimizer(0.1))) as manager:
        with hf.PreemptionCheckpointHandler(manager, **options) as handler:
            for _ in handler.steps(total):
                pass
            if total == 3:
                manager.save(3).wait_committed()
    sys.stderr.write("--\n")


def back_up(epochs: int, **options: Any) -> None:
    with hf.WorkerTrainingState("runs/backup", hf.Checkpoint(optimizer=Optimizer(0.1)), **options) as state:
        state.restore()
        for epoch in range(state.maybe_load_initial_epoch_from_ckpt(0, "train"), epochs):
            state.back_up(epoch)
        if epochs == 4:
            state.delete_backup()
    sys.stderr.write("--\n")


train(7)
train(16, 0.5)
train(16)
train(17, quiet=True)
train(5, begin_anew=True, keep_current="optimizer.lr")
handle(3)
handle(4)
handle(5, quiet=True)
back_up(2)
back_up(3)
back_up(3, quiet=True)
back_up(4)
logging.getLogger("holdfast").setLevel(logging.WARNING)
train(6)
logging.getLogger("holdfast").setLevel(logging.NOTSET)
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
train(6)
