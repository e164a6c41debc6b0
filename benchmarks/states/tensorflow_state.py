"""The live state and the training loop in TensorFlow, with the tensors that the torch model has."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from benchmarks.harness.contender import THREADS
from benchmarks.harness.timing import timed
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

# Before anything is computed: afterwards it cannot be changed any more.
tf.config.threading.set_intra_op_parallelism_threads(THREADS)
tf.config.threading.set_inter_op_parallelism_threads(THREADS)


class TensorFlowState(LiveState):
    """Variables, changed in place.

    Attributes:
        variables: By name.
    """

    def __init__(self, homes: Mapping[str, np.ndarray]) -> None:
        self.homes = homes
        self.variables = {name: tf.Variable(home) for name, home in homes.items()}

    def take(self) -> None:
        """Gives the variables the values."""
        for name, home in self.homes.items():
            self.variables[name].assign(home)

    def forget(self) -> None:
        """Sets the variables to zero."""
        for variable in self.variables.values():
            variable.assign(tf.zeros_like(variable))

    def come_home(self) -> None:
        """Copies the variables' values back."""
        for name, home in self.homes.items():
            home[...] = self.variables[name].numpy()


def make_state(workload: Workload, memory: mmap.mmap) -> TensorFlowState:
    """Variables with the values in the given memory."""
    return TensorFlowState(view_arrays(workload, memory))


class Update:
    """Changes all variables in place, as an optimizer does, by nothing: subtracts gradients times a rate of zero."""

    def __init__(self, state: TensorFlowState) -> None:
        variables = list(state.variables.values())
        gradients = {tuple(variable.shape): tf.zeros(variable.shape) for variable in variables}

        @tf.function  # type: ignore[untyped-decorator,unused-ignore]
        def update(rate: Any) -> None:
            for variable in variables:
                tf.raw_ops.ResourceApplyGradientDescent(
                    var=variable.handle, alpha=rate, delta=gradients[tuple(variable.shape)]
                )

        self._update = update
        self.seconds()

    def seconds(self) -> float:
        """**Blocks.** Does it once, and says how long it took."""
        return timed(lambda: self._update(tf.constant(0.0)))


class TensorFlowTraining(Training[TensorFlowState]):
    """One graph a step."""

    def __init__(self, scale: float) -> None:
        size = TRAINED.scaled(scale)
        self.state = TensorFlowState(first_arrays(size))
        self._batch = tf.constant(first_batch(size))
        self._train = _make_train(self.state.variables, size)
        for _ in range(WARM_UP_STEPS):
            self.step(nothing)

    def step(self, allow_update: Callable[[], object]) -> None:
        """Forward, backward and Adam are one graph: the change of the state is not a part of its own."""
        allow_update()
        self._train(self._batch)


def _make_train(variables: dict[str, Any], size: ModelSize) -> Callable[[Any], None]:
    weights = {name: variables[name] for name, _ in model_shapes(size)}

    @tf.function  # type: ignore[untyped-decorator,unused-ignore]
    def train(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = _loss(weights, batch, size)
        for name, gradient in tape.gradient(loss, weights).items():
            step = variables[f"step/{name}"].assign_add(1.0)
            tf.raw_ops.ResourceApplyAdam(
                var=weights[name].handle,
                m=variables[f"exp_avg/{name}"].handle,
                v=variables[f"exp_avg_sq/{name}"].handle,
                beta1_power=BETA1**step,
                beta2_power=BETA2**step,
                lr=RATE,
                beta1=BETA1,
                beta2=BETA2,
                epsilon=EPSILON,
                grad=tf.convert_to_tensor(gradient) + DECAY * weights[name],
            )

    return train  # type: ignore[no-any-return,unused-ignore]


def _loss(weights: dict[str, Any], tokens: Any, size: ModelSize) -> Any:
    def linear(x: Any, name: str) -> Any:
        return tf.matmul(x, weights[f"{name}.weight"], transpose_b=True) + weights[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    batch, length = tokens.shape
    heads = max(1, size.width // 64)
    x = tf.gather(weights["tokens.weight"], tokens) + weights["positions.weight"][:length]
    unseen = tf.constant(np.triu(np.full((length, length), -1e9, np.float32), 1))
    for layer in range(size.layers):
        block = f"blocks.{layer}."
        parts = tf.reshape(linear(norm(x, f"{block}norm1"), f"{block}attend"), (batch, length, 3, heads, -1))
        query, key, value = tf.unstack(tf.transpose(parts, (2, 0, 3, 1, 4)))
        weight = tf.matmul(query, key, transpose_b=True) / np.sqrt(size.width / heads) + unseen
        seen = tf.transpose(tf.matmul(tf.nn.softmax(weight), value), (0, 2, 1, 3))
        x += linear(tf.reshape(seen, (batch, length, size.width)), f"{block}project")
        x += linear(tf.nn.gelu(linear(norm(x, f"{block}norm2"), f"{block}widen")), f"{block}narrow")
    logits = tf.matmul(norm(x, "norm")[:, :-1], weights["tokens.weight"], transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits))
