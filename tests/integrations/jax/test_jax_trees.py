"""One tree without a loop, and nodes of trees that programs make known to JAX."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Before JAX is imported: one processor stands for several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import holdfast as hf  # noqa: E402
from command_line import call  # noqa: E402
from holdfast import errors  # noqa: E402


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node that names neither its parts nor what it keeps for itself."""

    def __init__(self, first: Any, second: Any, function: Any = None) -> None:
        self.first, self.second, self.function = first, second, function

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.first, self.second), self.function

    @classmethod
    def tree_unflatten(cls, function: Any, parts: Any) -> Pair:
        first, second = parts
        return cls(first, second, function)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "activate"], meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Layer:
    """A node with a function among its parts, as modules of Equinox have."""

    w: Any
    activate: Any
    size: int


def divided(*axes: str | None) -> Any:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b")), PartitionSpec(*axes))


def make_tree(number: int) -> dict[str, Any]:
    return {
        "w": jax.device_put(jnp.full((8, 4), float(number)), divided("a", "b")),
        "half": jnp.full(4, number, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(number), 4),
        "host": np.arange(number),
        "torch": torch.full((2, 2), float(number)),
        "layers": [Layer(jnp.full(2, float(number)), jnp.tanh, number), (number, None, "text")],
        "pair": Pair({"x": Pair(jnp.full(3, float(number)), number, len)}, [jnp.full((), number)], print),
    }


def test_a_tree_comes_back_as_numpy_arrays_where_nothing_says_more(tmp_path: Path) -> None:
    hf.save(tmp_path / "tree", make_tree(3))
    found = hf.load(tmp_path / "tree")
    assert {type(found[name]) for name in ("w", "half", "keys", "host", "torch")} == {np.ndarray}
    assert found["w"].tolist() == [[3.0] * 4] * 8
    assert found["half"].dtype.name == "bfloat16"
    assert found["layers"][0]["w"].tolist() == [3.0, 3.0]
    assert found["layers"][1] == (3, None, "text")
    assert found["pair"]["0"]["x"]["0"].tolist() == [3.0] * 3


def test_a_tree_comes_back_as_shapes_with_shardings_ask(tmp_path: Path) -> None:
    tree = make_tree(3)
    hf.save(tmp_path / "tree", tree)
    placing = divided("b", "a")

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placing if leaf.ndim == 2 else divided())

    like = jax.tree.map(abstract, {**tree, "host": np.zeros(3, int), "torch": torch.zeros(2, 2)})
    found = hf.load(tmp_path / "tree", like=like)
    assert found["w"].sharding == placing
    assert found["keys"].dtype == tree["keys"].dtype
    assert found["keys"].sharding.is_equivalent_to(divided(), 1)
    assert np.array_equal(jax.random.key_data(found["keys"]), jax.random.key_data(tree["keys"]))
    assert np.array_equal(found["w"], tree["w"])
    assert found["layers"][0].activate is jnp.tanh
    assert found["layers"][0].size == 3
    assert (found["pair"].function, found["pair"].first["x"].function) == (print, len)
    assert found["pair"].first["x"].first.tolist() == [3.0] * 3
    assert found["torch"].tolist() == [[3.0, 3.0]] * 2
    # What says how it is to be stays as it is.
    assert like["host"].tolist() == [0, 0, 0]
    assert like["torch"].tolist() == [[0.0, 0.0]] * 2
    assert isinstance(like["w"], jax.ShapeDtypeStruct)


def test_shape_given_twice_becomes_two_arrays(tmp_path: Path) -> None:
    hf.save(tmp_path / "tree", {"a": jnp.zeros(2), "b": jnp.ones(2)})
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    found = hf.load(tmp_path / "tree", like={"a": shape, "b": shape})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0, 0], [1, 1])


