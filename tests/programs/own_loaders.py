"""Trains with the batches of `run.batches`, and writes a line for each; may end itself in the middle of a step."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

import holdfast

SAMPLES = 22
SIZE = 4


class Noisy(Dataset[Any]):
    """Samples with an augmentation that draws from all generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        x = torch.arange(4.0) * (index + 1) / 50
        return index, x + torch.randn(4) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1


class Stream(IterableDataset[Any]):
    """The same, one after the other, in the order of the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = [*range(SAMPLES)]
        random.Random(self.epoch).shuffle(order)
        return map(Noisy().__getitem__, order)


class Shuffled:
    """An iterable with a generator of its own, which it draws from in each pass."""

    def __init__(self) -> None:
        self.random = random.Random(7)

    def __iter__(self) -> Iterator[Any]:
        order = [*range(SAMPLES)]
        self.random.shuffle(order)
        for first in range(0, SAMPLES, SIZE):
            yield make_batch(order[first : first + SIZE])


class Kept(Shuffled):
    """One that keeps its own place."""

    def __init__(self) -> None:
        self.passes = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        order = [*range(SAMPLES)]
        random.Random(self.passes).shuffle(order)
        while self.given < SAMPLES:
            first, self.given = self.given, self.given + SIZE
            yield make_batch(order[first : first + SIZE])
        self.passes, self.given = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.given = state["passes"], state["given"]


class Buckets(Sampler[list[int]]):
    """Batches in an order that follows from the epoch, as a program's own sampler may draw it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(SAMPLES).tolist()
        return (order[first : first + SIZE] for first in range(0, SAMPLES, SIZE))

    def __len__(self) -> int:
        return (SAMPLES + SIZE - 1) // SIZE


def make_batch(indices: list[int]) -> Any:
    found = [Noisy()[index] for index in indices]
    return torch.tensor([index for index, _ in found]), torch.stack([x for _, x in found])


def read_batches() -> Iterator[Any]:
    """Draws its order, and what is in its batches, from the generators that training draws from."""
    order = torch.randperm(SAMPLES).tolist()
    for first in range(0, SAMPLES, SIZE):
        yield make_batch(order[first : first + SIZE])


def open_stream(data: str) -> Any:
    """A stream of Hugging Face's datasets, bare or in a loader."""
    import datasets  # type: ignore[import-not-found, unused-ignore]

    stream = datasets.Dataset.from_dict({"index": [*range(SAMPLES)]}).to_iterable_dataset(num_shards=2)
    if "shuffled" in data:
        stream = stream.shuffle(seed=1, buffer_size=6)
    return DataLoader(stream.with_format("torch"), SIZE) if "in a loader" in data else stream.batch(SIZE)


def make_loader(data: str) -> Any:
    if data.startswith("datasets"):
        return open_stream(data)
    if data == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Noisy(), batch_size=SIZE, shuffle=True)
    weights = torch.arange(1.0, SAMPLES + 1).tolist()
    makes: dict[str, Callable[[], Any]] = {
        "plain": lambda: DataLoader(Noisy(), SIZE, shuffle=True),
        "workers": lambda: DataLoader(Noisy(), SIZE, shuffle=True, num_workers=2),
        "generator": lambda: DataLoader(Noisy(), SIZE, shuffle=True, generator=torch.Generator().manual_seed(3)),
        "weighted": lambda: DataLoader(Noisy(), SIZE, sampler=WeightedRandomSampler(weights, SAMPLES)),
        "buckets": lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(DistributedSampler(Noisy(), 1, 0), 4, False)),
        "own": lambda: DataLoader(Noisy(), batch_sampler=Buckets()),
        "stream": lambda: DataLoader(Stream(), SIZE),
        "distributed": lambda: DataLoader(Noisy(2 * SAMPLES), SIZE, sampler=DistributedSampler(Noisy(2 * SAMPLES))),
        "resumable": lambda: holdfast.ResumableDataLoader(Noisy(), SIZE, seed=5),
        "list": lambda: [make_batch([*range(first, first + SIZE)]) for first in range(0, SAMPLES, SIZE)],
        "shuffled": Shuffled,
        "kept": Kept,
        "function": lambda: read_batches,
    }
    return makes[data]()


