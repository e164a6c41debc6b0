"""Jobs whose runs are in tiers, as far as a manager knows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.events import Event, Warned
from holdfast.storage import LocalStorage
from holdfast.storage.protocol import Storage
from patience import PATIENCE_SECONDS


class Job:
    """A process that trains, as far as a manager knows."""

    def __init__(self, *places: Any, **options: Any) -> None:
        self.events: list[Event] = []
        self.state = {"w": np.zeros(5000)}
        self.tiers = hf.Tiers(*places)
        checkpoint = hf.Checkpoint(state=self.state)
        self.manager = hf.CheckpointManager(self.tiers, checkpoint, sinks=[self.events.append], **options)

    def save(self, step: int) -> hf.SaveHandle:
        self.state["w"][:] = step
        return self.manager.save(step)

    def save_all(self, *steps: int, tier: int | None = -1) -> None:
        for step in steps:
            self.save(step).wait_committed(tier=tier)
        self.manager.wait()

    def restore(self) -> int | None:
        self.state["w"][:] = -1
        restored = self.manager.restore()
        assert restored is None or (self.state["w"] == restored.step).all()
        return None if restored is None else restored.step

    def texts(self, kind: type[Event] = Warned) -> list[str]:
        return [str(event) for event in self.events if isinstance(event, kind)]

    def die(self) -> None:
        self.manager.abandon()


def steps_in(place: Path | Storage) -> list[int]:
    storage = LocalStorage(place) if isinstance(place, Path) else place
    return [name.step for name in StoredRun(storage).look(closely=True).committed]


def wait_until(is_so: Callable[[], bool]) -> None:
    end_at = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end_at, "it does not come"
        time.sleep(0.02)


@contextmanager
def started() -> Iterator[Callable[..., Job]]:
    """Starts jobs during the block, and then ends those that are left."""
    jobs: list[Job] = []

    def start(*places: Any, **options: Any) -> Job:
        jobs.append(Job(*places, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.die()
