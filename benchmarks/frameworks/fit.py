"""One fit of a framework: what it loses by each save, and how long it takes to take it up in the middle of an epoch."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from benchmarks.frameworks import FRAMEWORKS
from benchmarks.frameworks.sizes import FROZEN, TRAINED, FitSize
from benchmarks.harness.worker import load
from benchmarks.peers import check_installed

_WARM_UP_STEPS: Final = 5
_LEFT_STEPS: Final = 100
"""How many steps an epoch has after those that were trained when the job came to its end."""


class Samples(Dataset[Any]):
    """Tokens, each of which takes some time to load."""

    def __init__(self, size: FitSize, steps: int) -> None:
        self._tokens = np.random.default_rng(0).integers(size.vocabulary, size=size.batch * steps)
        self._seconds = size.sample_seconds

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        return self._tokens[index], np.float32(index % 2)


class Stream(IterableDataset[Any]):
    """The samples one after the other; knows its place."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self._place = samples, 0

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Any:
        while self._place < len(self._samples):
            self._place += 1
            yield self._samples[self._place - 1]
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        """The place."""
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes there."""
        self._place = state["place"]


class Model(torch.nn.Module):
    """A frozen embedding, and layers that are trained."""

    def __init__(self, size: FitSize) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(size.vocabulary, size.width)
        self.embedding.weight.requires_grad_(False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(size.width, size.width) for _ in range(size.layers))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        loss: torch.Tensor = (x - labels[:, None]).square().mean()
        return loss


class Enough(Exception):  # noqa: N818  It is no error.
    """Ends a fit in the middle of an epoch, as an error of the program would."""


class Clock:
    """Notes when the steps of a fit begin and end; callbacks call it.

    Attributes:
        begun: When each step began.
        cpu: The processor time that the process had taken by then.
        first: When the first step was complete.
        last: When the newest one was.
    """

    def __init__(self, until: int | None = None) -> None:
        """Ends the fit once so many steps of its epoch are complete, if that is given."""
        self._until = until
        self.begun: list[float] = []
        self.cpu: list[float] = []
        self.first = self.last = 0.0

    def begin_step(self) -> None:
        """A step begins."""
        self.begun.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def end_step(self, done: int) -> None:
        """So many steps of the epoch are complete."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        if self._until is not None and done >= self._until:
            raise Enough

    def periods(self) -> list[float]:
        """The seconds from the beginning of each step to that of the next one."""
        return _differences(self.begun)

    def cpu_periods(self) -> list[float]:
        """The seconds of processor time, of all threads, that the process took in each of these."""
        return _differences(self.cpu)


def _differences(moments: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments)]


class Fit(ABC):
    """Trains with one framework, saved in one way."""

    def __init__(self, way: str, directory: Path, scale: float) -> None:
        self.way, self.directory = way, directory
        self._scale = scale

    @abstractmethod
    def make(self, size: FitSize, steps: int, clock: Clock, every: int | None) -> Callable[[], object]:
        """Makes a model, its data and all else. What it returns trains one epoch of so many steps.

        Args:
            size: The size of the model and its samples.
            steps: The steps of the epoch.
            clock: What callbacks report each step to.
            every: After how many steps to save, and then to begin where the newest save was; None for neither.
        """

    def measure_saves(self, saves: int, interval_steps: int) -> dict[str, float]:
        """The costs of saves in a fit, compared with a fit without before it and one after it.

        The first of the saves makes memory and files ready, and is a figure of its own. What each of the others leaves
        to do falls into the steps that follow it.
        """
        size = TRAINED.scaled(self._scale)
        # Python's collections of all objects take 0.2 s with so many modules, and fall to one way or another by chance.
        gc.collect()
        gc.freeze()
        before, cpu_before = self._measure_plain(size, interval_steps)
        clock = Clock()
        self.make(size, (saves + 2) * interval_steps, clock, interval_steps)()
        after, cpu_after = self._measure_plain(size, interval_steps)
        plain, cpu_plain = fmean([before, after]), fmean([cpu_before, cpu_after])
        periods = clock.periods()
        # A save is within the step that it follows: the first one is left out here, and so is the one at the end.
        part = slice(2 * interval_steps - 1, (saves + 2) * interval_steps - 1)
        counted, cpu_counted = periods[part], clock.cpu_periods()[part]
        return {
            "step": plain,
            "lost": (sum(counted) - len(counted) * plain) / saves,
            "lost_cpu": (sum(cpu_counted) - len(cpu_counted) * cpu_plain) / saves,
            "stall": median(counted[::interval_steps]) - plain,
            "longest": max(counted),
            "first_stall": periods[interval_steps - 1] - plain,
        }

    def prepare(self, steps: int, *, is_stream: bool = False) -> None:
        """Trains so many steps of a longer epoch, saves, and ends in the middle of it."""
        # The next step may still be trained meanwhile, and is lost.
        self._train_until(steps + 1, steps, steps, is_stream=is_stream)

    def measure_restart(self, steps: int, *, is_stream: bool = False) -> dict[str, float]:
        """How long it takes until the first step is trained, and until one is that was not trained before."""
        begun, clock = self._train_until(steps + 1, steps, steps, is_stream=is_stream)
        return {"first": clock.first - begun, "resume": clock.last - begun}

    def measure_start(self, steps: int, *, is_stream: bool = False) -> dict[str, float]:
        """How long the first step takes in a fit that begins from nothing."""
        begun, clock = self._train_until(1, steps, None, is_stream=is_stream)
        return {"first": clock.first - begun}

    def _train_until(self, until: int, steps: int, every: int | None, *, is_stream: bool) -> tuple[float, Clock]:
        clock = Clock(until)
        size = replace(FROZEN.scaled(self._scale), is_stream=is_stream)
        train = self.make(size, steps + _LEFT_STEPS, clock, every)
        begun = time.perf_counter()
        with suppress(Enough):
            train()
        return begun, clock

    def _measure_plain(self, size: FitSize, interval_steps: int) -> tuple[float, float]:
        """How long a step takes without saves, and how much processor time."""
        clock = Clock()
        self.make(size, _WARM_UP_STEPS + interval_steps + 1, clock, None)()
        return fmean(clock.periods()[_WARM_UP_STEPS:]), fmean(clock.cpu_periods()[_WARM_UP_STEPS:])


def make_fit(framework: str, way: str, directory: Path, scale: float) -> Fit:
    """The fit of a framework.

    Raises:
        MissingError: If a package that it needs is not installed.
    """
    entry = FRAMEWORKS[framework]
    check_installed(entry.needs)
    fit = load(entry.place)(way, directory, scale)
    assert isinstance(fit, Fit)
    return fit
