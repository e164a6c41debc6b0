"""Loaders with a state of their own, over samplers that draw; the control is the same loader without holdfast."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from holdfast.advice.rules import Advisor  # noqa: E402
from holdfast.integrations.torch.draws import keep_draws  # noqa: E402
from holdfast.integrations.torch.places import DataPlace  # noqa: E402
from holdfast.state.capture import capture_objects  # noqa: E402
from holdfast.state.match.matching import match_objects  # noqa: E402
from holdfast.state.rng import RNG  # noqa: E402
from loader_trips import through_checkpoint  # noqa: E402

LENGTH, BATCH = 12, 3
ROWS = list(range(LENGTH))


class AtOnce(Sampler[int]):
    """Draws as soon as it is iterated, from two of the generators of the whole process."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(LENGTH).tolist()
        random.shuffle(order)
        return iter(order)


class OfItsOwn(AtOnce):
    """Has generators of its own under names of its own, and a private count of its epochs."""

    def __init__(self) -> None:
        self.numbers, self.pythons, self._epoch = np.random.default_rng(1), random.Random(2), 0

    def __iter__(self) -> Iterator[int]:
        order = self.numbers.permutation(LENGTH).tolist()
        self.pythons.shuffle(order)
        self._epoch += 1
        return iter(order[self._epoch :] + order[: self._epoch])


class OneByOne(AtOnce):
    """Draws with each sample, so that training draws in between."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(LENGTH) for _ in ROWS)


class Duck:
    """Not of torch's class."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH).tolist())


class Counting:
    """Draws whole batches as soon as it is iterated, and counts its epochs then."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return LENGTH // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH, generator=seeded(self.epoch)).tolist()
        self.epoch += 1
        return iter([order[at : at + BATCH] for at in range(0, LENGTH, BATCH)])


class CountingBatches(BatchSampler):
    """Changes the order of the sampler in it by a count of its own."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = [*self.sampler]
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        yield from (order[at : at + self.batch_size] for at in range(0, LENGTH, self.batch_size))


@dataclasses.dataclass
class Record:
    epoch: int = 0


class InContainers(AtOnce):
    """Counts its epochs in an object, and in containers of several kinds."""

    def __init__(self) -> None:
        self.record, self.queue, self.seen = Record(), collections.deque(ROWS, maxlen=LENGTH), frozenset[int]()
        self.counts, self.content = collections.defaultdict[str, int](int), bytearray(1)

    def __iter__(self) -> Iterator[int]:
        self.record.epoch += 1
        self.queue.rotate(5)
        self.counts["epoch"] += 2
        self.content[0] += 3
        self.seen |= {len(self.seen)}
        order = [*self.queue]
        numbers = (self.record.epoch, self.counts["epoch"], self.content[0], len(self.seen))
        random.Random(repr(numbers)).shuffle(order)
        return iter(order)


class Skipping(DataLoader[Any]):
    """A loader with a state of its own as people write it: it counts, and skips what it has counted."""

    taken = skipped = 0

    def __iter__(self) -> Any:
        batches = super().__iter__()
        for _ in range(self.skipped):
            next(batches)
        self.taken, self.skipped = self.skipped, 0
        for batch in batches:
            self.taken += 1
            yield batch
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["taken"]


def over(make: Callable[[], Any], *, is_whole: bool = False, cls: Any = stateful.StatefulDataLoader) -> Any:
    def loader(workers: int) -> Any:
        options = {"batch_sampler": make()} if is_whole else {"sampler": make(), "batch_size": BATCH}
        return cls(ROWS, num_workers=workers, **options)

    return loader


def seeded(number: int) -> Any:
    return torch.Generator().manual_seed(number)


LOADERS: dict[str, Callable[[int], Any]] = {
    "random": over(lambda: RandomSampler(ROWS)),
    "random, own generator": over(lambda: RandomSampler(ROWS, generator=seeded(3))),
    "random, with replacement": over(lambda: RandomSampler(ROWS, replacement=True, num_samples=LENGTH)),
    "weighted": over(lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH)),
    "subset": over(lambda: SubsetRandomSampler(ROWS)),
    "whole batches": over(lambda: BatchSampler(RandomSampler(ROWS), BATCH, drop_last=False), is_whole=True),
    "whole batches, weighted": over(
        lambda: BatchSampler(WeightedRandomSampler([1.0] * LENGTH, LENGTH), BATCH, drop_last=False), is_whole=True
    ),
    "drawn at once": over(AtOnce),
    "of its own": over(OfItsOwn),
    "whole batches, of its own": over(lambda: BatchSampler(OfItsOwn(), BATCH, drop_last=False), is_whole=True),
    "whole batches, counted": over(Counting, is_whole=True),
    "whole batches, of a subclass": over(
        lambda: CountingBatches(SequentialSampler(ROWS), BATCH, drop_last=False), is_whole=True
    ),
    "counted in containers": over(InContainers),
    "not a Sampler": over(Duck),
    "generator of the loader": lambda workers: stateful.StatefulDataLoader(
        ROWS, batch_size=BATCH, shuffle=True, generator=seeded(4), num_workers=workers
    ),
    "a loader of the program's own": over(lambda: RandomSampler(ROWS), cls=Skipping),
}


