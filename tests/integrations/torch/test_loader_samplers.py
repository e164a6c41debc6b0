"""`ResumableDataLoader` with samplers that draw the order of an epoch, and with data of another length."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from holdfast.errors import MismatchError, UnsupportedValueError, UsageError  # noqa: E402
from holdfast.integrations.torch.loader import ResumableDataLoader  # noqa: E402
from holdfast.state.capture import capture_objects  # noqa: E402
from holdfast.state.match.matching import match_objects  # noqa: E402
from loader_trips import draws, run, through_checkpoint  # noqa: E402

LENGTH, BATCH = 12, 3
ROWS = list(range(LENGTH))
WEIGHTS = [1.0 + n % 3 for n in ROWS]


class PerClass(Sampler[int]):
    """As many of each class, with lists that it shuffles in place, and a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.classes = [[n for n in ROWS if n % 3 == label] for label in range(3)]

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        for rows in self.classes:
            self.rng.shuffle(rows)
        return iter([row for rows in self.classes for row in rows[:3]])


class Counting(Sampler[int]):
    """Counts its epochs by itself, and draws from that count."""

    def __init__(self) -> None:
        self._epoch, self.pythons = 0, random.Random(3)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self._epoch).sample(ROWS, LENGTH)
        self._epoch += 1
        return iter(order)


class CountingLate(Sampler[int]):
    """Has no count until it is iterated."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.late = getattr(self, "late", 0) + 1
        return iter(random.Random(self.late).sample(ROWS, LENGTH))


class Endless(Counting):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Unknown(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Poisson(Sampler[Any]):
    """Each sample is in a batch with the same probability, as for differential privacy."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield (torch.rand(LENGTH) < 0.3).nonzero().flatten().tolist()


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random, more than there are": lambda: RandomSampler(ROWS, replacement=True, num_samples=20),
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, LENGTH),
    "weighted, own generator": lambda: WeightedRandomSampler(WEIGHTS, 10, generator=torch.Generator()),
    "subset": lambda: SubsetRandomSampler(range(4, 11)),
    "per class": PerClass,
    "counting": Counting,
    "counting late": CountingLate,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_batch_can_be_taken_up_again(name: str) -> None:
    def fresh(workers: int = 0) -> ResumableDataLoader:
        random.seed(), np.random.seed(), torch.seed()  # Another life has drawn other numbers.
        return ResumableDataLoader(ROWS, batch_size=BATCH, seed=4, sampler=SAMPLERS[name](), num_workers=workers)

    state = draws()
    whole = run(fresh(), 3)
    count = len(SAMPLERS[name]())
    assert Counter(epoch for epoch, batch in whole for _ in batch) == {0: count, 1: count, 2: count}
    assert [batch for epoch, batch in whole if epoch == 1] != [batch for epoch, batch in whole if epoch == 2]
    assert state != draws()
    for taken in {1, len(whole) // 3, len(whole) // 3 + 1, len(whole) - 1}:
        before, after = fresh(), fresh()
        head = run(before, 3, taken)
        through_checkpoint({"data": before}, {"data": after})
        assert head + run(after, 3) == whole
    if name == "per class":
        assert run(fresh(workers=2), 3) == whole


def test_workers_of_a_job_share_what_a_sampler_draws() -> None:
    def fresh(rank: int, size: int) -> ResumableDataLoader:
        sampler = WeightedRandomSampler(WEIGHTS, LENGTH)
        return ResumableDataLoader(ROWS, batch_size=4, sampler=sampler, rank=rank, world_size=size)

    alone, two = run(fresh(0, 1), 2), [run(fresh(rank, 2), 2) for rank in range(2)]
    assert [(epoch, [*first, *second]) for (epoch, first), (_, second) in zip(*two, strict=True)] == alone
    before, after = fresh(0, 2), fresh(0, 1)
    run(before, 2, 4)
    through_checkpoint({"data": before}, {"data": after})
    assert run(after, 2) == alone[4:]


def test_what_a_sampler_draws_is_seeded_and_changes_no_generator() -> None:
    loader = ResumableDataLoader(ROWS, batch_size=BATCH, sampler=WeightedRandomSampler(WEIGHTS, LENGTH))
    torch.manual_seed(1)
    expected = draws()
    torch.manual_seed(1)
    random.seed(expected[0]), np.random.seed(2)
    first = draws()
    torch.manual_seed(1)
    random.seed(expected[0]), np.random.seed(2)
    list(loader)
    assert draws() == first


@pytest.mark.parametrize("sampler", [Endless(), Unknown(), Poisson()], ids=lambda one: type(one).__name__)
def test_what_cannot_be_kept_is_refused_with_a_way_that_works(sampler: Any) -> None:
    with pytest.raises(UsageError) as refused:
        list(ResumableDataLoader(ROWS, batch_size=BATCH, sampler=sampler))
    assert "StatefulDataLoader" in refused.value.hint


def test_a_loader_with_batches_of_its_own_is_refused_with_a_way_that_works() -> None:
    with pytest.raises(UsageError) as refused:
        ResumableDataLoader(ROWS, batch_sampler=Poisson())
    assert "StatefulDataLoader" in refused.value.hint
    with pytest.raises(UnsupportedValueError) as unsupported:
        capture_objects({"data": DataLoader(TensorDataset(torch.arange(LENGTH)), batch_sampler=Poisson())})
    assert "Poisson" in unsupported.value.hint
    assert "StatefulDataLoader" in unsupported.value.hint
    assert "ResumableDataLoader" not in unsupported.value.hint


def test_changed_dataset_resumes_in_the_next_epoch_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    before = ResumableDataLoader(ROWS, batch_size=BATCH)
    run(before, 3, 6)
    stored = capture_objects({"data": before})
    for length in (8, 20):
        refusing = ResumableDataLoader(list(range(length)), batch_size=BATCH)
        (text,) = match_objects({"data": refusing}, stored.objects, {}).differences.wrong_shape
        assert 'on_resize="next_epoch"' in text
        with pytest.raises(MismatchError, match="next_epoch"):
            refusing.load_state_dict(before.state_dict())
        resized = ResumableDataLoader(list(range(length)), batch_size=BATCH, on_resize="next_epoch")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "holdfast"):
            through_checkpoint({"data": before}, {"data": resized})
        assert f"the data has {length} samples, and had {LENGTH}" in caplog.text
        whole = run(ResumableDataLoader(list(range(length)), batch_size=BATCH), 3)
        assert run(resized, 3) == [each for each in whole if each[0] == 2]
    with pytest.raises(UsageError, match="on_resize"):
        ResumableDataLoader(ROWS, on_resize="epoch")  # type: ignore[arg-type]
