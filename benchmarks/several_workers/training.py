"""A training loop of several workers, with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.several_workers import TRAINED
from benchmarks.several_workers.state import WorkersState, make_module
from benchmarks.timing import timed
from benchmarks.training import WARM_UP_STEPS, Training, first_batch


class WorkersTraining(Training[Any]):
    """Each worker holds its part of the model and of AdamW's state; they meet in each step."""

    def __init__(self, scale: float) -> None:
        # Numbers too small to be held in full, of which the optimizer's state is soon full, make steps take longer.
        torch.set_flush_denormal(True)
        size = TRAINED.scaled(scale)
        self._module, self._optimizer = make_module(size, is_replicated=False)
        self._batch = torch.from_numpy(first_batch(size))
        for _ in range(WARM_UP_STEPS):
            self.step(lambda: None)
        self.state = WorkersState(self._module, self._optimizer)

    @property
    def size_bytes(self) -> int:
        """The bytes that this worker holds."""
        return sum(part.nbytes for part in self.state.parts())

    def step(self, allow_update: Callable[[], object]) -> float:
        """Forward, backward and the optimizer's step."""
        self._optimizer.zero_grad()
        self._module(self._batch).backward()

        def update() -> None:
            allow_update()
            self._optimizer.step()

        return timed(update)