def advise(objects: dict[str, Any]) -> list[str]:
    """What a first save of these objects is warned of."""
    return list(Advisor(objects, lambda _: []).find_at_save(1))


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def train(loader: Any, epochs: int = 3) -> Iterator[Any]:
    """A step draws as dropout and the like do, so that what a loader draws shows."""
    for _ in range(epochs):
        for batch in loader:
            yield batch.tolist(), random.random(), float(np.random.random()), float(torch.rand(()))


WITH_WORKERS = ("weighted", "of its own", "whole batches", "drawn at once", "generator of the loader")


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in LOADERS), *((name, 1) for name in WITH_WORKERS)])
def test_each_epoch_goes_on_as_it_was_drawn(name: str, workers: int) -> None:
    seed_all()
    whole = list(train(LOADERS[name](workers)))
    for taken in (2, 5, 8, 9) if not workers else (5,):
        after, again = LOADERS[name](workers), LOADERS[name](workers)
        seed_all()
        before = LOADERS[name](workers)
        keep_draws(before)
        unfinished = train(before)
        head = list(itertools.islice(unfinished, taken))
        through_checkpoint({"data": before, "rng": RNG()}, {"data": after, "rng": RNG()})
        assert advise({"data": after, "rng": RNG()}) == []
        # A save before the first batch has the same position, and starts nothing.
        through_checkpoint({"data": after, "rng": RNG()}, {"data": again, "rng": RNG()})
        assert getattr(after, "_iterator", None) is None
        assert head + list(train(again, 3 - (taken - 1) // (LENGTH // BATCH))) == whole, taken


class Epochs(IterableDataset[int]):
    """A stream with a place of its own, whose loop sets the epoch."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(LENGTH, generator=seeded(self.epoch)).tolist()
        while self.at < LENGTH:
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class DrawsItself(Dataset[float]):
    """Draws its samples, and keeps the generator of the whole process in its own state."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


def with_epochs(workers: int, *, is_stream: bool) -> tuple[Any, Any]:
    if is_stream:
        stream = Epochs()
        return stream, stateful.StatefulDataLoader(stream, batch_size=BATCH, num_workers=workers)
    sampler: Any = DistributedSampler(TensorDataset(torch.arange(LENGTH)), num_replicas=1, rank=0, seed=5)
    return sampler, stateful.StatefulDataLoader(ROWS, batch_size=BATCH, sampler=sampler, num_workers=workers)


@pytest.mark.parametrize(("workers", "is_stream"), [(0, False), (0, True), (2, False), (2, True)])
def test_the_epoch_that_the_loop_sets_counts(workers: int, is_stream: bool) -> None:
    """The position is loaded before the loop sets the epoch, so nothing may begin until then."""

    def loop(parts: tuple[Any, Any], first: int = 0) -> Iterator[Any]:
        for epoch in range(first, 2):
            parts[0].set_epoch(epoch)
            yield from (batch.tolist() for batch in parts[1])

    whole = list(loop(with_epochs(workers, is_stream=is_stream)))
    # Each worker gives the whole stream.
    taken = len(whole) // 2 + 2
    before, after = (with_epochs(workers, is_stream=is_stream) for _ in range(2))
    unfinished = loop(before)
    head = list(itertools.islice(unfinished, taken))
    through_checkpoint({"data": before[1]}, {"data": after[1]})
    assert head + list(loop(after, 1)) == whole


def test_what_a_dataset_sets_when_it_is_loaded_stays() -> None:
    before, after = (stateful.StatefulDataLoader(DrawsItself(), batch_size=BATCH) for _ in range(2))
    head = iter(before)
    next(head), next(head)
    stored = capture_objects({"data": before})
    rest = [batch.tolist() for batch in head]
    seed_all()
    matching = match_objects({"data": after}, stored.objects, dict(zip(stored.names, stored.specs, strict=True)))
    for target, array in zip(matching.targets, stored.arrays, strict=True):
        target.array.copy_(array)
    matching.apply()
    assert [batch.tolist() for batch in after] == rest


def test_a_loop_that_began_before_the_run_continues_at_its_position() -> None:
    def fresh(name: str) -> tuple[Any, Iterator[Any]]:
        loader = LOADERS[name](0)
        batches = iter(loader)
        return loader, batches

    for name in ("generator of the loader", "weighted", "random, own generator"):
        loader, early = fresh(name)
        keep_draws(loader)
        whole = [batch.tolist() for batch in early]
        before, early = fresh(name)
        keep_draws(before)
        head = [next(early).tolist() for _ in range(2)]
        after, resumed = fresh(name)
        through_checkpoint({"data": before}, {"data": after})
        rest = [batch.tolist() for batch in resumed]
        assert rest == [batch.tolist() for batch in early]
        assert head + rest == whole or name == "weighted", "its weights are drawn from the process's generator"


def test_a_loop_in_progress_continues_at_a_position_that_is_loaded() -> None:
    loader = stateful.StatefulDataLoader(ROWS, batch_size=BATCH)
    draws = keep_draws(loader)
    batches = iter(loader)
    next(batches)
    state = draws.state_dict()
    next(batches), next(batches)
    draws.load_state_dict(state)
    assert [batch.tolist()[0] for batch in batches] == [3, 6, 9]


def test_states_that_were_saved_without_the_draws_still_load() -> None:
    old = stateful.StatefulDataLoader(ROWS, batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH))
    next(iter(old))
    new = stateful.StatefulDataLoader(ROWS, batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH))
    keep_draws(new).load_state_dict(old.state_dict())
    assert len(list(new)) == LENGTH // BATCH - 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rows": 15}, "within an epoch over 12 samples, live 15"),
        ({"rows": 9}, "within an epoch over 12 samples, live 9"),
        ({"num_workers": 1}, "num_workers=0, live 1"),
        ({"rows": 15, "shuffle": False}, ""),
        ({"rows": 15, "taken": None}, ""),
        ({"rows": 15, "num_workers": 1, "taken": None}, "num_workers=0, live 1"),
    ],
)
def test_a_position_that_does_not_fit_is_refused_before_the_first_batch(change: dict[str, Any], expected: str) -> None:
    def loader(rows: int = LENGTH, num_workers: int = 0, shuffle: bool = True) -> Any:
        return stateful.StatefulDataLoader(range(rows), batch_size=BATCH, shuffle=shuffle, num_workers=num_workers)

    taken = change.pop("taken", 2)
    before, after = loader(shuffle=change.get("shuffle", True)), loader(**change)
    keep_draws(before)
    batches = iter(before)
    list(itertools.islice(batches, taken))
    stored = capture_objects({"data": before})
    matching = match_objects({"data": after}, stored.objects, dict(zip(stored.names, stored.specs, strict=True)))
    assert expected in str(matching.differences)
    assert bool(matching.differences) == bool(expected)


