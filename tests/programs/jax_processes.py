"""One of the processes of a job of JAX's distributed service, which saves or restores arrays divided over all of them.

Two of them save; any number restores. `trees` saves and loads without a manager; `plans` saves new arrays at each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import holdfast as hf
from holdfast.format.records import Worker
from holdfast.state import CaptureCache, capture_objects

VALUES = np.arange(72, dtype=np.float32).reshape(6, 12)
"""Two processes and three can divide it, either way."""


def divide(values: Any, *axes: str | None) -> Any:
    placing = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec(*axes))
    return jax.make_array_from_callback(values.shape, placing, lambda index: values[index])


def make_free(number: int) -> dict[str, Any]:
    """What programs have beside divided arrays: a counter, a rate, keys."""
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec())
    return {
        "count": jnp.asarray(number, jnp.int32),
        "rate": jax.jit(lambda: jnp.asarray(float(number)), out_shardings=everywhere)(),
        "key": jax.random.key(number),
        "keys": jax.jit(lambda: jax.random.split(jax.random.key(number), 6), out_shardings=everywhere)(),
    }


def save(directory: str, rank: int) -> None:
    checkpoint = hf.Checkpoint(
        rows=divide(VALUES, "a"),
        columns=divide(VALUES, None, "a"),
        both=divide(VALUES),
        own=hf.PerWorker(np.full(3, float(rank))),
        host=np.full(5, 7.0),
        free=make_free(7),
    )
    with hf.CheckpointManager(directory, checkpoint, incremental=True, check_replicas=True) as manager:
        assert manager.worker.world_size == 2
        assert manager.restore() is None
        manager.save(1).wait_committed()
        checkpoint["rows"] = checkpoint["rows"] * 2
        manager.save(2).wait_committed()
        assert manager.steps() == (1, 2)
    # Back with the axes exchanged.
    zeros = np.zeros_like(VALUES)
    back = hf.Checkpoint(
        rows=divide(zeros, None, "a"),
        columns=divide(zeros),
        both=divide(zeros, "a"),
        own=hf.PerWorker(np.zeros(3)),
        host=np.zeros(5),
        free=make_free(0),
    )
    with hf.CheckpointManager(directory, back) as manager:
        assert manager.restore() is not None
    check(back, rows=2)
    assert back["own"].value.tolist() == [rank] * 3


def restore(directory: str) -> None:
    zeros = np.zeros_like(VALUES)
    checkpoint = hf.Checkpoint(
        rows=divide(zeros),
        columns=divide(zeros, "a"),
        both=divide(zeros, None, "a"),
        own=hf.PerWorker(np.full(3, -1.0)),
        host=np.zeros(5),
        free=make_free(0),
    )
    with hf.CheckpointManager(directory, checkpoint) as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 2
        check(checkpoint, rows=2)
        # There is no telling what that of two is to three.
        assert checkpoint["own"].value.tolist() == [-1] * 3
        manager.save(3).wait_committed()


def save_trees(directory: str, rank: int) -> None:
    tree = {"rows": divide(VALUES, "a"), "host": np.full(5, 7.0), "free": make_free(7)}
    hf.save(directory, tree)
    expect(hf.errors.StepExistsError, "already contains a tree", lambda: hf.save(directory, tree))
    hf.save(directory, {**tree, "rows": tree["rows"] * 2}, overwrite=True)
    columns = NamedSharding(tree["rows"].sharding.mesh, PartitionSpec(None, "a"))
    shape = jax.ShapeDtypeStruct(VALUES.shape, VALUES.dtype, sharding=columns)
    found = hf.load(directory, like={"rows": shape, "host": np.zeros(5), "free": make_free(0)})
    assert found["rows"].sharding == columns
    check_shards(found["rows"], 2)
    check_free(found["free"])
    assert np.array_equal(hf.load(directory)["rows"], 2 * VALUES)
    wrong = {"rows": jax.ShapeDtypeStruct((6, 6), VALUES.dtype)}
    expect(hf.errors.MismatchError, "tree/rows", lambda: hf.load(directory, like=wrong))
    # What is this process's own needs no other.
    own = f"{directory}-{rank}"
    hf.save(own, {"host": np.full(2, rank)}, cluster="alone")
    assert hf.load(own, cluster="alone")["host"].tolist() == [rank] * 2
    expect(hf.errors.UnsupportedValueError, "tree/rows", lambda: hf.save(f"{own}-part", tree, cluster="alone"))


def save_new_arrays(directory: str, rank: int) -> None:
    """Saves a tree whose arrays are others at each step, and looks at what is kept of it from save to save."""
    axes = [("a",), (None, "a"), ()]

    def make(step: int) -> dict[str, Any]:
        return {f"x{n}": divide(VALUES + step * n, *axes[n % 3]) for n in range(40)} | {"free": make_free(step)}

    checkpoint = hf.Checkpoint(tree=make(1))
    captures, worker = CaptureCache(), Worker(rank, 2)
    kept: list[Any] = []
    with hf.CheckpointManager(directory, checkpoint) as manager:
        for step in (1, 2, 3):
            checkpoint["tree"] = make(step)
            found = capture_objects({"tree": checkpoint["tree"]}, captures, worker=worker, check_replicas=True)
            fresh = capture_objects({"tree": checkpoint["tree"]}, worker=worker, check_replicas=True)
            assert (found.names, found.specs, found.boxes) == (fresh.names, fresh.specs, fresh.boxes)
            assert (found.replicas, found.elsewhere, found.objects) == (fresh.replicas, fresh.elsewhere, fresh.objects)
            for own, other in zip(found.arrays, fresh.arrays, strict=True):
                assert np.array_equal(own, other)
            kept.append(captures.trees["tree"])
            assert kept[0] is kept[-1]
            manager.save(step).wait_committed()
    back = hf.Checkpoint(tree=make(0))
    with hf.CheckpointManager(directory, back) as manager:
        assert manager.restore() is not None
    for number in range(40):
        for shard in back["tree"][f"x{number}"].addressable_shards:
            assert np.array_equal(shard.data, (VALUES + 3 * number)[shard.index])


def expect(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    told = ""
    try:
        call()
    except kind as error:
        told = str(error)
    assert words in told, told


def check_shards(array: Any, factor: int) -> None:
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), factor * VALUES[shard.index])


def check(checkpoint: hf.Checkpoint, rows: int) -> None:
    for name, factor in (("rows", rows), ("columns", 1), ("both", 1)):
        check_shards(checkpoint[name], factor)
    assert checkpoint["host"].tolist() == [7] * 5
    check_free(checkpoint["free"])
    # Before a restore this works, and so it must after it.
    jax.jit(lambda rows, free: (rows * free["rate"], free["count"] + 1))(checkpoint["rows"], checkpoint["free"])


def check_free(free: Any) -> None:
    for name, expected in make_free(7).items():
        found = free[name]
        assert (found.dtype, found.sharding, found.committed) == (expected.dtype, expected.sharding, expected.committed)
        if name in ("key", "keys"):
            found, expected = jax.random.key_data(found), jax.random.key_data(expected)
        assert found.weak_type == expected.weak_type
        assert np.array_equal(found, expected)


def main(address: str, rank: str, count: str, mode: str, directory: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=int(count), process_id=int(rank))
    assert jax.process_count() == int(count)
    if mode == "save":
        save(directory, int(rank))
    elif mode == "trees":
        save_trees(directory, int(rank))
    elif mode == "plans":
        save_new_arrays(directory, int(rank))
    else:
        restore(directory)
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
