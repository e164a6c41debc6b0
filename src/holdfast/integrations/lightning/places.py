"""The place in the data of plain `DataLoader`s: which order the epoch has, and how many batches of it were trained."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.errors import UsageError
from holdfast.format.digests import derive, digest
from holdfast.state.data.sampler import ResumableSampler
from holdfast.state.rng import RNG, undisturbed


class IndexSource:
    """Stands in the place of a loader's sampler, and keeps what its order was drawn from.

    A restart draws the same order again and passes over indices, not samples. With workers, each batch seeds the random
    generators of the process that loads it, so that what is drawn there does not depend on what was loaded before.
    """

    def __init__(self, sampler: Any, loader: DataLoader[Any], rank: int) -> None:
        self._sampler = sampler
        self._has_workers = loader.num_workers > 0
        self._rank = rank
        self._generators = list(_find_generators(loader, sampler))
        # How often an iteration began; how many batches the earlier ones of this epoch gave, and this one so far.
        self.begun = 0
        self._before = self._given = 0
        self._drawn: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        # Lightning looks for the sampler within a batch sampler, to tell it the epoch.
        return getattr(self.__dict__["_sampler"], name)

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        self._before += self._given
        self._given = 0
        self._drawn = None
        pending, self._pending = self._pending, None
        if pending is not None:
            self._before = pending["before"]
        return self._give(pending)

    def begin_epoch(self) -> None:
        """Notes that the iteration which began last is the first one of an epoch."""
        self._before = 0

    def state(self, trained: int) -> dict[str, Any]:
        """Returns the place in the order, after so many batches of this epoch."""
        taken = min(trained - self._before, self._given)
        return {"drawn": self._drawn, "before": self._before, "taken": taken, "now": self._read_generators()}

    def load(self, state: dict[str, Any], *, is_in_epoch: bool) -> None:
        """Has the next iteration go on at a stored place; between epochs, only generators have a state."""
        if is_in_epoch:
            self._pending = state
        else:
            self.load_generators(state)

    def load_generators(self, state: dict[str, Any]) -> None:
        """Puts the generators of loader and sampler back to where they were between two epochs."""
        self._write_generators(state["now"])

    def _give(self, pending: dict[str, Any] | None) -> Iterator[Any]:
        drawn = pending and pending["drawn"]
        if pending is None or drawn is None:
            states = self._read_generators()
            seen = b"".join(bytes(state.numpy()) for state in (torch.get_rng_state(), *_tensors(states)))
            self._drawn = drawn = {"shared": RNG().state_dict(), "own": states, "key": int(digest(seen)[:15], 16)}
            source = iter(self._sampler)
        else:
            self._drawn = drawn
            with undisturbed():
                RNG().load_state_dict(drawn["shared"])
                self._write_generators(drawn["own"])
                source = iter(self._sampler)
                for _ in range(pending["taken"]):
                    next(source, None)
            self._given = pending["taken"]
        for indices in source:
            seed = derive(drawn["key"], self._given, self._rank)
            self._given += 1
            yield _SeededIndices(indices, seed) if self._has_workers else indices

    def _read_generators(self) -> list[Any]:
        return [_read(generator) for generator in self._generators]

    def _write_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            _write(generator, state)


class _SeededIndices:
    """The indices of a batch. The process that receives them has its generators seeded as it unpacks them."""

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    def __reduce__(self) -> Any:
        return _unpack, (self._indices, self._seed)


def _unpack(indices: Any, seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed >> 32)
    torch.default_generator.manual_seed(seed)
    return indices


def _find_generators(loader: Any, sampler: Any) -> Iterator[Any]:
    """The generators that the loader and its samplers have of their own, each once."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    seen: set[int] = set()
    for holder in (loader, sampler, getattr(sampler, "sampler", None), getattr(loader, "sampler", None)):
        for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
            if isinstance(value, kinds) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _read(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _tensors(states: list[Any]) -> list[torch.Tensor]:
    return [state for state in states if isinstance(state, torch.Tensor)]


def watch_loader(loader: Any, rank: int) -> tuple[Any, IndexSource | None]:
    """Returns the loader to use in the place of one, and what keeps its place; None if it has a state of its own.

    Raises:
        UsageError: If its order is one that cannot be followed.
    """
    if not isinstance(loader, DataLoader) or has_state(loader) or isinstance(loader.dataset, IterableDataset):
        return loader, None
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = getattr(loader, name)
    if isinstance(sampler, ResumableSampler):
        raise UsageError(
            "a DataLoader over a ResumableSampler counts its epochs by itself, and Lightning's Trainer does, too",
            hint="Give the Trainer a plain DataLoader, which Resumable makes resumable, or a ResumableDataLoader.",
        )
    source = IndexSource(sampler, loader, rank)
    watched = copy.copy(loader)
    watched.__dict__[name] = source
    return watched, source


def has_state(loader: Any) -> bool:
    """Whether a loader keeps its place by itself."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def find_lack(loader: Any) -> str:
    """Returns why a loader cannot go on in the middle of an epoch; "" if it can."""
    if has_state(loader):
        return ""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} has no state_dict and load_state_dict"
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} can only be iterated, and its loader keeps no place"
    return ""
