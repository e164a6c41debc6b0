"""One worker of a job on two hosts, told by files when to save, and where to stand still in the middle of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.errors import PeerError, SaveFailedError
from holdfast.storage import LocalStorage
from holdfast.testing.cluster_scenarios import say

LIVENESS_SECONDS = 2.0
NEVER_SECONDS = 3600.0
"""The deadline of the job: whatever ends in time does so because the link is missed."""


class HeldStorage(LocalStorage):
    """Stands still where it is told to."""

    orders: Path

    def write(self, path: str, data: bytes) -> None:
        if "/index-00001" in path:
            self._pass("part")
        super().write(path, data)

    def publish(self, path: str, data: bytes) -> bool:
        if path.startswith("step-") and path.endswith("manifest.json"):
            self._pass("publish")
        return super().publish(path, data)

    def _pass(self, place: str) -> None:
        order = self.orders / f"hold-{place}"
        if order.exists():
            say({"held": place})
            while order.exists():
                time.sleep(0.005)  # Orders are files, which alone pass the cut network; nobody tells of a file.


def main(directory: Path, orders: Path) -> None:
    storage = HeldStorage(directory)
    storage.orders = orders
    state: dict[str, Any] = {"shared": np.zeros(200_000), "own": hf.PerWorker(np.zeros(1000))}
    manager = hf.CheckpointManager(
        storage,
        hf.Checkpoint(**state),
        threads=2,
        failures_allowed=1000,
        liveness_seconds=LIVENESS_SECONDS,
        timeout_seconds=NEVER_SECONDS,
        check_replicas=True,
    )
    say({"worker": manager.worker.rank})
    manager.restore()
    for step in range(1, 1000):
        while not (orders / f"step-{step}").exists():
            if (orders / "end").exists():
                manager.close()
                return
            time.sleep(0.005)  # As above.
        state["shared"][:] = step
        try:
            manager.save(step).wait_committed()
        except SaveFailedError as error:
            cause = error.__cause__
            told = cause.rank if isinstance(cause, PeerError) else None
            say({"ended": step, "failed": type(cause).__name__, "rank": told, "text": str(cause)})
            manager.wait()
        else:
            say({"ended": step, "failed": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    # Other threads may still hang in calls over the link.
    os._exit(0)
