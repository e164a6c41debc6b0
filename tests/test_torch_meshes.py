"""Tensors on meshes: which boxes of them lie where, as torch itself divides them; saved on one mesh, back on another.

The ranks come one after the other, in one process, each with a process group that communicates with nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from holdfast import errors  # noqa: E402
from holdfast.catalog import open_generation  # noqa: E402
from holdfast.format.names import StepName  # noqa: E402
from holdfast.format.workers import ALONE, Worker  # noqa: E402
from holdfast.integrations.torch.meshes import find_boxes  # noqa: E402
from holdfast.restore.verify import open_step, verify_data  # noqa: E402
from holdfast.state import capture_objects  # noqa: E402
from holdfast.storage.memory import MemoryStorage  # noqa: E402
from simulated_job import commit_parts, restore_part, save_part  # noqa: E402


@contextmanager
def being(worker: Worker) -> Iterator[None]:
    dist.init_process_group("fake", rank=worker.rank, world_size=worker.world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def coordinate_of(rank: int, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(place[0]) for place in torch.unravel_index(torch.tensor([rank]), mesh_shape))


def local_part(whole: Any, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Any) -> Any:
    """What torch would give to one place of a mesh."""
    part = whole
    for parts, number, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if not placement.is_replicate():
            part = placement._split_tensor(part, parts, with_padding=False)[0][number]
    return part.clone()


MESHES = st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 1, 2)])


@st.composite
def placed(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    mesh_shape = draw(MESHES)
    kinds: list[st.SearchStrategy[Any]] = [st.just(Replicate())]
    if shape:
        dimensions = st.integers(0, len(shape) - 1)
        kinds.append(dimensions.map(Shard))
        kinds.append(st.builds(lambda dim, sf: _StridedShard(dim, split_factor=sf), dimensions, st.integers(1, 3)))
    return mesh_shape, tuple(draw(st.one_of(kinds)) for _ in mesh_shape)


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(st.data())
def test_boxes_are_where_torch_puts_the_values(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    mesh_shape, placements = data.draw(placed(shape))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for rank in range(math.prod(mesh_shape)):
        coordinate = coordinate_of(rank, mesh_shape)
        local = local_part(whole, mesh_shape, coordinate, placements)
        boxes = find_boxes(shape, mesh_shape, coordinate, placements)
        found = 0
        for box, place in boxes:
            here = local[(*map(slice, place.offsets, place.ends), ...)]
            there = whole[(*map(slice, box.offsets, box.ends), ...)]
            assert torch.equal(here, there)
            found += here.numel()
        assert found == local.numel()


def distribute(whole: Any, mesh: DeviceMesh, placements: Any) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = local_part(whole, tuple(mesh.shape), tuple(coordinate), placements)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def save_on_mesh(storage: Any, mesh_shape: tuple[int, ...], placements: Any, wholes: dict[str, Any]) -> None:
    world_size = math.prod(mesh_shape)
    name = StepName(1, open_generation(storage))
    receipts = []
    for rank in range(world_size):
        worker = Worker(rank, world_size)
        with being(worker):
            mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(mesh_shape))
            tensors = {key: distribute(whole, mesh, placements) for key, whole in wholes.items()}
            receipts.append(save_part(storage, {"tensors": tensors, "plain": torch.arange(3)}, name, worker))
    manifest = commit_parts(storage, receipts, name)
    opened = open_step(storage, name.directory, name)
    assert verify_data(storage, opened) == []
    assert manifest.world_size == world_size


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_any_mesh_goes_into_any_other(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    before, after = data.draw(placed(shape)), data.draw(placed(shape))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    whole = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    storage = MemoryStorage()
    save_on_mesh(storage, *before, {"w": whole})
    mesh_shape, placements = after
    world_size = math.prod(mesh_shape)
    for rank in range(world_size):
        worker = Worker(rank, world_size)
        with being(worker):
            mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(mesh_shape))
            tensor = distribute(torch.zeros_like(whole), mesh, placements)
            objects: dict[str, Any] = {"tensors": {"w": tensor}, "plain": torch.zeros(3, dtype=torch.int64)}
            restore_part(storage, objects, worker)
            assert objects["tensors"]["w"] is tensor
            coordinate = coordinate_of(rank, mesh_shape)
            assert torch.equal(tensor.to_local(), local_part(whole, mesh_shape, coordinate, placements))
            assert objects["plain"].tolist() == [0, 1, 2]
    plain = {"tensors": {"w": torch.zeros_like(whole)}, "plain": torch.zeros(3, dtype=torch.int64)}
    restore_part(storage, plain, ALONE)
    assert torch.equal(plain["tensors"]["w"], whole)


def test_values_that_are_still_to_be_added_up_are_refused() -> None:
    with being(Worker(0, 2)):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(errors.UnsupportedValueError, match="added up") as caught:
            capture_objects({"x": tensor}, worker=Worker(0, 2))
        assert "redistribute" in caught.value.hint


def test_a_worker_alone_does_not_save_a_part() -> None:
    with being(Worker(0, 2)):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(errors.UnsupportedValueError, match="a job of its own") as caught:
            capture_objects({"x": tensor})
        assert "cluster" in caught.value.hint
