"""The live state and the training loop in JAX, with the tensors that the torch model has."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks.states.live import LiveState, view_arrays
from benchmarks.states.training import (
    BETA1,
    BETA2,
    DECAY,
    EPSILON,
    RATE,
    WARM_UP_STEPS,
    Training,
    first_arrays,
    first_batch,
    nothing,
)
from benchmarks.states.workloads import TRAINED, ModelSize, Workload, model_shapes


class JaxState(LiveState):
    """JAX arrays are never changed: each step makes new ones, and so does each restore.

    Attributes:
        arrays: By name.
    """

    def __init__(self, homes: Mapping[str, np.ndarray]) -> None:
        self.homes = homes
        self.arrays: dict[str, Any] = {}
        self.take()

    def take(self) -> None:
        """Makes new arrays."""
        self.forget()
        self.arrays = {name: jnp.array(home, copy=True) for name, home in self.homes.items()}
        jax.block_until_ready(self.arrays)

    def forget(self) -> None:
        """Lets the arrays go."""
        self.arrays = {}

    def shapes(self) -> dict[str, Any]:
        """Shapes and types of the arrays."""
        return {name: jax.ShapeDtypeStruct(home.shape, home.dtype) for name, home in self.homes.items()}

    def come_home(self) -> None:
        """Copies the arrays back."""
        for name, home in self.homes.items():
            home[...] = np.asarray(self.arrays[name])


def make_state(workload: Workload, memory: mmap.mmap) -> JaxState:
    """Arrays with the values in the given memory."""
    return JaxState(view_arrays(workload, memory))


class JaxTraining(Training[JaxState]):
    """One compiled function a step, which takes the state and gives a new one."""

    def __init__(self, scale: float) -> None:
        size = TRAINED.scaled(scale)
        self.state = JaxState(first_arrays(size))
        self._batch = jnp.asarray(first_batch(size))
        self._train = partial(jax.jit(_train, static_argnums=2, donate_argnums=0), size=size)
        for _ in range(WARM_UP_STEPS):
            self.step(nothing)

    def step(self, allow_update: Callable[[], object]) -> None:
        """Forward, backward and Adam are one function: the change of the state is not a part of its own."""
        allow_update()
        self.state.arrays = self._train(self.state.arrays, self._batch)
        jax.block_until_ready(self.state.arrays)


def _train(arrays: dict[str, Any], batch: Any, size: ModelSize) -> dict[str, Any]:
    names = [name for name, _ in model_shapes(size)]
    gradients = jax.grad(_loss)({name: arrays[name] for name in names}, batch, size)
    new = dict(arrays)
    for name, gradient in gradients.items():
        step = arrays[f"step/{name}"] + 1
        first = BETA1 * arrays[f"exp_avg/{name}"] + (1 - BETA1) * gradient
        second = BETA2 * arrays[f"exp_avg_sq/{name}"] + (1 - BETA2) * gradient**2
        change = (first / (1 - BETA1**step)) / (jnp.sqrt(second / (1 - BETA2**step)) + EPSILON)
        new[name] = arrays[name] * (1 - RATE * DECAY) - RATE * change
        new |= {f"step/{name}": step, f"exp_avg/{name}": first, f"exp_avg_sq/{name}": second}
    return new


def _loss(weights: dict[str, Any], tokens: Any, size: ModelSize) -> Any:
    def linear(x: Any, name: str) -> Any:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        middle = x - x.mean(-1, keepdims=True)
        scaled = middle / jnp.sqrt((middle**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    batch, length = tokens.shape
    heads = max(1, size.width // 64)
    x = weights["tokens.weight"][tokens] + weights["positions.weight"][:length]
    for layer in range(size.layers):
        block = f"blocks.{layer}."
        parts = linear(norm(x, f"{block}norm1"), f"{block}attend").reshape(batch, length, 3, heads, -1)
        seen = jax.nn.dot_product_attention(parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True)
        x = x + linear(seen.reshape(batch, length, size.width), f"{block}project")
        widened = jax.nn.gelu(linear(norm(x, f"{block}norm2"), f"{block}widen"), approximate=False)
        x = x + linear(widened, f"{block}narrow")
    logits = norm(x, "norm")[:, :-1] @ weights["tokens.weight"].T
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -found.mean()
