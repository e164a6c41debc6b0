"""The orders of a contender that trains with a framework."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.frameworks.fit import make_fit
from benchmarks.harness.worker import Duties
from benchmarks.one_process.duties import limit_threads


class FitDuties(Duties):
    """Trains with a framework, saved in one way or not at all."""

    def __init__(self, framework: str, way: str, directory: str, scale: float) -> None:
        # As others do by themselves: numbers too small to be held in full make steps take longer.
        torch.set_flush_denormal(True)
        self._fit = make_fit(framework, way, Path(directory), scale)
        limit_threads()

    def lose(self, saves: int, interval_steps: int) -> dict[str, float]:
        """A fit with some saves."""
        return self._fit.measure_saves(saves, interval_steps)

    def prepare(self, steps: int, is_stream: bool) -> None:
        """Leaves a checkpoint within an epoch. Others do the same meanwhile."""
        torch.set_num_threads(1)
        self._fit.prepare(steps, is_stream=is_stream)

    def restart(self, steps: int, is_stream: bool) -> dict[str, float]:
        """Takes the epoch up."""
        return self._fit.measure_restart(steps, is_stream=is_stream)

    def begin(self, steps: int, is_stream: bool) -> dict[str, float]:
        """Begins an epoch."""
        return self._fit.measure_start(steps, is_stream=is_stream)
