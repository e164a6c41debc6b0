"""Saves where there is no memory for a copy of the state; arguments: directory, failures allowed, reserved bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np

import holdfast as hf
import holdfast.state.numpy_arrays
from holdfast.errors import SaveFailedError
from holdfast.events import Event


def main(directory: str, failures_allowed: int, reserve_bytes: int) -> None:
    state = np.ones(30_000_000, np.float32)
    lines = Path("/proc/self/status").read_text().splitlines()
    taken_bytes = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + 90_000_000, hard_limit))
    events: list[Event] = []
    manager = hf.CheckpointManager(
        directory,
        hf.Checkpoint(state=state),
        threads=1,
        sinks=[events.append],
        failures_allowed=failures_allowed,
        reserve_bytes=reserve_bytes,
    )
    handle = manager.save(1)
    manager.save(2)
    resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))
    manager.save(3)
    manager.close()
    assert manager.latest_step() == 3
    kinds = [type(event).__name__ for event in events]
    assert kinds.count("Failed") == 2, events
    assert not reserve_bytes or "Warned" in kinds, events
    try:
        handle.wait_committed()
    except SaveFailedError as error:
        if not isinstance(error.__cause__, MemoryError):
            raise
        print(error)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