def test_a_tree_is_saved_over_another_only_when_asked(tmp_path: Path) -> None:
    place = tmp_path / "tree"
    hf.save(place, {"w": np.zeros(3)})
    with pytest.raises(errors.StepExistsError, match="already contains a tree"):
        hf.save(place, {"w": np.ones(3)})
    assert hf.load(place)["w"].tolist() == [0, 0, 0]
    hf.save(place, {"w": np.ones(3)}, overwrite=True)
    assert hf.load(place)["w"].tolist() == [1, 1, 1]
    assert len(list(place.glob("step-*"))) == 1
    for verb in ("list", "show", "verify"):
        assert call(verb, str(place)).exit_code == 0


def test_a_run_is_read_as_a_dict_and_never_saved_over(tmp_path: Path) -> None:
    objects = {"params": {"w": jnp.ones(2)}, "other": [1]} | {f"more-{number}": number for number in range(9)}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**objects)) as manager:
        manager.save(7).wait_committed()
    found = hf.load(tmp_path)
    assert list(found) == list(objects)
    assert (found["params"]["w"].tolist(), found["other"]) == ([1, 1], [1])
    one = hf.load(tmp_path, like={"params": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}})
    assert list(one) == ["params"]
    assert isinstance(one["params"]["w"], jax.Array)
    with pytest.raises(errors.UsageError, match="contains a run"):
        hf.save(tmp_path, {}, overwrite=True)
    with pytest.raises(errors.UsageError, match=r"a dict of some of its objects: more-0.*, other, params"):
        hf.load(tmp_path, like=[1])


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jax.ShapeDtypeStruct((8, 5), jnp.float32)}, r"tree/w: stored \[8, 4\], live \[8, 5\]"),
        ({"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}, "tree/w: stored F32, live BF16"),
        ({"w": jnp.zeros((8, 4)), "v": jnp.zeros(1)}, "missing from the checkpoint: tree/v"),
        ({"w": np.zeros(0, np.float32)}, r"tree/w: stored \[8, 4\], live \[0\]"),
        ({"w": Pair(jnp.zeros(1), 2)}, "tree/w: stored an array, live a Pair"),
    ],
)
def test_tree_that_does_not_fit_is_refused_by_leaf(like: Any, message: str, tmp_path: Path) -> None:
    hf.save(tmp_path / "tree", {"w": jnp.ones((8, 4))})
    with pytest.raises(errors.MismatchError, match=message) as caught:
        hf.load(tmp_path / "tree", like=like)
    assert "`like` must have the structure of all that is stored there" in caught.value.hint


def test_tree_that_cannot_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.NoCheckpointError, match="contains no checkpoint"):
        hf.load(tmp_path / "nothing")
    with pytest.raises(errors.UnsupportedValueError, match="tree/w: a shape without values"):
        hf.save(tmp_path / "shape", {"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(errors.UnsupportedValueError, match=r"tree/f: a function cannot be stored"):
        hf.save(tmp_path / "function", {"f": make_tree})
    hf.save(tmp_path / "tree", {"w": jnp.ones(3)})
    uneven = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=divided("a"))
    with pytest.raises(errors.UnsupportedValueError, match=r"tree/w: an array of float32\[3\] cannot be sharded"):
        hf.load(tmp_path / "tree", like={"w": uneven})
    with pytest.raises(errors.UsageError, match="overwrite must be True or False, got 1"):
        hf.save(tmp_path / "tree", {}, overwrite=1)  # type: ignore[arg-type]


def test_damage_is_found_when_a_tree_is_loaded(tmp_path: Path) -> None:
    hf.save(tmp_path / "tree", {"w": np.ones(100)})
    (data,) = (tmp_path / "tree").glob("step-*/data-*")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(errors.NoWholeCheckpointError):
        hf.load(tmp_path / "tree")


def test_a_restore_makes_what_shapes_ask_for(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(params=make_tree(3), epoch=4)) as manager:
        manager.save(1).wait_committed()
    checkpoint = hf.Checkpoint(epoch=0)
    like = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=divided("b"))}
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        with pytest.raises(errors.UsageError, match="got a list"):
            manager.restore(like=[])  # type: ignore[arg-type]
        with pytest.raises(errors.MismatchError, match="only in the checkpoint: params"):
            manager.restore()
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        restored = manager.restore(like={"params": like}, strict=False)
        assert restored is not None
        assert restored.differences.extra
        manager.save(2).wait_committed()
    assert checkpoint["epoch"] == 4
    assert checkpoint["params"]["w"].sharding == divided("b")
    assert np.array_equal(checkpoint["params"]["w"], make_tree(3)["w"])


