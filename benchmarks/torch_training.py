"""The training loop in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.model import Model
from benchmarks.state import State
from benchmarks.timing import timed
from benchmarks.training import WARM_UP_STEPS, Training, first_batch
from benchmarks.workloads import TRAINED


class TorchTraining(Training[State]):
    """Eager, with `torch.optim.AdamW`."""

    def __init__(self, scale: float) -> None:
        # As JAX and TensorFlow do by themselves: numbers too small to be held in full, of which the optimizer's state
        # is soon full, make a step take three times as long, now more and now less. Later threads have it too.
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
        size = TRAINED.scaled(scale)
        self._model = Model(size)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batch = torch.from_numpy(first_batch(size))
        for _ in range(WARM_UP_STEPS):
            self.step(lambda: None)
        self.state = State({"model": self._model, "optimizer": self._optimizer})

    @property
    def size_bytes(self) -> int:
        """The bytes of the model and its optimizer's state."""
        return sum(tensor.nbytes for tensor in self.state.tensors().values())

    def step(self, allow_update: Callable[[], object]) -> float:
        """Forward, backward and the optimizer's step."""
        self._optimizer.zero_grad()
        self._model(self._batch).backward()

        def update() -> None:
            allow_update()
            self._optimizer.step()

        return timed(update)
