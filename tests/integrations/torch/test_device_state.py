"""All that a device may hold comes back as it was, to that device or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.integrations.torch.tensors import DTYPES, INTEGERS
from holdfast.storage import MemoryStorage
from on_device import Job, assert_same, on_each_device, on_stream
from torch_models import raw

PLAIN = [dtype for dtype in DTYPES if dtype not in INTEGERS]


def of_type(dtype: torch.dtype, elements: int, device: str) -> torch.Tensor:
    """Any bits at all; of truth only two values are allowed."""
    if dtype is torch.bool:
        return (torch.arange(elements) % 3 == 0).to(device)
    bits = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).to(device)


def views(device: str) -> dict[str, torch.Tensor]:
    grid = torch.arange(120_000.0, device=device).reshape(300, 400)
    numbers = torch.complex(grid, grid.flip(0))
    return {
        "transposed": grid.t(),
        "column": grid[:, 3],
        "every other": grid[::2, ::3],
        "small, strided": grid[:3, :4].t(),
        "part": grid[10:20],
        "scalar": grid[1, 1],
        "empty": grid[:0],
        "channels last": torch.randn(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last),
        "complex": numbers,
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "imaginary part": numbers.imag,
    }


@on_each_device
def test_each_type_and_each_kind_of_view_comes_back(device: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {f"{dtype}, {size}": of_type(dtype, size, device) for dtype in PLAIN for size in (3, 70_000)}
    tree |= {f"view/{name}": view.clone(memory_format=torch.preserve_format) for name, view in views(device).items()}
    hf.save(tmp_path / "tree", tree)
    found = hf.load(tmp_path / "tree", like=tree)
    assert found.keys() == tree.keys()
    for name, tensor in tree.items():
        assert found[name].device.type == device, name
        assert found[name].dtype == tensor.dtype, name
        assert raw(found[name].cpu()) == raw(tensor.cpu()), name


@on_each_device
def test_views_are_stored_by_their_values(device: str, tmp_path: Path) -> None:
    for name, view in views(device).items():
        hf.save(tmp_path / name, {"view": view})
        found = hf.load(tmp_path / name)
        assert raw(torch.as_tensor(found["view"])) == raw(view.cpu()), name


ACROSS = [
    ("cpu", "cpu"),
    *(pytest.param(*pair, marks=pytest.mark.cuda) for pair in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda"))),
]


@pytest.mark.parametrize(("saved_on", "device"), ACROSS)
@pytest.mark.parametrize("has_stepped", [True, False])
def test_a_run_is_restored_in_place_on_another_device(saved_on: str, device: str, has_stepped: bool) -> None:
    storage, job = MemoryStorage(), Job("cpu").to(saved_on)
    job.optimizer.step()
    expected = job.values()
    with hf.CheckpointManager(storage, job.checkpoint()) as manager:
        manager.save(1)
    again = Job("cpu").to(device)
    if has_stepped:
        again.optimizer.step()
    places = {name: tensor.data_ptr() for name, tensor in again.tensors().items()}
    with hf.CheckpointManager(storage, again.checkpoint()) as manager:
        manager.restore(1)
    assert_same(again.tensors(), expected)
    assert {name: tensor.data_ptr() for name, tensor in again.tensors().items() if name in places} == places
    assert {tensor.device.type for name, tensor in again.tensors().items() if "step" not in name} == {device}
    # And it can be trained.
    job.optimizer.step()
    again.optimizer.step()
    if saved_on == device:
        assert_same(again.tensors(), job.tensors())


@on_each_device
def test_what_is_restored_is_there_for_any_stream(device: str) -> None:
    """A strided tensor is filled by a kernel, on a stream of the thread that reads."""
    storage = MemoryStorage()
    live = torch.randn(3000, 1000, device=device).t()
    expected = live.clone()
    with hf.CheckpointManager(storage, hf.Checkpoint(live={"a": live})) as manager:
        manager.save(1).wait_committed(60)
        for _ in range(3):
            with on_stream(device, other=True):
                live.zero_()
                manager.restore(1)
                assert torch.equal(live, expected)


@on_each_device
def test_tied_weights_are_stored_once_and_stay_tied(device: str) -> None:
    def build() -> Any:
        model: Any = nn.ModuleDict({"words": nn.Embedding(50, 16), "head": nn.Linear(16, 50, bias=False)}).to(device)
        model["head"].weight = model["words"].weight
        return model

    storage, model, again = MemoryStorage(), build(), build()
    with hf.CheckpointManager(storage, hf.Checkpoint(model=model)) as manager:
        manager.save(1).wait_committed(60)
    with hf.CheckpointManager(storage, hf.Checkpoint(model=again)) as manager:
        manager.restore(1)
    assert again["head"].weight is again["words"].weight
    assert torch.equal(again["words"].weight, model["words"].weight)


@on_each_device
def test_generators_and_scalers_go_on_where_they_were(device: str) -> None:
    storage = MemoryStorage()

    def build() -> dict[str, Any]:
        model = nn.Linear(8, 8, device=device)
        return {
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "scaler": torch.amp.GradScaler(device, init_scale=2.0**60, growth_interval=3),
            "generator": torch.Generator(device),
            "rng": hf.RNG(),
        }

    def go_on(objects: dict[str, Any], steps: int) -> list[Any]:
        drawn: list[Any] = []
        for _ in range(steps):
            batch = torch.randn(4, 8, device=device, generator=objects["generator"])
            objects["optimizer"].zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = nn.functional.dropout(objects["model"](batch), 0.5).square().sum()
            objects["scaler"].scale(loss).backward()
            objects["scaler"].step(objects["optimizer"])
            objects["scaler"].update()
            drawn += [loss.item(), objects["scaler"].get_scale(), float(torch.rand((), device=device))]
        return drawn

    torch.manual_seed(3)
    objects = build()
    go_on(objects, 40)
    with hf.CheckpointManager(storage, hf.Checkpoint(**objects)) as manager:
        manager.save(40).wait_committed(60)
    expected = go_on(objects, 10)
    torch.manual_seed(99)
    again = build()
    go_on(again, 2)
    with hf.CheckpointManager(storage, hf.Checkpoint(**again)) as manager:
        manager.restore(40)
    assert go_on(again, 10) == expected
