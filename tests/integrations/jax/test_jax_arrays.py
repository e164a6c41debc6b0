"""Arrays of JAX: divided over devices and processes, saved in one division, back in another."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Before JAX is imported: one processor stands for several devices.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import holdfast as hf  # noqa: E402
import preloaded  # noqa: E402
from holdfast import errors  # noqa: E402
from holdfast.catalog import StoredRun  # noqa: E402
from holdfast.format.records import ALONE, Worker  # noqa: E402
from holdfast.integrations.jax.arrays import DTYPES, JaxSharder, fetch  # noqa: E402
from holdfast.restore.verify import open_step, verify_data  # noqa: E402
from holdfast.state import capture_objects  # noqa: E402
from holdfast.storage import LocalStorage  # noqa: E402
from holdfast.storage.memory import MemoryStorage  # noqa: E402
from holdfast.testing.processes import Workers, python  # noqa: E402
from places import PROGRAMS  # noqa: E402
from simulated_job import restore_part, save_job  # noqa: E402

Point = collections.namedtuple("Point", ["x", "y"])
hf.register_type(Point)


def placing(shape: tuple[int, ...], *axes: str | None) -> Any:
    names = ("a", "b")[: len(shape)]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return NamedSharding(Mesh(devices, names), PartitionSpec(*axes))


PLACINGS: list[tuple[tuple[int, ...], tuple[str | None, ...]]] = [
    ((4,), ("a",)),
    ((4,), (None, "a")),
    ((2, 2), ("a", "b")),
    ((2, 2), ("b", "a")),
    ((2, 2), (None, "b")),
    ((2, 2), ()),
    ((1,), ()),
]


@pytest.mark.parametrize("before", PLACINGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4])
def test_any_placing_goes_into_any_other(before: Any, dtype: Any) -> None:
    values = np.arange(32).reshape(4, 8)
    storage = MemoryStorage()
    array = jax.device_put(jnp.asarray(values, dtype), placing(before[0], *before[1]))
    save_job(storage, [{"x": array}])
    for shape, axes in PLACINGS:
        live = jax.device_put(jnp.zeros((4, 8), dtype), placing(shape, *axes))
        objects = {"x": live}
        restore_part(storage, objects, ALONE)
        found = objects["x"]
        assert found is not live
        assert (found.dtype, found.sharding) == (live.dtype, live.sharding)
        assert np.array_equal(np.asarray(found), np.asarray(array))
    plain = (
        {"x": np.zeros((4, 8), np.asarray(array).dtype)}
        if dtype not in (jnp.bfloat16, jnp.int4)
        else {"x": jnp.zeros((4, 8), dtype)}
    )
    restore_part(storage, plain, ALONE)
    assert np.array_equal(np.asarray(plain["x"]), np.asarray(array))


def test_trees_keep_their_containers_and_get_new_arrays() -> None:
    def tree(number: float) -> dict[str, Any]:
        shared = jnp.full((2,), number)
        return {
            "layers": [{"w": jnp.full((3, 2), number), "b": shared}, {"b": shared}],
            "point": Point(jnp.full((), number), (number, jnp.full((1,), number))),
            "host": np.full(2, number),
        }

    storage = MemoryStorage()
    save_job(storage, [{"state": tree(3.0)}])
    live = tree(0.0)
    layers, host = live["layers"], live["host"]
    restore_part(storage, {"state": live}, ALONE)
    assert live["layers"] is layers
    assert live["host"] is host
    for one, other in zip(jax.tree.leaves(live), jax.tree.leaves(tree(3.0)), strict=True):
        assert np.array_equal(one, other)
    assert isinstance(live["point"].x, jax.Array)
    assert layers[0]["b"] is layers[1]["b"]


class Counter:
    """An object that takes its state as a program of JAX's does."""

    def __init__(self, number: float) -> None:
        self.state: dict[str, Any] = {"n": jnp.asarray(number)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["n"], jax.Array)
        self.state = state


def test_objects_with_state_get_arrays() -> None:
    storage = MemoryStorage()
    save_job(storage, [{"counter": Counter(5), "own": hf.PerWorker(jnp.ones(2))}])
    counter, own = Counter(0), hf.PerWorker(jnp.zeros(2))
    restore_part(storage, {"counter": counter, "own": own}, ALONE)
    assert counter.state["n"] == 5
    assert isinstance(own.value, jax.Array)
    assert own.value.tolist() == [1, 1]


