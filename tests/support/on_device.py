"""Small training jobs on a device: the tests run on the processor in each gate, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

import holdfast as hf

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])

on_each_stream = pytest.mark.parametrize(
    ("device", "other"),
    [
        pytest.param("cpu", False, id="cpu"),
        pytest.param("cuda", False, id="cuda, same stream", marks=pytest.mark.cuda),
        pytest.param("cuda", True, id="cuda, other stream", marks=pytest.mark.cuda),
    ],
)

WAYS: Final = ("one by one", "foreach", "fused", "capturable")
"""How an optimizer takes its steps."""


class Net(nn.Module):
    """Parameters that the optimizer changes: one that takes a while to be copied, and many small ones."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.zeros(elements))
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(7, 3)) for _ in range(40))
        self.strided = nn.Parameter(torch.zeros(300, 200).t())


class Job:
    """A model that each step changes everywhere. On a GPU it is so large that steps would overtake a copy."""

    def __init__(self, device: str, way: str = "foreach") -> None:
        self.device = device
        self.model = Net(1 << 24 if device == "cuda" else 1 << 20).to(device)
        options: dict[str, Any] = {"one by one": {"foreach": False}}.get(way, {way: True})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5, **options)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def to(self, device: str) -> Job:
        """Before the first step: the optimizer's state is made where the parameters are."""
        self.device = device
        self.model.to(device)
        return self

    def checkpoint(self) -> hf.Checkpoint:
        return hf.Checkpoint(model=self.model, optimizer=self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found |= {f"{kind}/{name}": value for kind, value in self.optimizer.state[parameter].items()}
        return found

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}


@contextmanager
def on_stream(device: str, other: bool) -> Iterator[None]:
    """What is asked of the device meanwhile goes to another stream, in the order that a program has to see to."""
    if device == "cpu" or not other:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name].cpu(), expected[name].cpu()), name


def assert_stored(directory: Path | Any, step: int, expected: dict[str, torch.Tensor], device: str) -> None:
    """Restores into a fresh job, whose state is there already."""
    again = Job(device)
    again.optimizer.step()
    with hf.CheckpointManager(directory, again.checkpoint()) as manager:
        assert manager.restore(step) is not None
    assert_same(again.tensors(), expected)
