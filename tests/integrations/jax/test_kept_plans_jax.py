"""What is kept of JAX arrays from save to save, against looking at everything anew."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# Before JAX is imported: one processor stands for several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")

import jax.numpy as jnp  # noqa: E402
from jax.experimental.layout import Format, Layout  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

import holdfast as hf  # noqa: E402
from holdfast.errors import HoldfastError  # noqa: E402
from holdfast.format.records import Worker  # noqa: E402
from holdfast.state import CaptureCache, Captured, capture_objects  # noqa: E402
from holdfast.state.capture_cache import LEAST_PARTS  # noqa: E402
from repetitions import repeated  # noqa: E402

COUNT = LEAST_PARTS + 4


def mesh_of(order: list[int], shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return Mesh(np.array(jax.devices()[:4])[order].reshape(shape), names)


def list_placings() -> list[Any]:
    line, turned = mesh_of([0, 1, 2, 3], (4,), ("a",)), mesh_of([2, 0, 3, 1], (4,), ("a",))
    square = mesh_of([3, 2, 0, 1], (2, 2), ("a", "b"))
    devices = map(SingleDeviceSharding, jax.devices()[1:3])
    axes: list[tuple[Any, list[Any]]] = [
        *((line, ["a"]), (line, [None, "a"]), (line, []), (turned, ["a"])),
        *((square, ["b"]), (square, ["b", "a"]), (square, [])),
    ]
    return [*devices, *(NamedSharding(mesh, PartitionSpec(*names)) for mesh, names in axes)]


class Job:
    """Trees of arrays as programs of JAX have them, and ways in which they change them between two saves."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.placings = list_placings()
        self.donating = jax.jit(lambda one: one + 1, donate_argnums=0)
        self.objects: dict[str, Any] = {
            "plain": {f"p{number}": jnp.full((3, 2 + number % 3), float(number)) for number in range(COUNT)},
            "nested": {f"n{n}": {"kernel": self.fresh(n), "count": n, "bias": self.fresh(n + 1)} for n in range(COUNT)},
            "divided": [self.divide(self.fresh(number), number) for number in range(COUNT)],
            "keys": {"key": jax.random.key(1), "rest": [self.fresh(number) for number in range(COUNT)]},
            "own": hf.PerWorker({f"o{number}": self.fresh(number) for number in range(COUNT)}),
            "mixed": [[np.full(2, n), torch.full((2,), n), self.fresh(n)][n % 3] for n in range(COUNT)],
            "alone": self.fresh(1),
        }

    def fresh(self, number: int) -> Any:
        return jnp.full(((4, 8), (8,), (), (3, 0))[number % 4], float(number))

    def divide(self, array: Any, number: int) -> Any:
        for placing in (*self.placings[number % len(self.placings) :], *self.placings):
            try:
                return jax.device_put(array, placing)
            except ValueError:  # Its dimensions are too few, or do not go up in the mesh.
                continue
        return array

    def pick_tree(self) -> Any:
        trees = [value for name, value in self.objects.items() if name not in ("own", "alone")]
        trees += [self.objects["own"].value, self.objects["keys"]["rest"]]
        trees += [self.source.choice(list(self.objects["nested"].values())), self.objects["keys"]]
        return self.source.choice(trees)

    def pick(self, tree: Any) -> Any:
        """The place of an array in a tree that is not deleted."""
        places = list(tree) if isinstance(tree, dict) else range(len(tree))
        return self.source.choice([place for place in places if is_there(tree[place])] or [None])

    def replace(self, make: Callable[[Any], Any]) -> None:
        tree = self.pick_tree()
        place = self.pick(tree)
        if place is not None:
            tree[place] = make(tree[place])

    def capture(self, captures: CaptureCache | None, worker: Worker, checks: bool) -> Captured | str:
        """What a capture gives, or the error that it raises."""
        try:
            return capture_objects(self.objects, captures, worker=worker, check_replicas=checks)
        except HoldfastError as error:
            return f"{type(error).__name__}: {error}"

    def change(self, kind: str) -> None:
        getattr(self, kind)()

    def nothing(self) -> None:
        pass

    def train(self) -> None:
        """Puts a new array in place of each."""
        for name in ("plain", "nested", "divided", "keys"):
            self.objects[name] = jax.tree.map(renew, self.objects[name])

    def other_sharding(self) -> None:
        self.replace(lambda one: self.divide(one, self.source.randrange(99)))

    def other_mesh(self) -> None:
        mesh = mesh_of(self.source.sample(range(4), 4), (2, 2), ("c", "d"))
        self.replace(lambda one: jax.device_put(one, NamedSharding(mesh, PartitionSpec())))

    def other_type(self) -> None:
        dtype = self.source.choice([jnp.bfloat16, jnp.int4, jnp.int8, jnp.complex64, jnp.bool_, jnp.float16])
        self.replace(lambda one: one if is_key(one) else one.astype(dtype))

    def other_shape(self) -> None:
        self.replace(lambda _: self.fresh(self.source.randrange(4)))

    def same_elsewhere_in_memory(self) -> None:
        self.replace(lambda one: one.copy())

    def weak(self) -> None:
        self.replace(lambda _: jnp.asarray(2.0))

    def other_layout(self) -> None:
        layout = Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(jax.devices()[0]))
        part = self.objects["nested"][f"n{4 * self.source.randrange(COUNT // 4)}"]
        part["kernel"] = jax.device_put(jnp.zeros((4, 8)), layout)

    def of_numpy(self) -> None:
        self.replace(lambda _: np.arange(4.0))

    def of_torch(self) -> None:
        self.replace(lambda _: torch.arange(4.0))

    def a_value(self) -> None:
        self.replace(lambda _: self.source.choice([1, 0.5, "text", None, {}]))

    def a_shape(self) -> None:
        self.replace(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype))

    def key(self) -> None:
        self.replace(lambda _: jax.random.split(jax.random.key(3, impl="rbg"), 4))

    def numbers_of_a_key(self) -> None:
        keys = self.objects["keys"]
        if is_key(keys["key"]):
            keys["key"] = jax.random.key_data(keys["key"])

    def key_elsewhere(self) -> None:
        self.objects["alone"] = self.objects["keys"]["key"]

    def deleted(self) -> None:
        tree = self.pick_tree()
        if (place := self.pick(tree)) is not None:
            tree[place].delete()

    def donated(self) -> None:
        tree = self.pick_tree()
        place = self.pick(tree)
        if place is not None and not is_key(tree[place]):
            self.donating(tree[place])

    def renewed(self) -> None:
        """After arrays were deleted, as a program that goes on has others there."""
        self.__init__(self.source)  # type: ignore[misc]

    def alias(self) -> None:
        tree = self.pick_tree()
        if (place := self.pick(tree)) is not None:
            tree[self.pick(tree)] = tree[place]

    def alias_in_another_tree(self) -> None:
        tree = self.pick_tree()
        if (place := self.pick(tree)) is not None:
            self.replace(lambda _: tree[place])

    def alias_alone(self) -> None:
        tree = self.pick_tree()
        if (place := self.pick(tree)) is not None:
            self.objects["alone"] = tree[place]

    def another_view(self) -> None:
        """Another array of the same memory, which is not the same array."""
        tree = self.pick_tree()
        if (place := self.pick(tree)) is not None:
            self.replace(lambda _: jax.jit(lambda one: one)(tree[place]))

    def part_of_a_divided_one(self) -> None:
        tree = self.pick_tree()
        place = self.pick(tree)
        if place is not None and not is_key(tree[place]):
            self.replace(lambda _: tree[place].addressable_data(0))

    def shard(self) -> None:
        rows = jnp.ones((2, 3))
        self.replace(lambda _: hf.Shard(rows, (2, 3), (0, 0)))

    def longer(self) -> None:
        self.objects["divided"].append(self.fresh(0))


