"""What the order of an epoch is drawn from is kept for samplers of any class, and is the same in the next process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

import holdfast as hf
from holdfast.integrations.torch.draws import note_parts, read_parts, write_parts

SAMPLES = 24


class Own(Sampler[int]):
    """A sampler that draws from what it is given, under a name of its own."""

    def __init__(self, source: Any, draw: Callable[[Any], list[int]]) -> None:
        self.drawn_from = source
        self._draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw(self.drawn_from))


class Counted:
    """No class of torch's: it counts its epochs in private, and seeds each order with the count."""

    def __init__(self) -> None:
        self._passes = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        return iter(np.random.default_rng(self._passes).permutation(SAMPLES).tolist())


class Shuffled(Counted):
    """It shuffles one list where it is, each time from what the time before has left."""

    def __init__(self, rows: list[Any] | tuple[Any, ...] | np.ndarray[Any, Any]) -> None:
        self.rows, self.generator = rows, np.random.RandomState(3)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        self.generator.shuffle(self.rows)
        return iter([each if isinstance(each, list | tuple) else int(each) for each in self.rows])


class Buckets(Counted):
    """A batch sampler over others, which it has in a list, and over generators in a dict."""

    def __init__(self) -> None:
        self.parts = [
            RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(number)) for number in (1, 2)
        ]
        self.draws = {"first": random.Random(5)}

    def __iter__(self) -> Iterator[Any]:
        rows = [*zip(*self.parts, strict=True)]
        self.draws["first"].shuffle(rows)
        return iter(rows)


def numbers(count: int) -> Any:
    """A dataset: torch takes any sequence."""
    return range(count)


def plain(sampler: Any) -> DataLoader[Any]:
    return DataLoader(numbers(10_000), batch_size=4, sampler=sampler)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "NumPy": lambda: plain(Own(np.random.default_rng(0), lambda rng: rng.permutation(SAMPLES).tolist())),
    "NumPy, as before": lambda: plain(Own(np.random.RandomState(0), lambda rng: rng.permutation(SAMPLES).tolist())),
    "Python": lambda: plain(Own(random.Random(0), lambda rng: rng.sample(range(SAMPLES), SAMPLES))),
    "torch": lambda: plain(Own(torch.Generator(), lambda rng: torch.randperm(SAMPLES, generator=rng).tolist())),
    "weights": lambda: plain(WeightedRandomSampler(range(1, 25), SAMPLES, generator=torch.Generator())),
    "loader": lambda: DataLoader(numbers(SAMPLES), batch_size=4, shuffle=True, generator=torch.Generator()),
    "counted": lambda: plain(Counted()),
    "within another": lambda: DataLoader(numbers(SAMPLES), batch_sampler=BatchSampler(Counted(), 4, False)),
    "buckets": lambda: DataLoader(numbers(SAMPLES), batch_sampler=Buckets()),
    "shuffled": lambda: plain(Shuffled(list(range(SAMPLES)))),
    "shuffled, long": lambda: plain(Shuffled(list(range(5000)))),
    "shuffled rows": lambda: DataLoader(numbers(8000), batch_sampler=Shuffled([(n, n + 1) for n in range(0, 8000, 2)])),
    "shuffled array": lambda: plain(Shuffled(np.arange(SAMPLES))),
}


def take_epoch(loader: DataLoader[Any]) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", LOADERS)
def test_the_orders_of_later_epochs_follow_from_what_was_read(kind: str, tmp_path: Path) -> None:
    live = LOADERS[kind]()
    note_parts(live)
    orders = [take_epoch(live)]
    state = read_parts(live)
    orders += [take_epoch(live), take_epoch(live)]
    assert orders[0] != orders[1] != orders[2]
    # As it comes back from a checkpoint.
    hf.save(tmp_path / "state", state)
    stored = hf.load(tmp_path / "state")
    fresh = LOADERS[kind]()
    note_parts(fresh)
    write_parts(fresh, stored)
    assert [take_epoch(fresh), take_epoch(fresh)] == orders[1:]
    # An epoch that is begun again.
    write_parts(fresh, stored)
    assert take_epoch(fresh) == orders[1]


def test_reading_draws_nothing_and_what_has_not_changed_is_the_programs(tmp_path: Path) -> None:
    live = DataLoader(numbers(SAMPLES), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, False))
    note_parts(live)
    take_epoch(live)
    before = torch.get_rng_state()
    state = read_parts(live)
    assert torch.equal(torch.get_rng_state(), before)
    other = DataLoader(numbers(30), batch_sampler=BatchSampler(RandomSampler(range(30)), 6, True))
    note_parts(other)
    write_parts(other, state)
    assert [len(batch) for batch in other] == [6] * 5


def test_the_form_that_was_stored_before_is_read() -> None:
    def make() -> DataLoader[Any]:
        sampler: Any = DistributedSampler(numbers(SAMPLES), num_replicas=1, rank=0)
        return DataLoader(numbers(SAMPLES), batch_size=4, sampler=sampler, generator=torch.Generator())

    generator = torch.Generator().manual_seed(8)
    old: list[Any] = [{"generator": generator.get_state().numpy().tobytes()}, {}, {"epoch": 3, "seed": 7}]
    loader: Any = make()
    note_parts(loader)
    write_parts(loader, old)
    assert (loader.sampler.epoch, loader.sampler.seed) == (3, 7)
    assert torch.equal(loader.generator.get_state(), generator.get_state())
    # A generator that a sampler creates when it is first used.
    shuffled: Any = DataLoader(numbers(SAMPLES), shuffle=True)
    write_parts(shuffled, [{}, {}, {"generator": old[0]["generator"]}])
    assert torch.equal(shuffled.sampler.generator.get_state(), generator.get_state())
