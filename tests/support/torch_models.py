"""A small torch model, how it is trained, and when two states are the same to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 9) -> None:
    """Takes the same steps whenever it is called with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(8, 4, generator=generator, dtype=next(net.parameters()).dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(batch).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def same_state(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_state, left, right))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
