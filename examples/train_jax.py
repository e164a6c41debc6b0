"""Trains a small network with Flax and optax. Kill it at any moment and start it again: it resumes where it was.

python examples/train_jax.py
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import holdfast

STEPS = 20_000


class Network(nnx.Module):
    """Two layers that learn to add. Replace it by your own model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.output = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, numbers: Any) -> Any:
        """The sum of each row of numbers."""
        return self.output(self.dropout(nnx.relu(self.hidden(numbers))))[:, 0]


@nnx.jit
def train_step(model: Any, optimizer: Any, key: Any) -> tuple[Any, Any]:
    """Takes one step on numbers of the key's making; returns the loss, and the key of the next step."""
    key, own = jax.random.split(key)
    numbers = jax.random.normal(own, (32, 4))
    loss, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(numbers) - numbers.sum(1)) ** 2))(model)
    optimizer.update(model, gradients)
    return loss, key


def main(directory: str) -> None:
    """Trains, from the newest checkpoint in the directory if there is one."""
    model = Network(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adamw(0.01), wrt=nnx.Param)
    objects = {"model": model, "optimizer": optimizer, "key": jax.random.key(1)}
    with holdfast.resumable(directory, **objects, save_every=500, keep=3) as run:
        for step in run.steps(STEPS):  # the steps that remain
            # The model and its optimizer are filled where they are; a key cannot be changed, so it is put back.
            loss, run.checkpoint.key = train_step(model, optimizer, run.checkpoint.key)
            if step % 100 == 99:
                print(f"step {step + 1}: loss {loss:.6f}", flush=True)

    # One tree without a loop: the trained model, for another program, which needs no more of it than its shapes.
    holdfast.save(f"{directory}-model", model, overwrite=True)
    trained = holdfast.load(f"{directory}-model", like=nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
    trained.eval()
    print(f"1 + 2 + 3 + 4 = {trained(jnp.array([[1.0, 2.0, 3.0, 4.0]]))[0]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/jax")