def test_a_sampler_that_draws_along_with_training_is_warned_of() -> None:
    for sampler, count in ((OneByOne(), 1), (AtOnce(), 0)):
        loader = stateful.StatefulDataLoader(ROWS, batch_size=BATCH, sampler=sampler)
        keep_draws(loader)
        next(iter(loader))
        assert [text[:38] for text in advise({"data": loader})] == ["data: its sampler draws each sample fr"] * count


def test_a_followed_loader_is_what_it_was() -> None:
    sampler = RandomSampler(ROWS)
    loader = stateful.StatefulDataLoader(ROWS, batch_size=BATCH, sampler=sampler)
    keep_draws(loader)
    assert isinstance(loader, stateful.StatefulDataLoader)
    assert isinstance(sampler, RandomSampler)
    assert loader.sampler is loader.batch_sampler.sampler is sampler
    assert type(loader).__name__ == "StatefulDataLoader"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [ROWS, Epochs()], ids=["rows", "stream"])
def test_a_loader_that_a_framework_follows_is_what_it_was(workers: int, data: Any) -> None:
    expected = [batch.tolist() for batch in stateful.StatefulDataLoader(data, batch_size=BATCH)]
    loader = stateful.StatefulDataLoader(data, batch_size=BATCH, num_workers=workers)
    DataPlace(loader)
    assert isinstance(loader, stateful.StatefulDataLoader)
    assert loader.state_dict() == {}, "its place is kept elsewhere"
    assert [batch.tolist() for batch in loader] == expected