def test_arrays_of_one_process_are_replicas_in_a_job_of_several() -> None:
    storage = MemoryStorage()
    jobs = [{"x": jnp.arange(6.0), "own": hf.PerWorker({"key": jnp.array([rank])})} for rank in range(3)]
    manifest = save_job(storage, jobs)
    assert manifest.world_size == 3
    for rank in range(3):
        objects: dict[str, Any] = {"x": jnp.zeros(6), "own": hf.PerWorker({"key": jnp.array([-1])})}
        restore_part(storage, objects, Worker(rank, 3))
        assert objects["x"].tolist() == [0, 1, 2, 3, 4, 5]
        assert objects["own"].value["key"].tolist() == [rank]


def test_array_that_cannot_be_stored_is_refused_with_a_hint() -> None:
    with pytest.raises(errors.UnsupportedValueError, match="dtype key") as caught:
        capture_objects({"keys": hf.Shard(jax.random.split(jax.random.key(0), 2), (2,), (0,))})
    assert "key_data" in caught.value.hint


def assert_placed_as(found: Any, live: Any) -> None:
    assert (found.dtype, found.sharding, found.committed) == (live.dtype, live.sharding, live.committed)
    assert found.weak_type == live.weak_type


def test_what_the_program_has_not_put_on_a_device_stays_free() -> None:
    def make(number: float) -> dict[str, Any]:
        with jax.default_device(jax.devices()[2]):
            away = jnp.full((2,), number, jnp.bfloat16)
        return {
            "w": jax.device_put(jnp.full((8,), number, jnp.float32), placing((4,), "a")),
            "count": jnp.asarray(number, jnp.int32),
            "away": away,
            "fixed": jax.device_put(jnp.asarray(number), jax.devices()[1]),
        }

    step = jax.jit(lambda w, count: (w * 2, count + 1))
    storage = MemoryStorage()
    save_job(storage, [{"state": make(3)}])
    live = make(0)
    state = dict(live)
    restore_part(storage, {"state": state}, ALONE)
    for key, array in live.items():
        assert state[key] is not array
        assert_placed_as(state[key], array)
        assert np.all(np.asarray(state[key]) == 3)
    w, count = step(state["w"], state["count"])
    assert (w.tolist(), count) == ([6] * 8, 4)


@pytest.mark.parametrize("number", [0.1, 7, 2 + 1j])
@pytest.mark.parametrize("shape", [(), (8,)])
def test_weakly_typed_arrays_stay_so(number: complex, shape: tuple[int, ...]) -> None:
    explicit = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))

    def make(number: complex) -> dict[str, Any]:
        array = jnp.full(shape, number)
        axes = ("a",) if shape else ()
        return {
            "free": array,
            "divided": jax.device_put(array, placing((4,), *axes)),
            "explicit": jax.device_put(array, NamedSharding(explicit, PartitionSpec(*axes))),
            "strong": jnp.full(shape, number, array.dtype),
        }

    storage = MemoryStorage()
    save_job(storage, [{"state": make(number)}])
    live = make(0 * number)
    assert live["free"].weak_type
    state = dict(live)
    restore_part(storage, {"state": state}, ALONE)
    for key, array in live.items():
        assert_placed_as(state[key], array)
        assert np.all(np.asarray(state[key]) == np.asarray(jnp.asarray(number)))
    if isinstance(number, float):
        assert (jnp.ones(shape, jnp.bfloat16) - state["free"]).dtype == jnp.bfloat16


def test_weakly_typed_values_keep_their_bits() -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0xFF800000, 1], np.uint32)
    storage = MemoryStorage()
    save_job(storage, [{"x": jnp.asarray(bits.view(np.float32))}])
    objects = {"x": jnp.full((5,), 1.0)}
    restore_part(storage, objects, ALONE)
    assert objects["x"].weak_type
    assert np.asarray(objects["x"]).view(np.uint32).tolist() == bits.tolist()


