"""torch's random generators: those of the process, and single ones."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.state.adapters import StateAdapter, void
from holdfast.state.rng import RandomSource

CPU_SOURCE = RandomSource(torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed)


def _read_cuda() -> list[Any] | None:
    # A process that has drawn nothing on a device has not started CUDA; asking would start it.
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def _write_cuda(states: list[Any]) -> None:
    if torch.cuda.is_available():
        for device, state in enumerate(states[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), device)


CUDA_SOURCE = RandomSource(_read_cuda, _write_cuda, torch.cuda.manual_seed_all)

GENERATOR = StateAdapter(
    "torch.generator",
    lambda obj: obj.get_state(),
    lambda obj, state: void(obj.set_state(state.cpu())),
    last=True,
)
