"""A model with all that is hard to convert, how it is trained, and a conversion that is interrupted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import holdfast as hf


class Net(nn.Module):
    """Tied weights, two element types, buffers, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.narrow = nn.Linear(4, 4).to(torch.bfloat16)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: Any) -> Any:
        return self.head(self.narrow(self.norm(self.embedding(numbers)).bfloat16()).float())


def build(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": model.norm.parameters(), "lr": 0.1},
        {"params": [model.embedding.weight, *model.narrow.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "epoch": 3,
        "notes": {"seen": [1, 2.5, "three"], "shape": torch.Size([2, 3]), "limit": None, "raw": b"\x00\xff"},
        "rng": hf.RNG(),
        "own": hf.PerWorker({"place": torch.ones(2)}),
    }


def train(objects: dict[str, Any], steps: int, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        objects["optimizer"].zero_grad()
        numbers = torch.randint(0, 7, (6,), generator=generator)
        nn.functional.cross_entropy(objects["model"](numbers), numbers).backward()
        objects["optimizer"].step()
        objects["schedule"].step()


def equal_states(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_states(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal_states, one, other))
    return bool(one == other)


class Interrupting:
    """Ctrl-C in the middle."""

    def expect(self, total_bytes: int) -> None:
        assert total_bytes > 0

    def advance(self, moved_bytes: int) -> None:
        raise KeyboardInterrupt
