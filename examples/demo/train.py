"""Trains a small GPT on the source of Python's standard library. Kill it at any moment and start it again: it goes on.

PYTHONPATH=examples python -m demo.train runs/gpt
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import holdfast
from demo.corpus import VOCABULARY, Excerpts, read_text
from demo.model import GPT
from demo.reports import Settings
from holdfast.events import Sink
from holdfast.integrations.torch.loader import ResumableDataLoader

BATCHES_IN_EPOCH = 50


@dataclass
class History:
    """What has happened so far: the loss of each step, and the numbers of the excerpts that it was taught."""

    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)


@dataclass
class Trained:
    """What training has made."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    history: History


def train(
    settings: Settings,
    directory: Path | None,
    after_step: Callable[[History], None],
    sinks: Iterable[Sink] = (),
) -> Trained:
    """Trains to the end, from where the last process stopped.

    Args:
        settings: What to train.
        directory: The run's directory; None to train without holdfast, so that nothing is kept and nothing saved.
        after_step: Called after each step.
        sinks: Told of holdfast's events.
    """
    # The same arithmetic in every process: sums depend on the number of threads. One is enough for so small a model,
    # and leaves a core to the loader and to saving.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)

    model = GPT(VOCABULARY, settings.tokens, width=192, layers=4, heads=4, dropout=0.1)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, make_schedule(settings.steps))
    excerpts = Excerpts(read_text(), BATCHES_IN_EPOCH * settings.batch, settings.tokens)
    loader = ResumableDataLoader(excerpts, batch_size=settings.batch, seed=settings.seed, num_workers=1)
    history = History()

    def learn(samples: Tensor, text: Tensor) -> float:
        tokens, following = text[:, :-1], text[:, 1:]
        # Some of what it reads is hidden from it, a different share in each step.
        share = random.uniform(0.0, 0.1)
        hidden = torch.from_numpy(np.random.random(tuple(tokens.shape)) < share)
        logits = model(tokens.masked_fill(hidden, 0))
        loss = F.cross_entropy(logits.flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        history.losses.append(loss.item())
        history.samples.append(samples.tolist())
        return loss.item()

    batches = loader.stream()
    if directory is None:
        for _ in range(settings.steps):
            learn(*next(batches))
            after_step(history)
        return Trained(model, optimizer, scheduler, history)

    kept: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    kept |= {"rng": holdfast.RNG(), "history": history}
    for name in settings.forget:
        del kept[name]
    save_every = holdfast.Steps(settings.save_every_steps)
    keep = holdfast.Latest(2)
    # Alone, whatever job the environment speaks of.
    with holdfast.resumable(directory, save_every=save_every, keep=keep, sinks=sinks, cluster="alone", **kept) as run:
        for _ in run.steps(settings.steps):
            loss = learn(*next(batches))
            run.report(loss=loss)
            after_step(history)
    return Trained(model, optimizer, scheduler, history)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, which lets matrices decay and leaves biases and norms alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def make_schedule(steps: int) -> Callable[[int], float]:
    """The learning rate rises in a line, then falls along a cosine to a tenth."""
    warm_up_steps = max(1, steps // 10)

    def factor(step: int) -> float:
        risen = min(1.0, (step + 1) / warm_up_steps)
        return risen * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

    return factor


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", default=Settings.steps, show_default=True, help="How many steps the run has in all.")
@click.option("--seed", default=Settings.seed, show_default=True, help="The seed of everything that is random.")
def main(directory: Path, steps: int, seed: int) -> None:
    """Trains in DIRECTORY, from where the last process stopped."""
    train(
        Settings(seed=seed, steps=steps),
        directory,
        lambda history: click.echo(f"step {len(history.losses)}: loss {history.losses[-1]:.4f}"),
    )


if __name__ == "__main__":
    main()