class Job:
    """A model and the steps that train it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.log = options, Path(options.log).open("a")  # noqa: SIM115 - it goes with the process
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)
        if distributed.is_initialized():
            self.model = nn.parallel.DistributedDataParallel(self.model)
        self.loader = make_loader(options.data)
        self.run: Any = None

    def tell(self, **line: Any) -> None:
        print(json.dumps(line), file=self.log, flush=True)

    def train(self, *batches: Any, epoch: int = 0) -> None:
        for batch in batches:
            indices, x = batch if isinstance(batch, list | tuple) else (torch.as_tensor(batch["index"]), None)
            x = indices[:, None] * torch.arange(4.0) / 50 if x is None else x
            loss = self.model(x).square().mean() / len(batches)
            loss.backward()
            self.tell(step=self.run.step, epoch=epoch, batch=indices.tolist(), loss=loss.item().hex())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.report(loss=loss)
        if self.run.step == self.options.ends_at:
            self.run.manager.wait()
            os.kill(os.getpid(), getattr(signal, self.options.by))

    def evaluate(self, batches: Any, epoch: int) -> None:
        with torch.no_grad():
            found = [(indices.tolist(), self.model(x).sum().item().hex()) for indices, x in batches]
        self.tell(evaluated=epoch, found=found)

    def loop(self, run: Any) -> None:
        name, loader, total = self.options.loop, self.loader, self.options.epochs
        held_out = DataLoader(Noisy(7), 3, shuffle=True)
        if name == "steps first":
            for _, batch in zip(run.steps(15), run.batches(loader), strict=False):
                self.train(batch)
        elif name == "batches first":
            for batch, _ in zip(run.batches(loader), run.steps(15), strict=False):
                self.train(batch)
        elif name == "without end":
            for batch in run.batches(loader):
                self.train(batch)
                run.finish_step()
                if run.step >= 15:
                    break
        for epoch in run.epochs(total) if " " not in name else ():
            if name == "plain":
                for batch in run.batches(loader):
                    self.train(batch, epoch=epoch)
                    run.finish_step()
            elif name == "validated":
                for batch in run.batches(loader):
                    self.train(batch, epoch=epoch)
                    run.finish_step()
                with run.checkpointable():
                    self.evaluate(run.batches(held_out), epoch)
                self.schedule.step()
                run.report(val_loss=epoch)
                run.save()
            elif name == "accumulated":
                batches = run.batches(loader)
                waiting = []
                for number, batch in enumerate(batches, start=batches.batches_done):
                    waiting.append(batch)
                    if (number + 1) % 4 == 0 or number + 1 == len(loader):
                        self.train(*waiting, epoch=epoch)
                        waiting = []
                        run.finish_step()
            elif name == "broken":
                batches = run.batches(loader)
                for number, batch in enumerate(batches, start=batches.batches_done):
                    if number == 4:
                        break
                    self.train(batch, epoch=epoch)
                    run.finish_step()
            elif name == "two":
                for batch in run.batches(loader):
                    self.train(batch, epoch=epoch)
                    run.finish_step()
                for batch in run.batches(held_out):
                    self.train(batch, epoch=epoch)
                    run.finish_step()
            elif name == "remade":
                own = DataLoader(Noisy(), SIZE, shuffle=True, generator=torch.Generator().manual_seed(epoch))
                for batch in run.batches(own):
                    self.train(batch, epoch=epoch)
                    run.finish_step()
            elif name == "zipped":
                for _, batch in zip(itertools.repeat(0), run.batches(loader), strict=False):
                    self.train(batch, epoch=epoch)
                    run.finish_step()
            elif name == "steps":
                for _, batch in zip(run.steps(1000), run.batches(loader), strict=False):
                    self.train(batch, epoch=epoch)
            elif name == "batches":
                for batch, _ in zip(run.batches(loader), run.steps(1000), strict=False):
                    self.train(batch, epoch=epoch)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("log")
    parser.add_argument("--data", default="plain")
    parser.add_argument("--loop", default="plain")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--ends-at", type=int)
    parser.add_argument("--by", default="SIGKILL")
    options = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
        options.log += os.environ["RANK"]
    job = Job(options)
    with holdfast.resumable(
        options.directory,
        model=job.model,
        optimizer=job.optimizer,
        schedule=job.schedule,
        rng=holdfast.RNG(),
        save_every=holdfast.Steps(options.every),
        strict_resume=True,
    ) as run:
        job.run = run
        job.loop(run)
    state = job.model.state_dict()
    job.tell(model=hashlib.sha256(b"".join(one.numpy().tobytes() for one in state.values())).hexdigest(), step=run.step)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
