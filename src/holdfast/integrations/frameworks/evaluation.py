"""An evaluation at the end of a step, which a job can leave: it may take minutes, more than a notice allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
            run: Knows when to exit.
            module: The model.
            device: Where collectives of small tensors run.
            batches: How many batches this worker evaluates. Workers agree on a batch only if all have the same number.
        """
        self._run, self._module, self._device = run, module, device
        self._random = RNG().state_dict()
        self._sums = sum_up(module)
        self._is_joint = run.manager.participant is not None
        self._can_agree = not self._is_joint or self._reduce(batches) == -self._reduce(-batches) < float("inf")
        # Of several workers, the first one says to all at which batch it says it again.
        self._batches = self._look_at = 1
        self._looked_at = time.monotonic()
        self._has_asked = False

    def leave_if_asked(self, own_weights: AbstractContextManager[object] | None = None) -> bool | None:
        """**Collective.** Saves the step before the evaluation and exits, if the job was asked to stop.

        Args:
            own_weights: In it the model has the weights of training, if callbacks exchange them for the evaluation.

        Returns:
            None if the job was not asked, or once it was; else whether the step is counted, and the job stays.

        Raises:
            SystemExit: When the job exits.
        """
        if self._has_asked or not self._is_to_leave():
            return None
        self._has_asked = True
        with own_weights or nullcontext():
            if self.has_own_weights():
                self.step_back(self._run.finish_step)
                return True
            self._run.warn(
                "the job was asked to stop, but waits until the evaluation ends: the evaluation has changed the "
                "weights (to average them, for example) and restores them itself"
            )
            return False

    def step_back(self, save: Callable[[], object]) -> None:
        """Calls what saves while the random generators are as when the evaluation began."""
        now = RNG().state_dict()
        RNG().load_state_dict(self._random)
        try:
            save()
        finally:
            RNG().load_state_dict(now)

    def has_own_weights(self) -> bool:
        """**Collective.** Returns True if the model has the weights with which the evaluation began, on all workers."""
        is_same = self._sums == sum_up(self._module)
        return is_same if not self._is_joint else not self._reduce(not is_same)

    def _is_to_leave(self) -> bool:
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
        asked = torch.tensor([self._run.should_stop(), min(max(per_look, 1), 2 * self._batches)], device=self._device)
        distributed.broadcast(asked, src=0)
        is_to_leave, self._batches = map(int, asked.tolist())
        self._look_at, self._looked_at = self._batches, now
        return bool(is_to_leave)

    def _reduce(self, value: float) -> float:
        """Returns the maximum of all workers' values."""
        together = torch.tensor(float(value), device=self._device)
        distributed.all_reduce(together, distributed.ReduceOp.MAX)
        return together.item()
