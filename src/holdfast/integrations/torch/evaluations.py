"""An evaluation at the end of a step, which a job can leave: it may take minutes, more than a notice allows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import distributed

from holdfast.run import Run
from holdfast.state import RNG

_LOOK_SECONDS: Final = 0.5
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
        self._sums = _sum_up(module)
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
        is_same = self._sums == _sum_up(self._module)
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


def _sum_up(module: torch.nn.Module) -> list[int]:
    """Returns checksums of all parameters of a model: they differ if parameters were exchanged.

    Buffers do not count: with DDP, rank 0 broadcasts its own in an evaluation as well.
    """
    torch.nn.Module.state_dict(module)  # In this way, parameters of FSDP are shards again.
    sums = []
    for parameter in module.parameters():
        value: Any = parameter.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        if type(value) is torch.Tensor and value.layout == torch.strided:
            real = torch.view_as_real(value) if value.is_complex() else value
            sums.append(real.view(_WORDS[real.element_size()]).sum(dtype=torch.int64))
    return [] if not sums else [int(each) for each in torch.stack([each.to(sums[0].device) for each in sums])]