def test_shared_array_is_restored_into_two_of_other_placements() -> None:
    same = jnp.arange(4.0)
    storage = MemoryStorage()
    save_job(storage, [{"state": {"free": same, "fixed": same, "free too": same}}])
    live = {key: jnp.zeros(4) for key in ("free", "fixed", "free too")}
    live["fixed"] = jax.device_put(live["fixed"], jax.devices()[1])
    state = dict(live)
    restore_part(storage, {"state": state}, ALONE)
    for key, array in live.items():
        assert_placed_as(state[key], array)
        assert state[key].tolist() == [0, 1, 2, 3]


def test_sharded_array_without_a_live_target_is_restored_whole() -> None:
    values = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    array = jax.device_put(values, placing((2, 2), "a", "b"))
    storage = MemoryStorage()
    save_job(storage, [{"x": array, "tree": {"w": array}}])
    objects: dict[str, Any] = {"x": None, "tree": None}
    restore_part(storage, objects, ALONE)
    for found in (objects["x"], objects["tree"]["w"]):
        assert isinstance(found, jax.Array)
        assert np.array_equal(np.asarray(found), values)
    host = np.zeros((4, 8), np.float32)
    objects = {"x": None, "tree": {"w": host}}
    restore_part(storage, objects, ALONE)
    assert np.array_equal(np.asarray(objects["x"]), values)
    assert np.array_equal(host, values)


def test_types_of_64_bits_are_never_cut() -> None:
    storage = MemoryStorage()
    with jax.enable_x64(True):
        values = {"n": jnp.asarray([2**40 + 1, 3]), "u": jnp.asarray([2**63], jnp.uint64), "f": jnp.asarray([1 / 3])}
        assert [array.dtype.name for array in values.values()] == ["int64", "uint64", "float64"]
        save_job(storage, [{"state": values}])
    for live in (None, dict(values)):
        with pytest.raises(errors.UnsupportedValueError, match=r"state/n: stored as int64.*disabled") as caught:
            restore_part(storage, {"state": live}, ALONE)
        assert "jax_enable_x64" in caught.value.hint
        with jax.enable_x64(True):
            objects = {"state": live}
            restore_part(storage, objects, ALONE)
            found = objects["state"]
            assert found is not None
            for key, array in values.items():
                assert found[key].dtype == array.dtype
                assert np.array_equal(found[key], array)
    host = {key: np.zeros(array.shape, array.dtype) for key, array in values.items()}
    restore_part(storage, {"state": host}, ALONE)
    assert host["n"].tolist() == [2**40 + 1, 3]


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in ("bool", "complex128")])
def test_every_type_comes_back(name: str) -> None:
    bits = np.array([0, 1, 1, 0, 1, 0, 0, 1] * 4, np.uint8)
    dtype = jnp.dtype(name)
    with jax.enable_x64(True):
        array = jnp.asarray(bits[: 4 * dtype.itemsize].view(dtype))
        storage = MemoryStorage()
        save_job(storage, [{"x": array}])
        for live in (None, jnp.zeros(4, dtype)):
            objects: dict[str, Any] = {"x": live}
            restore_part(storage, objects, ALONE)
            assert objects["x"].dtype == dtype
            assert np.asarray(objects["x"]).tobytes() == np.asarray(array).tobytes()


def test_complex_numbers_of_128_bits_go_from_one_library_to_the_other() -> None:
    values = np.array([1.5 - 2j, complex(-0.0, 1e300)])
    storage = MemoryStorage()
    with jax.enable_x64(True):
        save_job(storage, [{"x": jnp.asarray(values)}])
        assert restored(storage, None).tobytes() == values.tobytes()
    assert restored(storage, np.zeros(2, np.complex128)).tobytes() == values.tobytes()
    with pytest.raises(errors.UnsupportedValueError, match="stored as complex128"):
        restored(storage, None)


def restored(storage: MemoryStorage, live: Any) -> Any:
    objects = {"x": live}
    restore_part(storage, objects, ALONE)
    return np.asarray(objects["x"])