def test_nodes_are_restored_into_the_structure_that_the_program_has(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(node=make_tree(3)["pair"])) as manager:
        manager.save(1).wait_committed()
    live = make_tree(5)["pair"]
    inner = live.first
    with hf.CheckpointManager(tmp_path, checkpoint := hf.Checkpoint(node=live)) as manager:
        manager.restore()
    node = checkpoint["node"]
    assert type(node) is Pair
    assert (node.first["x"].first.tolist(), node.first["x"].second) == ([3.0] * 3, 3)
    assert node.first["x"].function is len
    assert inner["x"].first.tolist() == [5.0] * 3
    other = Layer(jnp.zeros(2), jnp.sin, 1)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(node=other)) as manager:
        with pytest.raises(errors.MismatchError, match="node: stored a Pair, live a Layer"):
            manager.restore()
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(node=None)) as manager:
        with pytest.raises(errors.UnsupportedValueError, match="Pair is stored, and can be restored only into one"):
            manager.restore()


def test_a_tree_takes_arrays_of_another_shape_or_type(tmp_path: Path) -> None:
    """As of torch and NumPy: what is stored counts. Arrays that are divided, and typed keys, must fit."""
    keys = jax.random.split(jax.random.key(1), 3)

    def make(later: bool) -> dict[str, Any]:
        on = jax.devices()[2]
        return {
            "grown": jnp.arange(3.0) if later else jnp.zeros(0),
            "list": [jnp.arange(5) if later else jnp.zeros(2, jnp.int8)],
            "placed": jax.device_put(jnp.ones(6) if later else jnp.zeros(2), on),
            "everywhere": jax.device_put(
                jnp.ones(6 if later else 2), NamedSharding(Mesh(jax.devices(), "a"), PartitionSpec())
            ),
            "was_numpy": jnp.ones(4) if later else np.zeros(2, np.float32),
            "is_numpy": np.ones(4) if later else jnp.zeros(2, jnp.float32),
        }

    with hf.CheckpointManager(tmp_path, hf.Checkpoint(tree=make(True), keys={"key": keys[0]})) as manager:
        manager.save(1).wait_committed()
    tree = make(False)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(tree=tree, keys={"key": keys[1]})) as manager:
        restored = manager.restore()
    assert restored is not None
    assert sorted(text.partition(" ")[0] for text in restored.differences.replaced) == [
        *("tree/everywhere", "tree/is_numpy", "tree/list/0", "tree/placed", "tree/was_numpy")
    ]
    saved = make(True)
    assert tree["list"][0].dtype == saved["list"][0].dtype
    for name in saved.keys() - {"list"}:
        assert np.array_equal(tree[name], saved[name])
        assert tree[name].dtype == saved[name].dtype
    for name in ("placed", "everywhere"):
        assert tree[name].sharding == saved[name].sharding
    pieces = {"tree": {**make(False), "grown": jax.device_put(jnp.zeros(8), divided("a"))}, "keys": {"key": keys}}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(**pieces)) as manager:
        with pytest.raises(errors.MismatchError) as caught:
            manager.restore()
    assert "tree/grown: stored [3], live [8]" in str(caught.value)
    assert "keys/key: stored [2], live [3, 2]" in str(caught.value)
