"""Tensors of a saved module that training changes and that are in no state dict: a warning, once in a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.events import Event, Warned

STEPS = 4


class Part(nn.Linear):
    """A linear layer whose extra tensors a function makes, and another changes in each step."""

    def __init__(self, make: Callable[[Any], object], change: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__(3, 3)
        make(self)
        self.change = change

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out = super().forward(batch)
        self.change(self, out)
        return out


class WithExtraState(Part):
    def get_extra_state(self) -> torch.Tensor:
        return torch.as_tensor(self.mean).clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.mean = state


def put(**values: object) -> Callable[[Any], object]:
    return lambda part: vars(part).update(values)


def replace_mean(part: Any, out: torch.Tensor) -> None:
    """A running mean whose shape the first batch gives."""
    mean = out.detach().mean(0)
    part.mean = mean if part.mean.dtype is torch.int64 else 0.9 * part.mean + 0.1 * mean


def keep_messages(part: Any, out: torch.Tensor) -> None:
    part.store = {key: (out.detach()[0], out.detach()[1:]) for key in part.store}


def warnings_of(directory: Path, steps: int = STEPS, *, restores: bool = True, **objects: Any) -> list[str]:
    events: list[Event] = []
    named = hf.Checkpoint(**objects)
    optimizer = torch.optim.SGD(objects["model"].parameters(), lr=0.1)
    with hf.CheckpointManager(directory, named, sinks=[events.append]) as manager:
        if restores:
            manager.restore()
        for step in range(steps):
            for parameter in objects["model"].parameters():
                parameter.grad = None
            objects["model"](torch.full((2, 3), float(step + 1))).sum().backward()
            optimizer.step()
            manager.save(step)
    return [event.text for event in events if isinstance(event, Warned)]


def count_in_place(part: Any, _: torch.Tensor) -> None:
    part.pointer += 1


LOST: dict[str, tuple[Callable[[Any], object], Callable[[Any, torch.Tensor], object], str]] = {
    "a mean, replaced": (put(mean=torch.tensor([0])), replace_mean, "mean"),
    "a pointer, in place": (put(pointer=torch.zeros((), dtype=torch.int64)), count_in_place, "pointer"),
    "a buffer that is not persistent": (
        lambda part: part.register_buffer("pointer", torch.zeros(1), persistent=False),
        count_in_place,
        "pointer",
    ),
    "a large queue, in place": (
        put(queue=torch.zeros(100, 100)),
        lambda part, out: part.queue[0].fill_(float(out.detach()[0, 0])),
        "queue",
    ),
    "messages in tuples of a dict": (
        put(store={key: (torch.empty(0), torch.empty(0)) for key in range(3)}),
        keep_messages,
        "store",
    ),
    "a list": (
        put(means=[torch.zeros(3)]),
        lambda part, out: part.means.__setitem__(0, out.detach()[0]),
        "means",
    ),
    "a place in a queue": (put(pointer=0), count_in_place, "pointer"),
    "a strength that is lowered": (
        put(strength=1.0),
        lambda part, _: setattr(part, "strength", 0.9 * part.strength),
        "strength",
    ),
    "an array, in place": (put(mean=np.zeros(3)), lambda part, _: part.mean.__iadd__(1.0), "mean"),
    "an array, replaced": (
        put(mean=np.zeros((2, 3), dtype=np.float32)),
        lambda part, _: setattr(part, "mean", 0.9 * part.mean + 1),
        "mean",
    ),
    "a large array, in place": (put(sums=np.zeros((300, 300))), lambda part, _: part.sums.__iadd__(1), "sums"),
    "an array's number": (
        put(best=np.float64(9)),
        lambda part, _: setattr(part, "best", part.best - 1),
        "best",
    ),
    "complex numbers": (
        put(phase=torch.zeros(2, dtype=torch.complex64)),
        lambda part, _: part.phase.add_(1j),
        "phase",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_a_tensor_that_is_lost_is_named_once(tmp_path: Path, name: str) -> None:
    make, change, attribute = LOST[name]
    [text] = warnings_of(tmp_path, model=nn.Sequential(nn.Linear(3, 3), Part(make, change)))
    assert text.startswith(f"1.{attribute} of model: such values change in training and are in no state_dict()")
    assert "register_buffer(name, tensor)" in text
    assert "ignore this" in text


CALM: dict[str, tuple[Callable[[Any], object], Callable[[Any, torch.Tensor], object]]] = {
    "a constant": (put(frequencies=torch.arange(8.0)), lambda part, out: out * part.frequencies[0]),
    "a constant that is not a number": (put(limit=torch.tensor([float("nan")])), lambda *_: None),
    "computed anew, with the same values": (
        put(mask=torch.ones(3)),
        lambda part, out: setattr(part, "mask", torch.ones(3)),
    ),
    "computed anew in place, with the same values": (put(mask=torch.ones(3)), lambda part, _: part.mask.fill_(1.0)),
    "numbers that stay, and a flag": (
        put(size=2**1100, limit=float("nan"), width=3, has_begun=False),
        lambda part, out: vars(part).update(width=out.shape[1], has_begun=not part.has_begun),
    ),
    "what a step leaves behind": (
        put(attention=None, hidden=[]),
        lambda part, out: (vars(part).update(attention=out.softmax(-1).detach()), part.hidden.append(out.detach())),
    ),
    "what a step leaves behind, with its graph": (
        put(last=torch.zeros(2, 3)),
        lambda part, out: setattr(part, "last", out),
    ),
    "an array that stays, and one of texts": (
        put(edges=np.linspace(0, 1, 5), names=np.array(["a", "b"])),
        lambda part, _: setattr(part, "edges", np.linspace(0, 1, 5)),
    ),
    "another shape each time": (
        put(cache=torch.zeros(1)),
        lambda part, out: setattr(part, "cache", torch.cat([part.cache, out.detach()[0, :1]])),
    ),
    "a large tensor, replaced": (
        put(scores=torch.zeros(100, 100)),
        lambda part, out: setattr(part, "scores", out.detach()[0, 0].expand(100, 100).clone()),
    ),
    "a view of a saved buffer": (
        lambda part: (part.register_buffer("all", torch.zeros(4)), vars(part).update(part=part.all[:2])),
        lambda part, out: part.part.add_(1.0),
    ),
    "a weight that torch derives": (
        nn.utils.spectral_norm,
        lambda part, out: setattr(part, "weight", part.weight.detach()),
    ),
    "made without a version": (
        lambda part: setattr(part, "cache", torch.inference_mode()(torch.zeros)(2)),
        lambda part, out: setattr(part, "cache", torch.inference_mode()(out.detach().clone)()[0]),
    ),
}


@pytest.mark.parametrize("name", CALM)
def test_what_need_not_be_kept_is_not_named(tmp_path: Path, name: str) -> None:
    assert warnings_of(tmp_path, model=nn.Sequential(Part(*CALM[name]))) == []


class Keeper:
    """Saves a tensor of a module in a state of its own."""

    def __init__(self, pointer: torch.Tensor) -> None:
        self.pointer = pointer

    def state_dict(self) -> dict[str, Any]:
        return {"pointer": self.pointer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pointer.copy_(state["pointer"])


def test_what_is_saved_in_another_way_is_not_named(tmp_path: Path) -> None:
    make = put(pointer=torch.zeros(1))
    named: Any = Part(make, count_in_place)
    kept: Any = Part(make, count_in_place)
    array: Any = Part(put(mean=np.zeros(2)), lambda part, _: part.mean.__iadd__(1))
    assert warnings_of(tmp_path / "array", model=array, more={"mean": array.mean}) == []
    own = WithExtraState(put(mean=torch.zeros(3)), replace_mean)
    assert warnings_of(tmp_path / "named", model=named, more={"pointer": named.pointer}) == []
    assert warnings_of(tmp_path / "kept", model=kept, keeper=Keeper(kept.pointer)) == []
    assert warnings_of(tmp_path / "own", model=nn.Sequential(own)) == []


def test_at_most_three_are_named_and_later_changes_are_not_looked_for(tmp_path: Path) -> None:
    def change(part: Any, out: torch.Tensor) -> None:
        for tensor in part.stores:
            tensor.add_(1)

    def make(part: Any) -> None:
        part.stores = [torch.zeros(1)]

    [text] = warnings_of(tmp_path / "many", model=nn.Sequential(*(Part(make, change) for _ in range(5))))
    assert re.match(r"0\.stores of model, 1\.stores of model, 2\.stores of model, \.\.\.: ", text)

    late = Part(put(calls=[0], mean=torch.zeros(1)), change_late)
    assert warnings_of(tmp_path / "late", model=late) == []


def change_late(part: Any, _: torch.Tensor) -> None:
    part.calls[0] += 1
    if part.calls[0] > STEPS - 1:
        part.mean += 1


def test_without_a_restore_nothing_is_known_of_the_beginning(tmp_path: Path) -> None:
    make = put(pointer=torch.zeros(1))
    assert warnings_of(tmp_path, restores=False, model=Part(make, count_in_place)) == []


def test_resumed_run_watches_stray_tensors_again(tmp_path: Path) -> None:
    for _ in range(2):
        model = Part(put(mean=torch.tensor([0])), replace_mean)
        events: list[Event] = []
        with hf.resumable(tmp_path, sinks=[events.append], model=model) as run:
            for step in run.steps(run.step + 4):
                model(torch.full((2, 3), float(step)))
                run.save()
        texts = [event.text for event in events if isinstance(event, Warned)]
        assert sum("mean of model" in text for text in texts) == 1, texts
