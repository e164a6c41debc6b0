"""Arrays of JAX: divided over devices and processes, saved in one division, back in another."""

from __future__ import annotations

import collections
import os
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Before JAX is imported: one processor stands for several devices.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'holdfast[jax]'")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import holdfast as hf  # noqa: E402
from holdfast import errors  # noqa: E402
from holdfast.catalog import read_catalog  # noqa: E402
from holdfast.format.workers import ALONE, Worker  # noqa: E402
from holdfast.restore.verify import open_step, verify_data  # noqa: E402
from holdfast.state import capture_objects  # noqa: E402
from holdfast.storage import LocalStorage  # noqa: E402
from holdfast.storage.memory import MemoryStorage  # noqa: E402
from holdfast.testing.processes import Workers, python  # noqa: E402
from simulated_job import restore_part, save_job  # noqa: E402

ROOT = Path(__file__).parent.parent
Point = collections.namedtuple("Point", ["x", "y"])


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
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
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
        if dtype is not jnp.bfloat16
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


def test_what_cannot_be_stored_is_said() -> None:
    with pytest.raises(errors.UnsupportedValueError, match="dtype key") as caught:
        capture_objects({"key": jax.random.key(0)})
    assert "key_data" in caught.value.hint
    with pytest.raises(errors.UnsupportedValueError, match="dtype int4"):
        capture_objects({"x": jnp.zeros(2, jnp.int4)})


def run_processes(count: int, mode: str, directory: Path) -> None:
    """A job of JAX's distributed service, each process with a device of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    with Workers(directory) as workers:
        for rank in range(count):
            program = ROOT / "tests" / "jax_processes.py"
            workers.start(python(program, address, str(rank), str(count), mode, directory / "run"), environment)
        assert workers.wait(300) == [0] * count, "\n".join(map(workers.report, range(count)))


@pytest.mark.slow
def test_two_processes_save_and_three_or_one_restore(tmp_path: Path) -> None:
    run_processes(2, "save", tmp_path)
    storage = LocalStorage(tmp_path / "run")
    first, second = read_catalog(storage).living
    opened = [open_step(storage, name.directory, name) for name in (first, second)]
    assert not any(verify_data(storage, step) for step in opened)
    # Of the second step nothing was written but what had changed.
    assert [reference.name for reference in opened[1].manifest.references] == [first]
    # Here one process has all of the devices.
    objects = {name: jax.device_put(jnp.zeros((6, 12)), placing((2, 2), "b")) for name in ("rows", "columns", "both")}
    checkpoint = hf.Checkpoint(**objects, own=hf.PerWorker(np.zeros(3)), host=np.zeros(5))
    with hf.CheckpointManager(tmp_path / "run", checkpoint) as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 2
    for name, factor in (("rows", 2), ("columns", 1), ("both", 1)):
        assert np.array_equal(np.asarray(checkpoint[name]), factor * np.arange(72.0).reshape(6, 12))
    assert checkpoint["host"].tolist() == [7] * 5
    run_processes(3, "restore", tmp_path)
    assert read_catalog(storage).living[-1].step == 3


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
    assert warnings[0].startswith("params: the very arrays that were there before are saved again")
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