def test_a_shard_by_hand_is_restored_into_shards_and_arrays() -> None:
    def jobs(number: float) -> list[dict[str, Any]]:
        rows = np.arange(12.0, dtype=np.float32).reshape(4, 3) * number
        return [
            {
                "table": hf.Shard(jnp.asarray(rows[2 * rank : 2 * rank + 2]), (4, 3), (2 * rank, 0)),
                "tree": [hf.Shard(jax.device_put(rows, placing((2,), "a")), (4, 3), (0, 0), holders=(0, 1))],
            }
            for rank in range(2)
        ]

    values = np.arange(12.0).reshape(4, 3)
    storage = MemoryStorage()
    save_job(storage, jobs(1))
    for rank, objects in enumerate(jobs(0)):
        tree, live = objects["tree"], objects["tree"][0]
        restore_part(storage, objects, Worker(rank, 2))
        table = objects["table"]
        assert (type(table), table.global_shape, table.offsets) == (hf.Shard, (4, 3), (2 * rank, 0))
        assert np.array_equal(np.asarray(table.tensor), values[2 * rank : 2 * rank + 2])
        assert not table.tensor.committed
        assert objects["tree"] is tree
        assert tree[0].holders == (0, 1)
        assert_placed_as(tree[0].tensor, live.tensor)
        assert np.array_equal(np.asarray(tree[0].tensor), values)
    # Other parts than were saved, whole arrays, and the host's memory.
    objects = {"table": hf.Shard(jnp.zeros((3, 2)), (4, 3), (1, 1)), "tree": [jnp.zeros((4, 3))]}
    restore_part(storage, objects, ALONE)
    assert np.array_equal(np.asarray(objects["table"].tensor), values[1:, 1:])
    assert np.array_equal(np.asarray(objects["tree"][0]), values)
    objects = {"table": jax.device_put(jnp.zeros((4, 3)), placing((4,), "a")), "tree": [np.zeros((4, 3), np.float32)]}
    restore_part(storage, objects, ALONE)
    assert np.array_equal(np.asarray(objects["table"]), values)
    assert np.array_equal(objects["tree"][0], values)