def is_there(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.is_deleted()


def is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def renew(value: Any) -> Any:
    return value.copy() if is_there(value) else value


TOOLS = {"fresh", "divide", "pick_tree", "pick", "replace", "capture", "change"}
CHANGES = [name for name in vars(Job) if not name.startswith("_") and name not in TOOLS]


def describe(captured: Captured | str) -> Any:
    """All that a capture says, with arrays by their values, also those at the addresses."""
    if isinstance(captured, str):
        return captured
    found = {name: getattr(captured, name) for name in captured.__struct_fields__}
    found["arrays"] = list(map(look, captured.arrays))
    sizes_bytes = [spec.size_bytes for spec in captured.specs]
    found["addresses"] = [
        address and ctypes.string_at(address, size)
        for address, size in zip(captured.addresses, sizes_bytes, strict=True)
    ]
    found["compared"] = [one and (one[0].name, look(one[1])) for one in captured.compared]
    return found


def look(array: Any) -> Any:
    values = np.asarray(array)
    return type(array), values.dtype, values.shape, values.tobytes()


def check(job: Job, captures: CaptureCache, worker: Worker, checks: bool) -> None:
    found = describe(job.capture(captures, worker, checks))
    assert found == describe(job.capture(None, worker, checks))


@settings(deadline=None, max_examples=repeated(60, in_gate=8))
@given(st.integers(0, 1 << 30), st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]))
def test_a_capture_is_as_if_nothing_was_kept(seed: int, at: tuple[int, int]) -> None:
    worker, source = Worker(*at), random.Random(seed)
    job, captures = Job(source), CaptureCache()
    for _ in range(8):
        check(job, captures, worker, source.random() < 0.5)
        job.change(source.choice(["nothing", "train", *CHANGES]))


