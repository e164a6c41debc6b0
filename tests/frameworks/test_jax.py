"""Modules of Equinox and Flax, states of optax: saved, and restored into the structure that the program has."""

# What derives from a class of a framework, or is decorated by one, has types that mypy does not look at.
# mypy: disable-error-code="misc, untyped-decorator, call-arg"

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import freeze
from flax.training.train_state import TrainState
from lives import Life, check_same, live

import holdfast as hf
import preloaded
from holdfast import errors

PRELOAD = (*preloaded.HOLDFAST, *preloaded.JAX, "equinox", "flax.nnx", "optax", "holdfast.integrations.jax.nnx")


class Net(eqx.Module):
    """Functions stand among its layers, as in Equinox's own examples."""

    layers: list[Any]
    key: jax.Array
    size: int = eqx.field(static=True)

    def __init__(self, seed: int) -> None:
        key = jax.random.key(seed)
        self.layers = [eqx.nn.Linear(2, 4, key=key), jax.nn.relu, eqx.nn.MLP(4, 4, 4, 2, key=key), eqx.nn.Dropout(0.5)]
        self.key, self.size = jax.random.split(key, 3), 3


class Model(nnx.Module):
    """A parameter that stands twice, statistics, and streams of random numbers."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.first.kernel

    def __call__(self, inputs: Any) -> Any:
        return self.layers[0](self.dropout(self.norm(self.first(inputs))))


@struct.dataclass
class Record:
    """A dataclass of Flax with a part that is none of its state."""

    values: Any
    function: Any = struct.field(pytree_node=False)


TRANSFORMATION = optax.MultiSteps(
    optax.chain(
        optax.clip(1.0),
        optax.inject_hyperparams(optax.adamw)(learning_rate=optax.cosine_decay_schedule(1.0, 10)),
        optax.masked(optax.sgd(1.0, momentum=0.9), {"a": True, "b": False}),
    ),
    2,
)


def make_train_state(seed: int) -> Any:
    return TrainState.create(apply_fn=len, params={"w": jnp.full(3, float(seed))}, tx=TRANSFORMATION_OF_ONE)


TRANSFORMATION_OF_ONE = optax.adam(1e-3)

MAKERS: dict[str, Callable[[int], Any]] = {
    "equinox": Net,
    "equinox with state": lambda seed: (
        eqx.nn.make_with_state(eqx.nn.BatchNorm)(seed, axis_name="b", mode="ema")
        if seed == 3
        else eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="b", mode="ema")
    ),
    "optax": lambda seed: TRANSFORMATION.init({"a": jnp.full(3, float(seed)), "b": jnp.full(2, float(seed))}),
    "nnx": Model,
    "nnx state": lambda seed: nnx.state(Model(seed)),
    "nnx split": lambda seed: nnx.split(Model(seed)),
    "nnx optimizer": lambda seed: nnx.Optimizer(Model(seed), TRANSFORMATION_OF_ONE, wrt=nnx.Param),
    "linen": make_train_state,
    "record": lambda seed: Record({"x": jnp.full(2, float(seed))}, len),
    "frozen": lambda seed: freeze({"a": {"b": jnp.full(2, float(seed))}}),
}


def leaves_of(tree: Any) -> list[Any]:
    found = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in found
    ]


@pytest.mark.parametrize("name", MAKERS)
def test_a_tree_of_a_framework_comes_back(name: str, tmp_path: Path) -> None:
    saved, live = MAKERS[name](3), MAKERS[name](4)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(tree=saved)) as manager:
        manager.save(1).wait_committed()
    with hf.CheckpointManager(tmp_path, checkpoint := hf.Checkpoint(tree=live)) as manager:
        assert manager.restore() is not None
    found = checkpoint["tree"]
    assert type(found) is type(saved)
    assert leaves_of(found)
    for one, other in zip(leaves_of(found), leaves_of(saved), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_a_module_of_nnx_is_filled_where_it_is(tmp_path: Path) -> None:
    hf.save(tmp_path / "model", Model(3))
    live = Model(4)
    kernel = live.first.kernel
    assert hf.load(tmp_path / "model", like=live) is live
    assert live.first.kernel is live.tied is kernel
    inputs = jnp.ones((4, 2))
    assert np.array_equal(live(inputs), Model(3)(inputs))


def test_abstract_modules_are_enough(tmp_path: Path) -> None:
    hf.save(tmp_path / "nnx", Model(3))
    found = hf.load(tmp_path / "nnx", like=nnx.eval_shape(lambda: Model(0)))
    inputs = jnp.ones((4, 2))
    assert np.array_equal(found(inputs), Model(3)(inputs))
    net = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(3))
    hf.save(tmp_path / "equinox", net)
    like = eqx.filter_eval_shape(eqx.nn.MLP, 2, 2, 4, 1, key=jax.random.key(0))
    assert eqx.tree_equal(hf.load(tmp_path / "equinox", like=like), net)


@pytest.mark.parametrize("name", ["nnx", "equinox"])
def test_a_model_of_another_structure_is_refused_by_leaf(name: str, tmp_path: Path) -> None:
    key = jax.random.key(0)
    small, large = {
        "nnx": (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 4, rngs=nnx.Rngs(0))),
        "equinox": (eqx.nn.Linear(2, 3, key=key), eqx.nn.Linear(2, 4, key=key)),
    }[name]
    hf.save(tmp_path / "model", small)
    with pytest.raises(errors.MismatchError, match=r"tree/bias: stored \[3\], live \[4\]"):
        hf.load(tmp_path / "model", like=large)


def train(*options: str | Path) -> Life:
    return live("jax_loop.py", *options, preload=PRELOAD)


def test_killed_five_times_and_stopped_twice_it_ends_as_untouched(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201
    draw = random.Random(seed)
    untouched = train(tmp_path / "untouched")
    lives = []
    for number in draw.sample([signal.SIGKILL] * 5 + [signal.SIGTERM] * 2, 7):
        lives.append(Life("jax_loop.py", tmp_path / "other", preload=PRELOAD))
        lives[-1].wait_steps(draw.randint(2, 8))
        lives[-1].send(number)
        assert lives[-1].end() == (42 if number == signal.SIGTERM else -number), lives[-1].errors
    check_same([*lives, train(tmp_path / "other")], untouched)
