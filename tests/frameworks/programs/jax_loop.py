"""Trains a module of Flax NNX and one of Equinox, and tells all that there is to tell of each step."""

# What derives from a class of a framework, or is decorated by one, has types that mypy does not look at.
# mypy: disable-error-code="misc, untyped-decorator, call-arg"

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import holdfast as hf


class Model(nnx.Module):
    """A parameter that stands twice, statistics, and streams of random numbers."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(2, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.first.kernel

    def __call__(self, inputs: Any) -> Any:
        """Its two layers, one after the other."""
        return self.layers[0](self.dropout(self.norm(self.first(inputs))))


TRANSFORMATION = optax.MultiSteps(
    optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 60))), 2
)


@nnx.jit
def step_nnx(model: Any, optimizer: Any, inputs: Any) -> Any:
    """One step of the module of Flax."""
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(inputs) ** 2))(model)
    optimizer.update(model, gradients)
    return loss


@eqx.filter_jit
def step_equinox(net: Any, state: Any, inputs: Any, key: Any) -> Any:
    """One step of the module of Equinox; gives what changes."""

    def loss_of(net: Any) -> Any:
        return jnp.mean(jax.vmap(net)(inputs) ** 2 * jax.random.uniform(key, (2,)))

    loss, gradients = eqx.filter_value_and_grad(loss_of)(net)
    updates, state = TRANSFORMATION.update(gradients, state, eqx.filter(net, eqx.is_inexact_array))
    return loss, eqx.apply_updates(net, updates), state


def digest(tree: Any) -> str:
    """A digest of all arrays in a tree."""
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            content.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
    return content.hexdigest()


def main(directory: str) -> None:
    """Trains for 60 steps, those of earlier processes included."""
    # Else each life would compile everything anew.
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    model = Model(1)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    net = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(2))
    objects = {
        "model": model,
        "optimizer": optimizer,
        "net": net,
        "state": TRANSFORMATION.init(eqx.filter(net, eqx.is_inexact_array)),
        "key": jax.random.key(3),
    }
    with hf.resumable(directory, **objects, save_every=hf.Steps(3), quiet=True) as run:
        kept = run.checkpoint
        for step in run.steps(60):
            kept.key, own = jax.random.split(kept.key)
            inputs = jax.random.normal(own, (4, 2))
            first = step_nnx(model, optimizer, inputs)
            second, kept.net, kept.state = step_equinox(kept.net, kept.state, inputs, own)
            found = digest([nnx.state(model), nnx.state(optimizer), kept.net, kept.state, kept.key])
            line = json.dumps({"step": step, "losses": [float(first), float(second)], "state": found})
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
