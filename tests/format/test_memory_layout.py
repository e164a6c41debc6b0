"""The order of the elements of arrays in memory comes back with their values; `torch.save` is the control."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.errors import FormatError
from holdfast.format.digests import digest, seal
from holdfast.format.index import Index
from holdfast.format.index_checks import decode_index
from holdfast.format.names import MANIFEST_NAME
from holdfast.format.records import ALONE, Worker, decode_manifest
from holdfast.format.shapes import StridesRecord
from holdfast.storage import MemoryStorage
from simulated_job import restore_part, save_job


def convolutions() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 1, 2)
    module: Any = nn.Sequential(*layers)
    module.to(memory_format=torch.channels_last)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


class ColumnMajor(torch.optim.Optimizer):
    """Rotates gradients into bases as `torch.linalg.qr` makes them: column-major."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            matrix = parameter.grad.reshape(len(parameter), -1)
            if not state:
                state["basis"] = torch.linalg.qr(matrix @ matrix.T + torch.eye(len(matrix)))[0]
            basis = state["basis"]
            # What a kernel that goes along memory makes of it depends on the order of its elements.
            memory = basis.as_strided((basis.numel(),), (1,)).mul_(torch.linspace(0.9, 1.1, basis.numel()))
            parameter -= 0.1 * memory.cumsum(0)[-2].tanh() * (basis @ (basis.T @ matrix)).reshape(parameter.shape)


def linears() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), nn.Tanh(), nn.Linear(12, 6))
    return module, ColumnMajor(module.parameters())


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = (module(images) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [convolutions, linears])
def test_training_goes_on_exactly_where_a_kernel_depends_on_the_layout(
    tmp_path: Path, build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
) -> None:
    module, optimizer = build()
    train(module, optimizer, range(5))
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=module, optimizer=optimizer)) as manager:
        manager.save(5).wait_committed()
        expected = train(module, optimizer, range(5, 9))
    fresh, fresh_optimizer = build()
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=fresh, optimizer=fresh_optimizer)) as manager:
        manager.restore()
    for one, other in zip(module.parameters(), fresh.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert fresh_optimizer.state[other][key].stride() == value.stride()
    assert train(fresh, fresh_optimizer, range(5, 9)) == expected


def without_strides(directory: Path) -> None:
    """Makes of a step what a holdfast wrote that did not store strides yet."""
    index_path, manifest_path = directory / "index-00000-of-00001.json", directory / MANIFEST_NAME
    index = decode_index(index_path.read_bytes(), path="")
    assert index.strides
    old = seal(msgspec.structs.replace(index, strides=()))
    index_path.write_bytes(old)
    manifest = decode_manifest(manifest_path.read_bytes(), path="", expected=None)
    worker = msgspec.structs.replace(manifest.workers[0], index_bytes=len(old), index_digest=digest(old))
    manifest_path.write_bytes(seal(msgspec.structs.replace(manifest, workers=(worker,))))


def test_training_goes_on_exactly_from_a_checkpoint_without_strides(tmp_path: Path) -> None:
    module, optimizer = convolutions()
    train(module, optimizer, range(5))
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=module, optimizer=optimizer)) as manager:
        handle = manager.save(5)
        handle.wait_committed()
        expected = train(module, optimizer, range(5, 9))
    without_strides(Path(handle.path))
    fresh, fresh_optimizer = convolutions()
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=fresh, optimizer=fresh_optimizer)) as manager:
        manager.restore()
    # It has its parameter's shape, so its elements have the order of the parameter's.
    for one, other in zip(module.parameters(), fresh.parameters(), strict=True):
        for key, value in optimizer.state[one].items():
            assert fresh_optimizer.state[other][key].stride() == value.stride()
    assert train(fresh, fresh_optimizer, range(5, 9)) == expected


SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(SHAPES)
    tensor = torch.randn(shape)
    if len(shape) in (4, 5) and draw(st.booleans()):
        tensor = tensor.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dimension in range(len(shape)):
        change = draw(st.sampled_from(["none", "none", "none", "step", "first", "expand"]))
        length = tensor.shape[dimension]
        if change == "step":
            tensor = tensor[(slice(None),) * dimension + (slice(None, None, 2),)]
        elif change == "first" and length:
            tensor = tensor.narrow(dimension, 0, 1)
        elif change == "expand" and length == 1:
            tensor = tensor.expand(*tensor.shape[:dimension], 3, *tensor.shape[dimension + 1 :])
    return tensor


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from([1, 2]))
def test_tensors_come_back_with_the_strides_that_torch_gives_them(state: list[torch.Tensor], workers: int) -> None:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    control = torch.load(file, weights_only=True)
    storage = MemoryStorage()
    save_job(storage, [{"state": state} for _ in range(workers)])
    for rank in range(workers):
        objects: dict[str, Any] = {"state": [None] * len(state)}
        restore_part(storage, objects, Worker(rank, workers))
        for before, after, loaded in zip(state, objects["state"], control, strict=True):
            assert torch.equal(after, loaded)
            # A dense tensor keeps its strides, as with `torch.save`; a view with gaps gets those that `clone` gives it.
            assert after.stride() == (before.clone() if before.numel() else loaded).stride()