def test_a_deleted_array_is_named() -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    divided = jax.device_put(jnp.zeros(8), placing((4,), "a"))
    free = jnp.zeros(8)
    shard = hf.Shard(jnp.zeros(8), (8,), (0,))
    for array in (divided, free, shard.tensor):
        step(array)
        assert array.is_deleted()
    key = jax.random.key(0)
    key.delete()
    for value in (divided, free, shard, key):
        with pytest.raises(errors.UnsupportedValueError, match="state/w: the array was deleted") as caught:
            capture_objects({"state": {"w": value}})
        assert "donated" in caught.value.hint


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys_come_back_as_keys(implementation: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        key = jax.random.key(seed, impl=implementation)
        return {"key": key, "keys": jax.device_put(jax.random.split(key, 8).reshape(4, 2), placing((4,), "a"))}

    saved, live = make(5), make(6)
    storage = MemoryStorage()
    save_job(storage, [{"state": saved, "own": hf.PerWorker(make(7)["key"])}])
    state = dict(live)
    own = hf.PerWorker(live["key"])
    restore_part(storage, {"state": state, "own": own}, ALONE)
    assert own.value == make(7)["key"]
    for name, key in live.items():
        assert (state[name].dtype, state[name].shape) == (key.dtype, key.shape)
        assert (state[name].sharding, state[name].committed) == (key.sharding, key.committed)
        assert jnp.array_equal(jax.random.key_data(state[name]), jax.random.key_data(saved[name]))
    assert np.array_equal(jax.random.normal(state["key"], (3,)), jax.random.normal(saved["key"], (3,)))
    # As its numbers it goes into what holds these, and where nothing stands.
    numbers: dict[str, Any] = {"key": jnp.zeros_like(jax.random.key_data(live["key"])), "keys": None}
    restore_part(storage, {"state": numbers, "own": own}, ALONE)
    for name, key in saved.items():
        assert np.array_equal(numbers[name], jax.random.key_data(key))
    other = jax.random.key(0, impl="rbg" if implementation == "threefry2x32" else "threefry2x32")
    with pytest.raises(errors.MismatchError, match="state/key: stored"):
        restore_part(storage, {"state": {**live, "key": other}, "own": own}, ALONE)


class Drawn:
    """An object that makes the key of its state whenever it is asked for it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        return {"key": jax.random.key(self.seed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = int(jax.random.key_data(state["key"])[-1])


def test_keys_that_live_for_a_moment_are_not_taken_for_each_other() -> None:
    count = 400
    storage = MemoryStorage()
    save_job(storage, [{str(seed): Drawn(seed) for seed in range(count)}])
    objects = {str(seed): Drawn(-1) for seed in range(count)}
    restore_part(storage, objects, ALONE)
    assert [one.seed for one in objects.values()] == list(range(count))


def run_processes(count: int, mode: str, directory: Path) -> None:
    """A job of JAX's distributed service, each process with a device of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"XLA_FLAGS": ""}
    with Workers(directory) as workers:
        for rank in range(count):
            program = PROGRAMS / "jax_processes.py"
            command = python(program, address, str(rank), str(count), mode, directory / "run")
            workers.start(command, environment, preloaded.JaxPopen)
        assert workers.wait(300) == [0] * count, "\n".join(map(workers.report, range(count)))


@pytest.mark.slow
def test_two_processes_save_and_three_or_one_restore(tmp_path: Path) -> None:
    run_processes(2, "save", tmp_path)
    storage = LocalStorage(tmp_path / "run")
    first, second = StoredRun(storage).look().living
    opened = [open_step(storage, name.directory, name) for name in (first, second)]
    assert not any(verify_data(storage, step) for step in opened)
    # Of the second step nothing was written but what had changed.
    assert [reference.name for reference in opened[1].manifest.references] == [first]
    # Here one process has all of the devices.
    objects = {name: jax.device_put(jnp.zeros((6, 12)), placing((2, 2), "b")) for name in ("rows", "columns", "both")}
    checkpoint = hf.Checkpoint(**objects, own=hf.PerWorker(np.zeros(3)), host=np.zeros(5), free=None)
    with hf.CheckpointManager(tmp_path / "run", checkpoint) as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 2
    for name, factor in (("rows", 2), ("columns", 1), ("both", 1)):
        assert np.array_equal(np.asarray(checkpoint[name]), factor * np.arange(72.0).reshape(6, 12))
    assert checkpoint["host"].tolist() == [7] * 5
    assert checkpoint["free"]["rate"] == 7
    run_processes(3, "restore", tmp_path)
    assert StoredRun(storage).look().living[-1].step == 3


@pytest.mark.slow
def test_two_processes_know_the_new_arrays_of_each_step(tmp_path: Path) -> None:
    run_processes(2, "plans", tmp_path)


@pytest.mark.slow
def test_two_processes_save_a_tree_and_others_load_it(tmp_path: Path) -> None:
    run_processes(2, "trees", tmp_path)
    assert len(list((tmp_path / "run").glob("step-*"))) == 1
    whole = jax.ShapeDtypeStruct((6, 12), jnp.float32, sharding=placing((2, 2), "b", "a"))
    found = hf.load(tmp_path / "run", like={"rows": whole, "host": None, "free": None})
    assert found["rows"].sharding == whole.sharding
    assert np.array_equal(found["rows"], 2 * np.arange(72.0).reshape(6, 12))


def test_a_loop_that_saves_what_it_began_with_is_warned(tmp_path: Path) -> None:
    """Arrays of JAX cannot be changed: what is trained has to be put into the checkpoint again and again."""
    warnings: list[str] = []

    def listen(event: hf.events.Event) -> None:
        if isinstance(event, hf.events.Warned):
            warnings.append(event.text)

    update = jax.jit(lambda array: array + 1)
    params, frozen = {"w": jnp.zeros(3)}, np.ones(2)
    options: dict[str, Any] = {"save_every": hf.Steps(1), "sinks": [listen]}
    with hf.resumable(tmp_path / "stale", params=params, frozen=frozen, **options) as run:
        for _ in run.steps(4):
            params = jax.tree.map(update, params)
    assert len(warnings) == 1
    assert warnings[0].startswith("params: the same immutable arrays are saved again")
    assert "checkpoint.params = params" in warnings[0]
    warnings.clear()
    for total in (3, 6):
        params = {"w": jnp.zeros(3)}
        with hf.resumable(tmp_path / "kept", params=params, frozen=frozen, **options) as run:
            params = run.checkpoint.params
            for _ in run.steps(total):
                params = run.checkpoint.params = jax.tree.map(update, params)
        assert params["w"].tolist() == [total] * 3
    assert warnings == []


ONE_SAVE = """
import sys, jax, jax.numpy as jnp, numpy as np, holdfast as hf
params, trained = {"w": jnp.zeros(3)}, sys.argv[2] == "trained"
listen = lambda event: isinstance(event, hf.events.Warned) and print(event.text)
with hf.resumable(sys.argv[1], params=params, save_every=hf.Steps(1000), sinks=[listen]) as run:
    for _ in run.steps(run.step + 4):
        params = jax.tree.map(lambda array: array + 1, params)
        if trained:
            run.checkpoint.params = params
"""


@pytest.mark.parametrize("ending", ["trained", "lost"])
def test_a_job_that_saves_once_is_warned_in_time(tmp_path: Path, ending: str) -> None:
    """Also where nothing of holdfast has met an array of JAX before: at its start, and after a restore."""
    for _ in range(2):
        job = [sys.executable, "-c", ONE_SAVE, str(tmp_path / ending), ending]
        printed = preloaded.run(
            job, preload=preloaded.JAX, check=True, capture_output=True, text=True, timeout=120
        ).stdout
        assert ("the same immutable arrays are saved again" in printed) == (ending == "lost")


def test_second_look_at_the_same_step_causes_no_warning(tmp_path: Path) -> None:
    warnings: list[hf.events.Event] = []

    def listen(event: hf.events.Event) -> None:
        warnings.extend([event] if isinstance(event, hf.events.Warned) else [])

    checkpoint = hf.Checkpoint(params={"w": jnp.zeros(3)})
    with hf.CheckpointManager(tmp_path / "by hand", checkpoint, sinks=[listen]) as manager:
        manager.save(3)  # What is saved first may stand for anything.
    with hf.CheckpointManager(tmp_path / "anew", checkpoint, sinks=[listen]) as manager:
        assert manager.restore() is None
        manager.save(0)
        checkpoint.params = {"w": jnp.ones(3)}
        for _ in range(2):
            manager.mark()
            manager.save(1, replace=True).wait_committed()
    with hf.resumable(tmp_path / "blocks", params=checkpoint.params, save_every=hf.Steps(1), sinks=[listen]) as run:
        for _ in run.steps(3):
            run.checkpoint.params = {"w": run.checkpoint.params["w"] + 1}
            with run.checkpointable():
                pass
    assert warnings == []


@dataclasses.dataclass
class Pair:
    one: Any
    two: Any


class Extra(torch.nn.Module):
    """A module that keeps more than tensors of torch."""

    def __init__(self, array: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.array = array

    def get_extra_state(self) -> Any:
        return {"array": self.array}

    def set_extra_state(self, state: Any) -> None:
        self.array = state["array"]


class Places(torch.utils.data.DataLoader[Any]):
    """A loader with a state of its own."""

    def __init__(self, array: Any) -> None:
        super().__init__(torch.utils.data.TensorDataset(torch.zeros(3)))
        self.array = array

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array = state["array"]


class Scaled(torch.optim.SGD):
    """An optimizer whose state has a form of its own."""

    def __init__(self, module: Extra, array: Any) -> None:
        super().__init__(module.parameters(), lr=0.1)
        self.array = array

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.array = state["array"]


def tree_of(make: Callable[[float], Any], number: float) -> dict[str, Any]:
    """Arrays in each kind of container."""
    return {
        "array": make(number),
        "list": [make(number), {"deep": (make(number), Point(make(number), 1))}],
        "deque": collections.deque([make(number)], maxlen=3),
        "ordered": collections.OrderedDict(one=make(number)),
        "default": collections.defaultdict(list, one=[make(number)]),
    }


def arrays_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, Pair):
        value = [value.one, value.two]
    elif isinstance(value, hf.Shard):
        return [value.tensor]
    if isinstance(value, list | tuple | collections.deque):
        return [array for part in value for array in arrays_in(part)]
    return [] if isinstance(value, int) else [value]


LIBRARIES: dict[str, Callable[[float], Any]] = {
    "jax": lambda number: jnp.full(3, number, jnp.float32),
    "numpy": lambda number: np.full(3, number, np.float32),
    "torch": lambda number: torch.full((3,), number),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_object_that_holds_state_gets_real_arrays(library: str, tmp_path: Path) -> None:
    make = LIBRARIES[library]
    kind = type(make(0.0))

    def objects_of(number: float) -> dict[str, Any]:
        model, weights = Extra(make(number)), Extra(make(number))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.param_groups[0]["scale"] = make(number)
        return {
            "tree": {**tree_of(make, number), "pair": Pair(make(number), {"deep": [make(number)]})},
            "own": hf.PerWorker([make(number)]),
            "shard": {"part": hf.Shard(make(number), [3], [0])},
            "model": model,
            "sgd": sgd,
            "scaled": Scaled(weights, make(number)),
            "loader": Places(make(number)),
        }

    def held_by(objects: dict[str, Any]) -> list[Any]:
        found = arrays_in([objects["tree"], objects["own"].value, objects["shard"]])
        scale = objects["sgd"].param_groups[0]["scale"]
        return [*found, scale, *(objects[name].array for name in ("model", "scaled", "loader"))]

    def check(objects: dict[str, Any]) -> None:
        assert [type(array) for array in held_by(objects)] == [kind] * 15
        assert all(array.tolist() == [5, 5, 5] for array in held_by(objects))

    for name in ("backup", "run"):
        for number in (5.0, 0.0):
            objects = objects_of(number)
            if name == "backup":
                with hf.WorkerTrainingState(tmp_path / name, hf.Checkpoint(**objects)) as state:
                    if state.restore() is None:
                        state.back_up(0)
            else:
                with hf.resumable(tmp_path / name, preemption="off", **objects) as run:
                    list(run.steps(1))
            check(objects)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_workspace_of_a_job_gets_real_arrays(library: str, tmp_path: Path) -> None:
    make = LIBRARIES[library]

    def make_job(epochs: int) -> hf.Job:
        with hf.Job() as job:

            @job.init_group
            def begin(workspace: hf.jobs.Workspace) -> None:
                workspace.update(tree_of(make, 0.0))

            @job.epoch_group
            def add(workspace: hf.jobs.Workspace) -> None:
                workspace["array"] = workspace["array"] + 1

        hf.epoch_limiter(job, epochs)
        return job

    def check(workspace: hf.jobs.Workspace, number: int) -> None:
        arrays = arrays_in(dict(workspace))
        assert [type(array) for array in arrays] == [type(make(0.0))] * 7
        assert [array.tolist() for array in arrays] == [[number] * 3] + [[0] * 3] * 6

    for epochs in (2, 4):  # The second run goes on from the first.
        manager = hf.MultiNodeCheckpointManager(tmp_path)
        with hf.LocalSession() as session:
            assert hf.JobRunner(make_job(epochs), manager).train(session) == epochs
            check(session.workspace(), epochs)
    with hf.LocalSession(["local"]) as session:
        runner = hf.JobRunner(make_job(4), hf.MultiNodeCheckpointManager(tmp_path))
        runner.load_blobs_from_checkpoints(tree_of(make, 0.0), 3, session)
        check(session.workspace(), 3)


def test_a_copy_from_devices_goes_through_their_pinned_memory() -> None:
    """What a save of arrays on a GPU calls; the devices here are parts of this processor, which have the same kinds of
    memory."""
    (sharding,) = JaxSharder().look([jnp.zeros(1)], str, ALONE)
    backend = sharding.backend
    values = np.arange(24).reshape(4, 6) % 7
    arrays: list[Any] = [jnp.asarray(values, kind) for kind in DTYPES if jnp.dtype(kind).itemsize < 8]
    arrays += [jnp.zeros((0, 3)), jnp.float32(2.5), jax.device_put(values, jax.devices()[3]), np.asfortranarray(values)]
    arrays += [jax.device_put(jnp.asarray(values, jnp.float32), placing((2, 2), "a", "b"))]
    arrays += [jax.device_put(arrays[0], arrays[0].sharding.with_memory_kind("pinned_host"))]
    expected = [np.asarray(array).tobytes() for array in arrays]
    offsets = [0, *itertools.accumulate(map(len, expected))]
    image = bytearray(offsets[-1])
    backend.copy_out(arrays, memoryview(image), offsets[:-1])
    assert bytes(image) == b"".join(expected)
    # Without pinned memory it would be the array's own memory.
    assert fetch(arrays[:1])[0].ctypes.data != arrays[0].unsafe_buffer_pointer()

    deleted = jnp.ones(4)
    deleted.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        backend.copy_out([deleted], memoryview(image), [0])