@pytest.mark.parametrize("kind", CHANGES)
def test_each_change_shows_in_the_next_capture(kind: str) -> None:
    for at in ((0, 1), (1, 2)):
        job, captures = Job(random.Random(7)), CaptureCache()
        for _ in range(2):
            check(job, captures, Worker(*at), checks=False)
        for _ in range(3):
            job.change(kind)
            check(job, captures, Worker(*at), checks=True)


def test_new_arrays_of_each_step_are_taken_as_the_old_were() -> None:
    job, captures = Job(random.Random(3)), CaptureCache()
    job.train()  # JAX divides copies of arrays without elements otherwise than these were.
    assert isinstance(first := job.capture(captures, Worker(0, 2), checks=False), Captured), first
    kept = dict(captures.trees)
    assert kept.keys() >= {"plain", "nested", "divided", "keys", "own", "mixed"}
    for _ in range(3):
        job.train()
        check(job, captures, Worker(0, 2), checks=False)
    assert all(captures.trees[path] is tree for path, tree in kept.items())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_donated_after_a_capture_is_still_there(dtype: Any) -> None:
    """Captured by one thread and donated by another, or by the same after a save was cut off."""
    step = jax.jit(lambda tree: jax.tree.map(lambda one: one + 1, tree), donate_argnums=0)
    captures = CaptureCache()
    tree = {f"x{number}": jnp.full((64, 64), float(number), dtype) for number in range(COUNT)}
    for _ in range(3):
        captured = capture_objects({"tree": tree}, captures)
        expected = [np.asarray(array).tobytes() for array in captured.arrays]
        tree = jax.block_until_ready(step(tree))
        sizes_bytes = [spec.size_bytes for spec in captured.specs]
        places = zip(captured.addresses, sizes_bytes, strict=True)
        assert [ctypes.string_at(address, size) for address, size in places if address] == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("place", [0, 2], ids=["one-device", "divided"])
def test_a_step_that_donates_after_a_save_keeps_its_memory(dtype: Any, place: int, tmp_path: Path) -> None:
    """If the save still held an array, JAX would leave it as it is: the step would take fresh memory, which is slow."""
    placing = list_placings()[place]
    step = jax.jit(lambda tree: jax.tree.map(lambda one: one + 1, tree), donate_argnums=0)
    tree = {f"x{number}": jax.device_put(jnp.full((64, 64), number, dtype), placing) for number in range(COUNT)}

    def find_memory() -> list[int]:
        arrays = jax.block_until_ready(list(tree.values()))
        return [shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards]

    with hf.CheckpointManager(tmp_path, hf.Checkpoint(tree=tree)) as manager:
        for number in range(1, 6):
            tree.update(step(tree))
            before = find_memory()
            manager.save(number)
            tree.update(step(tree))
            assert find_memory() == before
    # What was saved is what was there before the step that wrote over it.
    restored = {name: jax.device_put(jnp.zeros((64, 64), dtype), placing) for name in tree}
    hf.CheckpointManager(tmp_path, hf.Checkpoint(tree=restored)).restore()
    for number, array in enumerate(restored.values()):
        assert np.array_equal(np.asarray(array, np.float32), np.full((64, 64), number + 9.0))
