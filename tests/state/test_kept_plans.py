"""What a job of several workers keeps from save to save, against looking at everything anew; real processes too."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import holdfast as hf  # noqa: E402
import old_versions  # noqa: E402
import preloaded  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast.format.records import Worker  # noqa: E402
from holdfast.integrations.torch.module_walks import (  # noqa: E402
    list_modules,
    list_named_parameters,
    list_parameters,
    read_state,
)
from holdfast.state import CaptureCache, Captured, capture_objects  # noqa: E402
from holdfast.state.capture_cache import LEAST_PARTS  # noqa: E402
from holdfast.testing.processes import Workers, python  # noqa: E402
from places import PROGRAMS  # noqa: E402
from repetitions import repeated  # noqa: E402

COUNT = LEAST_PARTS + 4
PATIENCE_SECONDS = 600.0


@contextmanager
def being(worker: Worker) -> Iterator[None]:
    """This process as one worker of several, which communicates with no other."""
    dist.init_process_group("fake", rank=worker.rank, world_size=worker.world_size, store=FakeStore())
    # Torch remembers tensors' meshes by what these equal, and with them the rank that an earlier worker had.
    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()
    try:
        yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("passing", torch.zeros(2), persistent=False)


class Job:
    """State as programs have it, and ways in which they change it between two saves."""

    def __init__(self, worker: Worker, source: random.Random) -> None:
        self.worker, self.source = worker, source
        self.meshes = [init_device_mesh("cpu", (worker.world_size,)), init_device_mesh("cpu", (1, worker.world_size))]
        self.module: Any = nn.Sequential(*(Block() for _ in range(8)))
        self.plain: Any = nn.Sequential(*(nn.Linear(2, 3) for _ in range(COUNT)))
        for block in self.module:
            fully_shard(block, mesh=self.meshes[0])
        self.optimizer = self.make_optimizer()
        self.objects: dict[str, Any] = {
            "model": self.module,
            "plain": self.plain,
            "optimizer": self.optimizer,
            "tree": {f"t{number}": self.fresh(number) for number in range(COUNT)},
            "states": {f"p{n}": {"step": n, "rate": n / 7, "mean": self.fresh(n)} for n in range(COUNT)},
            "values": [[number, str(number), (0.5, number), None, True] for number in range(COUNT)],
            "parts": [self.part(number) for number in range(COUNT)],
            "own": hf.PerWorker({f"o{number}": torch.ones(2) for number in range(COUNT)}),
        }

    def make_optimizer(self) -> Any:
        optimizer = torch.optim.AdamW(self.module.parameters())
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer

    def fresh(self, number: int) -> Any:
        if number % 4 == 0:
            return torch.full((3 + number % 3,), float(number))
        mesh = self.meshes[number % 4 == 3]
        placements: Any = [[Shard(0)], [Replicate()]][number % 4 == 2] if mesh.ndim == 1 else [Replicate(), Shard(0)]
        rows = (1, 5, 1200)[number % 3]
        return distribute_tensor(torch.full((rows, 70), float(number)), mesh, placements)

    def part(self, number: int) -> Any:
        rows = 2 + number % 2
        return hf.Shard(torch.ones(rows), (rows * self.worker.world_size,), (rows * self.worker.rank,))

    def capture(self, captures: CaptureCache | None, checks: bool) -> Captured | str:
        """What a capture gives, or the error that it raises."""
        try:
            return capture_objects(self.objects, captures, lambda *_: True, worker=self.worker, check_replicas=checks)
        except HoldfastError as error:
            return f"{type(error).__name__}: {error}"

    def change(self, kind: str) -> None:
        getattr(self, kind)()

    def pick(self, container: Any) -> Any:
        return self.source.choice(list(container))

    def nothing(self) -> None:
        pass

    def train(self) -> None:
        self.optimizer.step()

    def another_tensor(self) -> None:
        self.objects["tree"][self.pick(self.objects["tree"])] = self.fresh(self.source.randrange(99))

    def other_placement(self) -> None:
        name = self.pick(name for name, one in self.objects["tree"].items() if isinstance(one, DTensor))
        one = self.objects["tree"][name]
        mesh = self.pick(self.meshes)
        local = one._local_tensor.clone()
        self.objects["tree"][name] = DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def other_mesh_in_place(self) -> None:
        divided = (one for one in self.objects["tree"].values() if isinstance(one, DTensor))
        one = self.pick(one for one in divided if one.device_mesh.ndim == 1)
        one._spec = copy.copy(one._spec)
        one._spec.mesh = init_device_mesh("cpu", (self.worker.world_size,), mesh_dim_names=("other",))

    def placement_in_place(self) -> None:
        one = self.pick(one for one in self.objects["tree"].values() if isinstance(one, DTensor))
        one._spec.placements = (Replicate(),) * one.device_mesh.ndim

    def other_memory(self) -> None:
        one = self.pick([*self.plain.parameters(), *(one for one in self.objects["own"].value.values())])
        one.data = one.data.clone()

    def other_shape_in_place(self) -> None:
        one = self.pick(self.objects["own"].value.values())
        one.resize_(self.source.randrange(4))

    def set_in_place(self) -> None:
        one = self.pick(self.objects["own"].value.values())
        one.set_(torch.zeros(6, dtype=one.dtype)[::2] if self.source.random() < 0.5 else torch.zeros(2, 2))

    def freed_storage(self) -> None:
        one = self.pick(self.objects["own"].value.values())
        one.untyped_storage().resize_(self.source.choice([0, 2, 64]))

    def local_set_in_place(self) -> None:
        one = self.pick(one for one in self.objects["tree"].values() if isinstance(one, DTensor))
        one._local_tensor = one._local_tensor.t().contiguous().t()

    def alias(self) -> None:
        bank = self.objects[self.source.choice(["tree", "parts"])]
        keys = list(bank) if isinstance(bank, dict) else range(len(bank))
        bank[self.pick(keys)] = bank[self.pick(keys)]

    def alias_elsewhere(self) -> None:
        self.objects["tree"][self.pick(self.objects["tree"])] = self.pick(self.plain.parameters())

    def same_dict_twice(self) -> None:
        states = self.objects["states"]
        states[self.pick(states)] = states[self.pick(states)]

    def same_dict_in_two_objects(self) -> None:
        self.objects["again"] = self.objects["tree"]

    def counts_go_on(self) -> None:
        for state in self.objects["states"].values():
            state["step"] += 1

    def value_of_equal_look(self) -> None:
        state = self.pick(self.objects["states"].values())
        state[self.source.choice(["step", "rate"])] = self.source.choice(
            [0, False, 0.0, -0.0, 1, True, 1.0, float("nan")]
        )

    def value_in_a_list(self) -> None:
        row = self.pick(self.objects["values"])
        row[self.source.randrange(len(row))] = self.source.choice(
            ["x", 1 << 70, "\ud800", (0.0,), (-0.0,), b"x", {}, ()]
        )

    def longer_list(self) -> None:
        self.objects["values"].append(self.pick([1, [2], {"x": torch.ones(2)}]))

    def key_of_another_kind(self) -> None:
        states = self.objects["states"]
        states[self.source.choice(["$", 1, "a/b"])] = {"mean": self.fresh(1)}

    def other_part(self) -> None:
        number = self.source.randrange(COUNT)
        self.objects["parts"][number] = self.part(self.source.randrange(9))

    def part_in_place(self) -> None:
        part = self.pick(self.objects["parts"])
        ranks = range(self.worker.world_size)
        part.offsets, part.global_shape, part.holders = (0,), tuple(part.tensor.shape), tuple(ranks)

    def parameter_replaced(self) -> None:
        layer = self.pick(self.plain)
        layer.weight = nn.Parameter(torch.ones(2, self.source.randrange(1, 4)))

    def parameter_removed(self) -> None:
        self.pick(self.plain).bias = None

    def module_swapped(self) -> None:
        self.plain[self.source.randrange(COUNT)] = self.source.choice(
            [nn.Linear(2, 3), nn.Identity(), nn.BatchNorm1d(3)]
        )

    def module_tied(self) -> None:
        self.plain[self.source.randrange(COUNT)] = self.pick(self.plain)

    def parameter_tied(self) -> None:
        self.pick(self.plain).weight = self.pick(self.module).linear.weight

    def buffer_gone(self) -> None:
        self.pick(self.module).norm.running_mean = None

    def hook_added(self) -> None:
        added = torch.ones(3)

        def add(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[f"{prefix}added"] = added

        self.pick(self.plain)._register_state_dict_hook(add)

    def own_state_dict(self) -> None:
        layer, own = self.pick(self.plain), torch.ones(1)
        layer.state_dict = lambda *_, destination, prefix, **__: destination.update({f"{prefix}own": own})

    def group_added(self) -> None:
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def rate_changed(self) -> None:
        self.optimizer.param_groups[0]["lr"] = self.source.random()

    def state_loaded(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def optimizer_replaced(self) -> None:
        self.objects["optimizer"] = self.optimizer = self.make_optimizer()

    def object_gone(self) -> None:
        self.objects.pop(self.pick(["tree", "again"]), None)
        self.objects.setdefault("tree", {f"t{number}": self.fresh(number) for number in range(COUNT)})


TOOLS = {"make_optimizer", "fresh", "part", "capture", "change", "pick"}
CHANGES = [name for name in vars(Job) if not name.startswith("_") and name not in TOOLS]


def describe(captured: Captured | str) -> Any:
    """All that a capture says, with arrays by what they show."""
    if isinstance(captured, str):
        return captured
    found = {name: getattr(captured, name) for name in captured.__struct_fields__}
    found["arrays"] = [look(array) for array in captured.arrays]
    found["compared"] = [one and (one[0].name, look(one[1])) for one in captured.compared]
    return found


def look(array: Any) -> Any:
    return array.data_ptr(), array.shape, array.stride(), array.dtype


@settings(deadline=None, max_examples=repeated(60, in_gate=6))
@given(st.integers(0, 1 << 30), st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]))
def test_a_capture_is_as_if_nothing_was_kept(seed: int, at: tuple[int, int]) -> None:
    worker, source = Worker(*at), random.Random(seed)
    with being(worker):
        job, captures = Job(worker, source), CaptureCache()
        for _ in range(8):
            checks = source.random() < 0.5
            found = describe(job.capture(captures, checks))
            assert found == describe(job.capture(None, checks))
            job.change(source.choice(["nothing", "train", *CHANGES]))


@pytest.mark.parametrize("kind", CHANGES)
def test_each_change_shows_in_the_next_capture(kind: str) -> None:
    for at in ((0, 2), (1, 2)):
        with being(Worker(*at)):
            job, captures = Job(Worker(*at), random.Random(7)), CaptureCache()
            for _ in range(2):
                assert describe(job.capture(captures, False)) == describe(job.capture(None, False))
            for _ in range(3):
                job.change(kind)
                assert describe(job.capture(captures, True)) == describe(job.capture(None, True))


def test_what_is_as_it_was_is_taken_as_it_was() -> None:
    """The trees stay the same objects, also where memory moves and counts go on."""
    old_versions.skip_without_fsdp_on_cpu()
    with being(Worker(0, 2)):
        job, captures = Job(Worker(0, 2), random.Random(3)), CaptureCache()
        assert isinstance(first := job.capture(captures, False), Captured), first
        kept = dict(captures.trees)
        for change in (job.train, job.counts_go_on, job.other_memory, job.rate_changed):
            change()
            job.capture(captures, False)
        # What training keeps equal is known by its memory, which has moved for one of the modules.
        moved = {"own", "plain"}
        assert {path for path, tree in captures.trees.items() if tree is not kept[path]} <= moved
        assert kept.keys() >= {"model", "optimizer", "tree", "states", "values", "parts"}


class OddWalk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_modules(self, *_: Any, prefix: str = "", **__: Any) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self


class ExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return torch.ones(2)


def build_any(source: random.Random, depth: int, shared: list[nn.Module]) -> nn.Module:
    """A module of modules, in which some stand in several places."""
    makes: list[Callable[[], nn.Module]] = [
        *(lambda: nn.Linear(2, 3), lambda: nn.BatchNorm1d(3), Block, lambda: ExtraState(2, 2)),
        *(OddWalk, nn.ReLU, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
    ]
    outer = nn.Module()
    for number in range(source.randrange(1, 5)):
        if depth and source.random() < 0.5:
            child = build_any(source, depth - 1, shared)
        elif shared and source.random() < 0.3:
            child = source.choice(shared)
        else:
            child = source.choice(makes[: 4 if source.random() < 0.8 else None])()
        shared.append(child)
        outer.add_module(f"m{number}", child)
    if source.random() < 0.2:
        outer.register_module("none", None)
    if source.random() < 0.2:
        outer.register_parameter("tied", next(iter(shared[0].parameters()), None))
    return outer


@settings(deadline=None, max_examples=repeated(200, in_gate=60))
@given(st.integers(0, 1 << 30))
def test_modules_are_walked_as_torch_walks_them(seed: int) -> None:
    root = build_any(random.Random(seed), 3, [])
    modules = list_modules(root)
    assert [id(one) for one in modules] == [id(one) for one in root.modules()]
    assert [id(one) for one in list_parameters(modules)] == [id(one) for one in root.parameters()]
    expected = [(name, id(one)) for name, one in root.named_parameters()]
    assert [(name, id(one)) for name, one in list_named_parameters(modules)] == expected
    state, whole = read_state(modules), root.state_dict(keep_vars=True)
    assert list(state) == list(whole)
    assert all(state[name] is one or torch.equal(state[name], one) for name, one in whole.items())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["plain", "overlapped"])
def test_changes_between_saves_of_two_workers_come_back(tmp_path: Path, mode: str) -> None:
    old_versions.skip_without_fsdp_on_cpu()
    launch = [*python(PROGRAMS / "elastic.py", "kept_plans"), "2", "0", mode, tmp_path / "run"]
    with Workers(tmp_path) as workers:
        number = workers.start(launch, {"OMP_NUM_THREADS": "1"}, preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [number]) == [0], workers.report(number)
        assert sorted(one["ended"] for one in workers.records(number)) == [0, 1]
