"""A loop of Flax NNX, with batches from torch's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import torch
from flax import nnx
from torch.utils.data import DataLoader

from benchmarks.frameworks.fit import Clock, Fit, Samples
from benchmarks.frameworks.sizes import FitSize

# By name, so that it is imported before anything is measured, as Orbax is.
from holdfast import ResumableDataLoader, Steps, resumable


class FlaxFit(Fit):
    """`hf.resumable`, or Orbax' `CheckpointManager`."""

    def make(self, size: FitSize, steps: int, clock: Clock, every: int | None) -> Callable[[], object]:
        """The loop."""
        model = _Module(size)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
        data = Samples(size, steps)
        if self.way == "holdfast" and every is not None:
            loader = ResumableDataLoader(data, batch_size=size.batch, collate_fn=_collate)
            return lambda: self._train_resumably(model, optimizer, loader, clock, every)
        order = torch.Generator().manual_seed(0)
        plain = DataLoader(data, size.batch, shuffle=True, generator=order, collate_fn=_collate)
        if every is None:
            return lambda: _train(model, optimizer, plain, clock)
        return lambda: self._train_with_orbax(model, optimizer, plain, clock, every)

    def _train_resumably(self, model: Any, optimizer: Any, loader: Any, clock: Clock, every: int) -> None:
        kept = {"model": model, "optimizer": optimizer, "loader": loader}
        with resumable(self.directory / "run", **kept, save_every=Steps(every), quiet=True) as run:
            _train(model, optimizer, loader, clock, run.step, lambda _: run.finish_step())

    def _train_with_orbax(self, model: Any, optimizer: Any, loader: Any, clock: Clock, every: int) -> None:
        # As many as holdfast keeps.
        options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=3)
        with ocp.CheckpointManager(self.directory / "orbax", options=options) as manager:
            done = manager.latest_step() or 0
            if done:
                state = nnx.state((model, optimizer))
                nnx.update((model, optimizer), manager.restore(done, args=ocp.args.StandardRestore(state)))
            _train(
                model,
                optimizer,
                # Orbax keeps no place in the data: what was trained is loaded once more, and passed over.
                islice(loader, done, None),
                clock,
                done,
                lambda step: manager.save(step, args=ocp.args.StandardSave(nnx.state((model, optimizer)))),
            )


class _Frozen(nnx.Variable):
    """A variable that is not trained."""


class _Module(nnx.Module):
    def __init__(self, size: FitSize) -> None:
        rngs = nnx.Rngs(0)
        self.embedding = _Frozen(jnp.full((size.vocabulary, size.width), 0.5, jnp.float32))
        self.layers = nnx.List([nnx.Linear(size.width, size.width, rngs=rngs) for _ in range(size.layers)])

    def __call__(self, tokens: Any) -> Any:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = nnx.relu(layer(x)) + x
        return x


# With donation a step copies nothing of what it leaves as it is.
@partial(nnx.jit, donate_argnums=(0, 1))
def _step(model: _Module, optimizer: Any, tokens: Any, labels: Any) -> Any:
    def loss_of(model: _Module) -> Any:
        return jnp.square(model(tokens) - labels[:, None]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def _train(
    model: _Module,
    optimizer: Any,
    batches: Iterable[Any],
    clock: Clock,
    done: int = 0,
    finish_step: Callable[[int], object] = lambda _: None,
) -> None:
    for step, (tokens, labels) in enumerate(batches, done + 1):
        clock.begin_step()
        float(_step(model, optimizer, tokens, labels))
        clock.end_step(step)
        finish_step(step)


def _collate(samples: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    tokens, labels = zip(*samples, strict=True)
    return np.array(tokens), np.array(labels)
