"""Modules that gain, lose or reshape what they save: a warning at the first save that holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import holdfast as hf
from holdfast.errors import MismatchError
from holdfast.events import Event, Warned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.table = nn.Embedding(3, 2)
        self.register_buffer("queue", None)


class TakesAny(Net):
    """Loads its buffer in its own way."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.queue = state_dict.get(prefix + "queue")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def run_of(directory: Path, model: nn.Module, change: Callable[[Any], object], at: int = 2) -> list[str]:
    events: list[Event] = []
    with hf.resumable(directory, model=model, save_every=hf.Steps(2), sinks=[events.append]) as run:
        for step in run.steps(run.step + 6):
            if step == at:
                change(model)
    return [event.text for event in events if isinstance(event, Warned)]


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a layer": (lambda net: net.layers.append(nn.Linear(1, 1)), "has gained layers.1.bias, layers.1.weight"),
    "a parameter": (lambda net: setattr(net, "scale", nn.Parameter(torch.ones(1))), "has gained scale"),
    "a filled buffer": (lambda net: setattr(net, "queue", torch.zeros(2)), "has gained queue"),
    "another table": (lambda net: setattr(net, "table", nn.Embedding(5, 2)), "has another shape of table.weight"),
    "a removed layer": (lambda net: net.layers.pop(0), "has lost layers.0.bias, layers.0.weight"),
    "pruning": (
        lambda net: prune.random_unstructured(net.layers[0], "weight", 0.5),
        "has gained layers.0.weight_mask, layers.0.weight_orig, has lost layers.0.weight",
    ),
    "a norm of weights": (
        lambda net: parametrizations.weight_norm(net.layers[0]),
        "has gained layers.0.parametrizations.weight.original0, layers.0.parametrizations.weight.original1, has lost",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_a_restart_refuses_is_named_at_the_save(tmp_path: Path, name: str) -> None:
    change, words = CHANGES[name]
    [text] = run_of(tmp_path, Net(), change)
    assert text.startswith(f"model {words}"), text
    assert "is refused: let it begin with what it saves" in text
    with pytest.raises(MismatchError):
        run_of(tmp_path, Net(), change)
    grown = Net()
    change(grown)
    assert run_of(tmp_path, grown, lambda _: None) == []


def test_what_a_restart_takes_is_not_warned_of(tmp_path: Path) -> None:
    change = CHANGES["a filled buffer"][0]
    for _ in range(2):
        assert run_of(tmp_path / "own", TakesAny(), change) == []
        lazy = nn.Sequential(nn.LazyLinear(2))
        assert run_of(tmp_path / "lazy", lazy, lambda net: net(torch.ones(1, 3)), at=0) == []
        frozen: Any = Net()
        assert run_of(tmp_path / "plain", frozen, lambda net: net.requires_grad_(False)) == []
