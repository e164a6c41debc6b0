"""The canonical job: ten rows, three an epoch, summed up from 100 to 103, 115, 136 and 145."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.errors import StorageFullError
from holdfast.jobs import Workspace
from holdfast.storage import MemoryStorage
from holdfast.storage.memory import MemoryWriter

TOTALS = [100.0, 103.0, 115.0, 136.0, 145.0]
"""After each epoch; epoch 0 is the state after the init tasks."""


class Rows:
    """Reads the numbers 0 to 9, some at a time, and knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def read(self, count: int) -> list[int]:
        rows = list(range(10))[self.at : self.at + count]
        self.at += len(rows)
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


def make_job(
    nodes: Sequence[str] | None = ("trainer_0", "trainer_1", "trainer_2"),
    before_epoch: Callable[[Workspace], object] = lambda workspace: None,
) -> hf.Job:
    """The job, the same on each of some nodes; it ends when there are no more rows."""
    with hf.Job() as job:
        job.add_object("rows", Rows, on=nodes)

        @job.init_group(on=nodes)
        def begin(workspace: Workspace) -> None:
            workspace["total"] = np.full(1000, 100.0)
            workspace["where"] = {"node": workspace.node, "path": ["a", 1]}

        @job.epoch_group(on=nodes)
        def add(workspace: Workspace) -> bool:
            before_epoch(workspace)
            workspace["total"] += sum(workspace["rows"].read(3))
            return bool(workspace["rows"].at == 10)

    job.add_stop_condition(add.output)
    return job


def totals_of(session: hf.LocalSession) -> list[float]:
    """The total on each node."""
    return [float(session.workspace(node)["total"][0]) for node in session.nodes]


def count_threads() -> int:
    """How many threads this process has, those included that Python knows nothing of."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def wait_for_threads(most: int) -> None:
    """Waits until this process has no more threads than that: one that has ended is gone a little later."""
    end_at = time.monotonic() + 10
    while count_threads() > most:
        assert time.monotonic() < end_at, f"{count_threads()} threads are left, there were {most}"
        os.sched_yield()


class FullForSteps(MemoryStorage):
    """A storage that has no room for files with `file` in their names of the steps in `full`; None for any step."""

    full: frozenset[int] | None = frozenset()
    file = ""

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        if self.file in path and (self.full is None or int(path[5:14]) in self.full):
            raise StorageFullError("no room", path=path)
        return super().create(path, size_bytes)


def epochs_of(location: Any) -> tuple[int, ...]:
    """The epochs that a job has saved."""
    return hf.MultiNodeCheckpointManager(location).epochs()
