"""Tensors on meshes: which boxes of them lie where, as torch itself divides them; saved on one mesh, back on another.

The ranks come one after the other, in one process, each with a process group that communicates with nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import holdfast as hf  # noqa: E402
import old_versions  # noqa: E402
from holdfast import errors  # noqa: E402
from holdfast.catalog import StoredRun  # noqa: E402
from holdfast.format.names import StepName  # noqa: E402
from holdfast.format.records import ALONE, Worker  # noqa: E402
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


def splits_uneven_strided_shards() -> bool:
    """Whether this torch divides a dimension that its strided shards do not divide evenly. Old ones refuse."""
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.zeros(3), 1, with_padding=False)
    except AssertionError:
        return False
    return True


UNEVEN = splits_uneven_strided_shards()


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
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    if not UNEVEN and any(isinstance(one, _StridedShard) for one in placements):
        pieces = math.prod(mesh_shape) * math.prod(getattr(one, "split_factor", 1) for one in placements)
        assume(all(size % pieces == 0 for size in shape))
    return mesh_shape, placements


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
    name = StepName(1, StoredRun(storage).open_generation())
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


def test_recreated_parts_on_a_mesh_keep_their_strides() -> None:
    whole = torch.randn(8, 3, 2, 5).to(memory_format=torch.channels_last)

    def part_of(values: Any, rank: int, workers: int) -> DTensor:
        mesh = DeviceMesh("cpu", torch.arange(workers))
        local, shape, strides = values.tensor_split(workers)[rank], whole.shape, values.stride()
        return DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=shape, stride=strides)

    storage = MemoryStorage()
    name, receipts = StepName(1, StoredRun(storage).open_generation()), []
    for rank in range(2):
        with being(Worker(rank, 2)):
            receipts.append(save_part(storage, {"w": part_of(whole, rank, 2)}, name, Worker(rank, 2)))
    commit_parts(storage, receipts, name)
    for workers in (1, 2, 4):
        for rank in range(workers):
            with being(Worker(rank, workers)):
                # What is expanded cannot be filled where it is.
                like = part_of(torch.zeros(()).expand(whole.shape), rank, workers)
                objects: dict[str, Any] = {"w": like}
                restore_part(storage, objects, Worker(rank, workers))
                made = objects["w"]
                assert made is not like
                assert torch.equal(made.to_local(), whole.tensor_split(workers)[rank])
                assert made.stride() == made.to_local().stride() == whole.stride()


def test_values_that_some_workers_hold_are_compared_among_them() -> None:
    def save(rank: int, value: float, *, is_row: bool = True) -> tuple[frozenset[str], str]:
        worker = Worker(rank, 4)
        with being(worker):
            row = [rank // 2 * 2, rank // 2 * 2 + 1]
            mesh = DeviceMesh("cpu", row if is_row else [[0, 1], [2, 3]])
            placements = [Shard(0)] if is_row else [Replicate(), Shard(0)]
            torch.manual_seed(1)
            model = torch.nn.Linear(3, 4)
            weight = distribute(torch.full((4, 3), value), mesh, placements)
            # To make a Parameter of it, torch would take the mesh of the rank before from a cache of its own.
            model._parameters["weight"] = weight
            model.register_buffer("plain", torch.ones(2))
            objects = {"model": model, "all": torch.ones(3), "own": hf.PerWorker(torch.ones(3))}
            captured = capture_objects(objects, worker=worker)
            receipts = save_part(MemoryStorage(), objects, StepName(1, 1), worker)
            assert bool(receipts.values) == bool(captured.loose)
            return captured.loose, receipts.values

    loose = frozenset({"model/weight", "model/plain", "model/bias"})
    saved = [save(rank, 1.0) for rank in range(4)]
    assert [names for names, _ in saved] == [loose] * 4
    # The bias and the buffer are replicas, of which one worker of a row writes more.
    assert [saved[0][1], saved[1][1]] == [saved[2][1], saved[3][1]]
    assert save(2, 2.0)[1] != saved[2][1]
    assert save(0, 1.0, is_row=False) == (frozenset(), "")


def test_values_that_are_still_to_be_added_up_are_refused() -> None:
    with being(Worker(0, 2)):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(errors.UnsupportedValueError, match="summed over") as caught:
            capture_objects({"x": tensor}, worker=Worker(0, 2))
        assert "redistribute" in caught.value.hint


def test_a_worker_alone_does_not_save_a_part() -> None:
    with being(Worker(0, 2)):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(errors.UnsupportedValueError, match="a job of one worker") as caught:
            capture_objects({"x": tensor})
        assert "cluster" in caught.value.hint


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x)) * self.scale


def divided() -> Any:
    net = Net()
    mesh = DeviceMesh("cpu", [0])
    fully_shard(net.up, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def leave_gathered(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not any(isinstance(one, DTensor) for one in (model.scale, model.down.weight)), "it has divided them again"


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_optimizer_state_has_the_names_of_a_module_left_gathered(
    order: tuple[str, str],
) -> None:
    old_versions.skip_without_fsdp_on_cpu()
    storage = MemoryStorage()
    name = StepName(1, StoredRun(storage).open_generation())
    with being(ALONE):
        objects = {"model": (model := divided()), "optimizer": (optimizer := torch.optim.AdamW(model.parameters()))}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        leave_gathered(model)
        receipts = save_part(storage, {key: objects[key] for key in order}, name, ALONE)
        commit_parts(storage, [receipts], name)
        values = {key: parameter.to_local().clone() for key, parameter in model.named_parameters()}
    with being(ALONE):
        model = divided()
        optimizer = torch.optim.AdamW(model.parameters())
        leave_gathered(model)
        objects = {"model": model, "optimizer": optimizer}
        restore_part(storage, {key: objects[key] for key in reversed(order)}, ALONE)
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter.to_local(), values[key])
            assert optimizer.state[parameter]["step"] == 1


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kept", ["model", "optimizer"])
def test_tensor_parallel_parameters_that_ddp_hides_are_refused(kept: str, has_run: bool) -> None:
    with being(Worker(0, 4)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = parallelize_module(Net(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = DistributedDataParallel(net, device_mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters())
        if has_run:
            model(torch.ones(2, 4))
        state = {"model": model, "optimizer": optimizer}[kept]
        with pytest.raises(errors.UsageError, match="replaced tensor-parallel"):
            capture_objects({kept: state}, worker=Worker(0, 4))


def test_ddp_over_a_part_of_a_mesh_is_as_it_always_is() -> None:
    with being(Worker(0, 4)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = DistributedDataParallel(Net(), device_mesh=mesh["dp"])
        model(torch.ones(2, 4))
        capture_objects({"optimizer": torch.optim.AdamW(model.parameters()), "model": model}, worker=Worker(0, 4))


# Wrappers that divide state in a form of their own.


def wrap(kind: str) -> dict[str, Any]:
    """Objects of real wrappers, and stand-ins with the names of those of packages that are not here."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return {"optimizer": ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW)}
    if not kind.startswith("FSDP1"):
        package, name = kind.split(" ")
        base = nn.Module if name.endswith("Engine") else object
        state = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
        wrapper = type(name, (base,), {"__module__": package} | (state if base is object else {}))
        return {"wrapped": {"one": type("Derived", (wrapper,), {})()}}
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=kind.endswith("parameters"))
    if "optimizer" in kind:
        return {"optimizer": torch.optim.AdamW(sharded.parameters())}
    return {"model": nn.Sequential(nn.ReLU(), sharded) if "within" in kind else sharded}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "path", "name", "hint"),
    [
        ("FSDP1", "model", "FullyShardedDataParallel", "fully_shard"),
        ("FSDP1 within", "model/1", "FullyShardedDataParallel", "fully_shard"),
        ("FSDP1 optimizer", "optimizer", "FullyShardedDataParallel", "fully_shard"),
        ("FSDP1 optimizer of the original parameters", "optimizer", "FullyShardedDataParallel", "fully_shard"),
        ("ZeroRedundancyOptimizer", "optimizer", "ZeroRedundancyOptimizer", "fully_shard"),
        ("deepspeed.runtime.engine DeepSpeedEngine", "wrapped/one", "DeepSpeedEngine", "save_checkpoint"),
        ("deepspeed.runtime.zero.stage3 DeepSpeedZeroOptimizer_Stage3", "wrapped/one", "DeepSpeedZero", "fully_shard"),
        ("megatron.core.optimizer.optimizer ChainedOptimizer", "wrapped/one", "ChainedOptimizer", "save_checkpoint"),
    ],
)
def test_wrappers_that_do_not_say_what_they_hold_are_refused_at_the_start(
    kind: str, path: str, name: str, hint: str
) -> None:
    with being(Worker(1, 2)):
        objects = wrap(kind)
        with pytest.raises(errors.UnsupportedValueError) as caught:
            hf.resumable(MemoryStorage(), cluster="alone", **objects)
        assert str(caught.value).startswith(f"{path}: ")
        assert name in str(caught.value)
        assert hint in caught.value.hint
        # What comes later is refused when it is saved or restored.
        with hf.CheckpointManager(MemoryStorage(), hf.Checkpoint(), cluster="alone") as manager:
            for added, value in objects.items():
                manager.checkpoint[added] = value
            with pytest.raises(errors.UnsupportedValueError, match=name):
                manager.save(1)
            with pytest.raises(errors.UnsupportedValueError, match=name):
                manager.restore()


def test_fully_sharded_module_is_not_refused_as_a_wrapper() -> None:
    with being(Worker(0, 2)):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        hf.CheckpointManager(
            MemoryStorage(), hf.Checkpoint(net=net, optimizer=torch.optim.AdamW(net.parameters())), cluster="alone"
        ).close()
