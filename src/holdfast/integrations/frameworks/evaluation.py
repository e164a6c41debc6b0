"""An evaluation at the end of a step, which a job can leave: it may take minutes, more than a notice allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import distributed

from holdfast.integrations.torch.module_walks import sum_up
from holdfast.state import RNG
from holdfast.training.run import Run

_LOOK_SECONDS: Final = 0.5


class Evaluation:
    """The state when an evaluation began, so that the step before it can be saved in the middle of it.

    The caller keeps what the evaluation itself changes: counters, callbacks, metrics. The random generators are kept
    here, and the weights are checked: some programs evaluate with averaged weights, and restore their own later.
    """

    def __init__(self, run: Run, module: torch.nn.Module, device: torch.device, batches: float = 0) -> None:
        """**Collective.** Begins an evaluation.

        Args:
            run: Tells when to exit.
            module: The model.
            device: Where collectives of small tensors run.
            batches: How many batches this worker evaluates. Workers agree on a batch only if all have the same number.
        """
        self._run, self._module, self._device = run, module, device
        self._random = RNG().state_dict()
        self._sums = sum_up(module)
        self._is_joint = run.manager.participant is not None
        self._can_agree = not self._is_joint or self._reduce(batches) == -self._reduce(-batches) < float("inf")
        # Of several workers, the first one says to all at which batch it says more.
        self._batches = self._look_at = 1
        self._looked_at = time.monotonic()

    def is_to_leave(self) -> bool:
        """**Collective.** Returns True if the job should exit before the current batch; the same on all workers."""
        if not self._can_agree:
            return False
        if not self._is_joint:
            return self._run.should_stop()
        self._look_at -= 1
        if self._look_at:
            return False
        now = time.monotonic()
        per_look = int(self._batches * _LOOK_SECONDS / max(now - self._looked_at, 1e-6))
        told = torch.tensor([self._run.should_stop(), min(max(per_look, 1), 2 * self._batches)], device=self._device)
        distributed.broadcast(told, src=0)
        is_to_leave, self._batches = map(int, told.tolist())
        self._look_at, self._looked_at = self._batches, now
        return bool(is_to_leave)

    def has_own_weights(self) -> bool:
        """**Collective.** Returns True if the model has the weights with which the evaluation began, on all workers."""
        is_same = self._sums == sum_up(self._module)
        return is_same if not self._is_joint else not self._reduce(not is_same)

    @contextmanager
    def stepped_back(self) -> Iterator[None]:
        """Returns a context in which the random generators are as when the evaluation began."""
        now = RNG().state_dict()
        RNG().load_state_dict(self._random)
        try:
            yield
        finally:
            RNG().load_state_dict(now)

    def _reduce(self, value: float) -> float:
        """Returns the maximum of all workers' values."""
        together = torch.tensor(float(value), device=self._device)
        distributed.all_reduce(together, distributed.ReduceOp.MAX)
        return together.item()
