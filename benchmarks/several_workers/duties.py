"""The orders of one worker of a job, which it carries out with the others."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from benchmarks.harness.limits import TOGETHER, Limits
from benchmarks.harness.results import LIMITS
from benchmarks.harness.worker import Duties
from benchmarks.peers.peer import TorchPeer
from benchmarks.several_workers import TRAINED, Setup
from benchmarks.several_workers.state import WorkersState, make_module, make_workers_state
from benchmarks.several_workers.ways import make_way
from benchmarks.states.torch_state import TorchTraining

_MEETING_SECONDS: Final = 600.0
"""The process that compares has shorter limits; this one only ensures that no worker waits for ever."""


class _JobDuties(Duties):
    """The ways of saving that share a job's state."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
            dist.init_process_group("gloo", timeout=timedelta(seconds=_MEETING_SECONDS))
        self.state: WorkersState
        self._ways: dict[str, TorchPeer] = {}

    def measure_size(self) -> dict[str, float]:
        """The size of what this worker holds."""
        parts = self.state.parts()
        return {"held_bytes": float(sum(part.nbytes for part in parts)), "tensors": float(len(parts))}

    def open_way(self, way: str, directory: str) -> None:
        """**Collective.** Opens a way of saving the state."""
        peer = make_way(way)
        Path(directory).mkdir(parents=True, exist_ok=True)
        peer.open(Path(directory), self.state, keep=1)
        self._ways[way], self.note = peer, peer.makes_last

    def close(self) -> None:
        """**Collective.** Ends what was opened."""
        for way in self._ways.values():
            way.close()
        self._ways = {}


class WorkersDuties(_JobDuties):
    """Saves and restores in several ways, or only copies, writes and reads the same bytes."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """**Collective.** Makes the state."""
        super().__init__()
        self._setup = msgspec.convert(setup, Setup)
        self.state = make_workers_state(self._setup)
        self._limits: Limits | None = None

    def open_way(self, way: str, directory: str) -> None:
        """**Collective.** Opens a way of saving, or what measures the machine."""
        if way != LIMITS:
            super().open_way(way, directory)
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._limits = Limits(
            Path(directory),
            [(part.data_ptr(), part.nbytes) for part in self.state.parts()],
            TOGETHER,
            rank=dist.get_rank(),
            workers=dist.get_world_size(),
            is_replicated=self._setup.is_replicated,
            meet=dist.barrier,
        )

    def bare(self, reads_only: bool = False) -> dict[str, float]:
        """**Collective.** Measures the machine; the reads alone where there are no saves."""
        assert self._limits is not None
        return self._limits.measure_read() if reads_only else self._limits.measure()

    def change(self, version: int) -> None:
        """Gives the state the values of a version, as training changes it."""
        self.state.change(version)

    def save(self, way: str, step: int, count: int, pause_seconds: float = 0.0) -> dict[str, float]:
        """**Collective.** Saves, each right after the one before is durable or a while later."""
        peer, figures = self._ways[way], {}
        for number in range(count):
            if pause_seconds:
                time.sleep(pause_seconds)
            peer.prepare()
            if number == 0:
                self.state.touch()
            dist.barrier()
            begun_at = time.perf_counter()
            peer.save(step + number)
            stall_seconds = time.perf_counter() - begun_at
            figures[f"stall {number}"] = stall_seconds + peer.wait_copied()
            peer.wait_durable()
            figures[f"durable {number}"] = time.perf_counter() - begun_at
        return figures

    def retain(self, way: str, step: int) -> None:
        """**Collective.** Removes all saves but the newest."""
        self._ways[way].retain(step)

    def restore(self, way: str, step: int, version: int) -> dict[str, float]:
        """**Collective.** Restores in place, and compares."""
        peer = self._ways[way]
        peer.prepare()
        self.state.wipe()
        dist.barrier()
        begun_at = time.perf_counter()
        peer.restore(step)
        seconds = time.perf_counter() - begun_at
        wrong = self.state.differing(version)
        if wrong:
            raise ValueError(f"{len(wrong)} tensors did not come back as they were saved, {wrong[0]} for one")
        return {"restore": seconds}

    def close(self) -> None:
        """**Collective.** Ends what was opened."""
        super().close()
        if self._limits is not None:
            self._limits.close()


class WorkersTrainingDuties(_JobDuties):
    """Trains with FSDP2, and saves while it does. Each worker holds its part of the model and of AdamW's state."""

    def __init__(self, scale: float) -> None:
        """**Collective.** Makes the loop."""
        super().__init__()
        size = TRAINED.scaled(scale)
        module, optimizer = make_module(size, is_replicated=False)
        self._training: TorchTraining[WorkersState] = TorchTraining(size, module, optimizer, WorkersState)
        self.state = self._training.state

    def train(self, way: str, first_step: int, pairs: int, interval_steps: int) -> dict[str, float]:
        """**Collective.** Trains, and saves while it does."""
        return {"wait": 0.0, **self._training.measure(self._ways[way], first_step, pairs, interval_steps)}
