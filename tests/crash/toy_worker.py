"""A worker whose state follows from the step, so that what comes back can be told to be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from crash.command import WrongStateError
from holdfast.checkpoint import Checkpoint
from holdfast.cluster.protocol import Cluster
from holdfast.manager import CheckpointManager
from holdfast.policies import Latest
from holdfast.storage import Storage

LIVENESS_SECONDS: Final = 1.5
PATIENCE_SECONDS: Final = 60.0
KEPT: Final = 2

_LENGTHS: Final = (1, 1000, 300_000)


class ToyWorker:
    """One worker's state, which follows from the step: some of it all have alike, and some is its own."""

    def __init__(self, rank: int) -> None:
        import numpy as np

        from holdfast.state import PerWorker

        self.rank = rank
        self.shared: dict[str, Any] = {f"a{length}": np.zeros(length, np.int64) for length in _LENGTHS}
        self.own: Any = np.zeros(1000, np.int64)
        self.counter = {"step": 0}
        self.checkpoint = Checkpoint(shared=self.shared, own=PerWorker({"array": self.own}), counter=self.counter)

    def train(self, step: int) -> None:
        """Sets the state of a step, in place."""
        for array in self.shared.values():
            array[:] = step
        self.own[:] = step * 1000 + self.rank
        self.counter["step"] = step

    def check(self, step: int, *, has_own: bool) -> None:
        """Makes sure that the state is that of the step and no other.

        Raises:
            WrongStateError: If it is not.
        """
        for name, array in self.shared.items():
            if not (array == step).all():
                raise WrongStateError(f"rank {self.rank}: {name} is not that of step {step}")
        if has_own and not (self.own == step * 1000 + self.rank).all():
            raise WrongStateError(f"rank {self.rank}: its own array is not that of step {step}")
        if self.counter != {"step": step}:
            raise WrongStateError(f"rank {self.rank}: the counter is {self.counter}, the step is {step}")

    def manager(self, directory: Path | Storage, cluster: Cluster, *, incremental: bool) -> CheckpointManager:
        """A manager that keeps two checkpoints, and soon takes a silent worker for dead."""
        return CheckpointManager(
            directory,
            self.checkpoint,
            keep=Latest(KEPT),
            incremental=incremental,
            threads=2,
            cluster=cluster,
            liveness_seconds=LIVENESS_SECONDS,
            timeout_seconds=PATIENCE_SECONDS,
        )