def test_numpys_orders_come_back() -> None:
    base = np.arange(120.0).reshape(2, 3, 4, 5)
    records = np.zeros((3, 4), [("a", "u1"), ("b", "<f4")])
    state = {
        "fortran": np.asfortranarray(base),
        "permuted": base.transpose(0, 3, 1, 2),
        "reversed": base.T[::-1, :, ::2],
        "field": records["b"].T,
        "swapped": np.asfortranarray(base).astype(">f8"),
        "plain": base,
        "scalar": np.array(3.0),
        "empty": np.zeros((0, 3), order="F"),
    }
    storage = MemoryStorage()
    save_job(storage, [{"state": state}])
    objects: dict[str, Any] = {"state": None}
    restore_part(storage, objects, ALONE)
    for key, value in state.items():
        after = objects["state"][key]
        assert np.array_equal(after, value)
        # As `copy` makes it where the order is to be kept.
        assert after.strides == value.copy(order="K").strides if value.size else not after.size


def test_live_arrays_keep_their_own_layout() -> None:
    stored, live = torch.randn(3, 4).T, torch.zeros(4, 3)
    storage = MemoryStorage()
    save_job(storage, [{"a": stored, "b": [live.T]}])
    other = torch.ones(3, 4)
    restore_part(storage, {"a": live, "b": [other]}, ALONE)
    assert torch.equal(live, stored)
    assert live.stride() == (3, 1)
    assert other.stride() == (4, 1)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_order_of_dimensions_is_kept_when_the_job_is_resharded(workers: int) -> None:
    whole = torch.randn(6, 1, 4, 5).to(memory_format=torch.channels_last)

    def shard(values: torch.Tensor, rank: int, of: int) -> Any:
        part = values.tensor_split(of)[rank]
        return hf.Shard(part, whole.shape, (sum(len(one) for one in values.tensor_split(of)[:rank]), 0, 0, 0))

    storage = MemoryStorage()
    save_job(storage, [{"shard": [shard(whole, rank, 2)], "same": [whole]} for rank in range(2)])
    for rank in range(workers):
        # What is expanded cannot be filled where it is: a new tensor is made.
        objects: dict[str, Any] = {"shard": [shard(torch.zeros(()).expand(whole.shape), rank, workers)], "same": [None]}
        restore_part(storage, objects, Worker(rank, workers))
        part = objects["shard"][0].tensor
        assert torch.equal(part, whole.tensor_split(workers)[rank])
        assert part.stride() == whole.stride()
        assert objects["same"][0].stride() == whole.stride()
    plain: dict[str, Any] = {"shard": [None], "same": [None]}
    restore_part(storage, plain, ALONE)
    for after in (plain["shard"][0], plain["same"][0]):
        assert torch.equal(after, whole)
        assert after.stride() == whole.stride()


@pytest.mark.parametrize("incremental", [False, True])
def test_a_change_of_the_layout_alone_is_kept(tmp_path: Path, incremental: bool) -> None:
    values = torch.randn(8, 1, 3, 3)
    many = {f"{place}": torch.randn(5, 1) for place in range(40)}
    state = {"w": values, "many": many}
    box: dict[str, Any] = {"state": state}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**box), incremental=incremental) as manager:
        manager.save(1).wait_committed()
        state["w"] = values.to(memory_format=torch.channels_last)
        # The same memory, seen with another stride where a length is 1.
        many["7"] = many["7"].as_strided((5, 1), (1, 5))
        manager.save(2).wait_committed()
    for step, strides, other in ((1, (9, 9, 3, 1), (1, 1)), (2, (9, 1, 3, 1), (1, 5))):
        empty: dict[str, Any] = {"state": {"w": None, "many": {}}}
        checkpoint = hf.Checkpoint(**empty)
        with hf.CheckpointManager(tmp_path, checkpoint) as manager:
            restored = manager.restore(step)
        assert restored is not None
        found = empty["state"]
        assert torch.equal(found["w"], values)
        assert found["w"].stride() == strides
        assert found["many"]["7"].stride() == other
        assert found["many"]["8"].stride() == (1, 1)


def strided_index() -> Index:
    storage = MemoryStorage()
    save_job(storage, [{"w": np.zeros((2, 3, 1), np.float32).T, "none": np.zeros((0, 3), np.int8)}])
    directory = "step-000000001.g0001"
    return decode_index(storage.read(f"{directory}/index-00000-of-00001.json", 1 << 20), path="")


@pytest.mark.parametrize(
    "records",
    [
        [("w", (1, 1))],
        [("w", (1, 1, 3, 1))],
        [("w", (1, 1, 1))],
        [("w", (6, 1, 4))],
        [("w", (6, 0, 3))],
        [("w", (1, -1, 3))],
        [("w", (-1, 1, 3))],
        [("w", (1 << 60, 1, 3))],
        [("w", (1, 1 << 62, 1 << 62))],
        [("none", (1, 1 << 63))],
        [("x", (1, 1, 3))],
        [("w", (1, 1, 3)), ("w", (1, 1, 3))],
    ],
)
def test_strides_that_reach_beyond_the_leaf_are_refused(records: list[tuple[str, tuple[int, ...]]]) -> None:
    index = strided_index()
    assert index.strides == (StridesRecord("w", (1, 1, 3)),)
    forged = msgspec.structs.replace(index, strides=tuple(StridesRecord(*record) for record in records))
    with pytest.raises(FormatError, match=r"strides|valid"):
        decode_index(seal(forged), path="index.json")
