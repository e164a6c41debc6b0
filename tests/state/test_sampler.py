from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MismatchError, UsageError
from holdfast.format.digests import derive, mix
from holdfast.state.capture import capture_objects
from holdfast.state.data.order import MAX_LENGTH, Batches, Permutation
from holdfast.state.data.sampler import ResumableSampler
from holdfast.state.match.matching import match_objects

# ------------------------------------------------------------------------------------------------ the permutation

WORD = (1 << 64) - 1


class Reference:
    """The formula as the documentation has it, in plain Python, forwards and backwards."""

    def __init__(self, length: int, key: int) -> None:
        self.length = length
        bits = max(6, (length - 1).bit_length())
        self.low_bits = bits // 2
        self.high_bits = bits - self.low_bits
        self.keys = [derive(key, number) for number in range(12)]

    def round(self, low: int, high: int, number: int) -> tuple[int, int]:
        if number % 2 == 0:
            return low, high ^ (mix((low + self.keys[number]) & WORD) >> (64 - self.high_bits))
        return low ^ (mix((high + self.keys[number]) & WORD) >> (64 - self.low_bits)), high

    def network(self, value: int, numbers: Iterable[int] = range(12)) -> int:
        low, high = value & ((1 << self.low_bits) - 1), value >> self.low_bits
        for number in numbers:
            low, high = self.round(low, high, number)
        return high << self.low_bits | low

    def forwards(self, place: int) -> int:
        value = self.network(place)
        while value >= self.length:
            value = self.network(value)
        return value

    def backwards(self, value: int) -> int:
        place = self.network(value, range(11, -1, -1))
        while place >= self.length:
            place = self.network(place, range(11, -1, -1))
        return place

    def order(self) -> list[int]:
        """Quicker for short lengths than `Permutation`, which is made for long ones."""
        network = [self.network(value) for value in range(1 << (self.low_bits + self.high_bits))]
        values = network[: self.length]
        for place, value in enumerate(values):
            while value >= self.length:
                value = network[value]
            values[place] = value
        return values


def order(length: int, key: int) -> list[int]:
    places: list[int] = Permutation(length, key).places(0, length).tolist()
    return places


def test_the_formula_never_changes() -> None:
    """These are part of the format: a resume with a later version must find the same order."""
    assert mix(1) == 0x5692161D100B05E5
    assert derive(0) == 0xE220A8397B1DCDAF
    assert derive(1, 2) == 0xBCD9DBB49673066B
    assert order(12, derive(0, 0)) == [0, 4, 8, 10, 5, 1, 9, 3, 7, 11, 2, 6]
    assert Permutation(10**12, derive(7, 3)).places(10**11, 10**11 + 3).tolist() == [
        427002996901,
        971406335736,
        251136648170,
    ]


@pytest.mark.parametrize("length", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1009, 4096])
def test_every_number_comes_once(length: int) -> None:
    places = order(length, derive(5, length))
    assert sorted(places) == list(range(length))
    assert places == Reference(length, derive(5, length)).order()


@given(st.integers(1, 3000), st.integers(0, WORD))
def test_every_number_comes_once_for_any_length_and_key(length: int, key: int) -> None:
    assert sorted(order(length, key)) == list(range(length))


@given(st.integers(1, MAX_LENGTH), st.integers(0, WORD), st.data())
def test_any_length_can_be_undone_and_follows_the_formula(length: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + 5)
    reference = Reference(length, key)
    places = Permutation(length, key).places(start, stop).tolist()
    assert places == [reference.forwards(place) for place in range(start, stop)]
    assert [reference.backwards(value) for value in places] == list(range(start, stop))


@given(st.integers(1, 5000), st.integers(0, WORD), st.data())
def test_a_part_is_the_same_as_in_the_whole(length: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert Permutation(length, key).places(start, stop).tolist() == order(length, key)[start:stop]


def excess(counts: Iterable[float], expected: float, freedom: int) -> float:
    """How many standard deviations chi-square lies above what chance gives."""
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_few_are_equally_frequent(length: int) -> None:
    seen = Counter(tuple(Reference(length, derive(seed, 0)).order()) for seed in range(1000))
    orders = list(itertools.permutations(range(length)))
    assert excess((seen[one] for one in orders), 1000 / len(orders), len(orders) - 1) < 4


@pytest.mark.parametrize("length", [7, 16, 33, 100])
def test_each_sample_comes_equally_often_at_each_place(length: int) -> None:
    epochs = 600
    counts = np.zeros((length, length))
    for epoch in range(epochs):
        counts[np.arange(length), Reference(length, derive(11, epoch)).order()] += 1
    assert excess(counts.ravel().tolist(), epochs / length, (length - 1) ** 2) < 4


def test_neighbors_do_not_stay_neighbors() -> None:
    shuffled = np.array(order(100_000, derive(3, 0)))
    steps = np.bincount((np.diff(shuffled) % 100_000) // 1000, minlength=100)
    assert excess(steps.tolist(), 99_999 / 100, 99) < 4
    halves = np.bincount(shuffled[:50_000] // 1000, minlength=100)
    assert abs(halves - 500).max() < 100


# ---------------------------------------------------------------------------------------------------- the sampler


class AheadLoader:
    """A loader that has always fetched some batches more than it has given, as one with workers has."""

    def __init__(self, sampler: Iterable[list[int]], ahead: int) -> None:
        self.sampler = sampler
        self.ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        indices = iter(self.sampler)
        fetched = list(itertools.islice(indices, self.ahead))
        for batch in indices:
            fetched.append(batch)
            yield fetched.pop(0)
        yield from fetched


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def batches_of(sampler: ResumableSampler, epochs: int, ahead: int = 3) -> list[tuple[int, list[int]]]:
    """What a training loop sees."""
    loader = AheadLoader(sampler, ahead)
    return [(epoch, batch) for epoch in sampler.epochs(epochs) for batch in sampler.batches(loader)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 23])
def test_an_epoch_has_each_sample_once(length: int, shuffle: bool, drop_last: bool) -> None:
    sampler = ResumableSampler(length, batch_size=4, shuffle=shuffle, seed=9, drop_last=drop_last)
    seen = batches_of(sampler, 3)
    for epoch in range(3):
        batches = [batch for of, batch in seen if of == epoch]
        assert len(batches) == len(sampler)
        assert len(set(flat(batches))) == len(flat(batches)) == (length // 4 * 4 if drop_last else length)
        assert shuffle or flat(batches) == list(range(len(flat(batches))))
    assert (sampler.epoch, sampler.position_samples) == (3, 0)


def test_epochs_and_seeds_differ() -> None:
    one, other = (flat(batch for _, batch in batches_of(ResumableSampler(50, batch_size=5, seed=s), 2)) for s in (1, 2))
    assert len({tuple(one[:50]), tuple(one[50:]), tuple(other[:50]), tuple(other[50:])}) == 4


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_place_can_be_taken_up_again(ahead: int, drop_last: bool) -> None:
    def fresh(seed: int = 3) -> ResumableSampler:
        return ResumableSampler(23, batch_size=5, seed=seed, drop_last=drop_last)

    whole = batches_of(fresh(), 3, ahead)
    for taken in range(len(whole) + 1):
        before = fresh()
        loop = ((epoch, batch) for epoch in before.epochs(3) for batch in before.batches(AheadLoader(before, ahead)))
        head = list(itertools.islice(loop, taken))
        state = before.state_dict()
        after = fresh(seed=99)
        after.load_state_dict(state)
        assert after.state_dict() == state
        assert head + batches_of(after, 3, ahead) == whole


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("length", [20, 22, 23])
def test_batches_have_the_same_numbers_wherever_a_run_resumes(length: int, world_size: int, drop_last: bool) -> None:
    def fresh() -> ResumableSampler:
        return ResumableSampler(length, batch_size=4, drop_last=drop_last, rank=world_size - 1, world_size=world_size)

    def numbered(sampler: ResumableSampler, taken: list[tuple[int, int, list[int]]]) -> Iterator[None]:
        for epoch in sampler.epochs(2):
            loader = AheadLoader(sampler, 3)
            for number, batch in enumerate(sampler.batches(loader), start=sampler.batches_done):
                assert sampler.batches_done == number + 1
                taken.append((epoch, number, batch))
                yield

    whole: list[tuple[int, int, list[int]]] = []
    for _ in numbered(fresh(), whole):
        pass
    assert [number for _, number, _ in whole] == [*range(len(fresh()))] * 2
    for stop in range(len(whole) + 1):
        sampler, resumed = fresh(), fresh()
        taken: list[tuple[int, int, list[int]]] = []
        loop = numbered(sampler, taken)
        for _ in range(stop):
            next(loop)
        resumed.load_state_dict(sampler.state_dict())
        for _ in numbered(resumed, taken):
            pass
        assert taken == whole


def test_batches_of_another_size_are_numbered_to_the_end_of_the_epoch() -> None:
    sampler = ResumableSampler(20, batch_size=4)
    loop = sampler.batches(sampler)
    for _ in range(3):
        next(loop)
    larger = ResumableSampler(20, batch_size=5)
    larger.load_state_dict(sampler.state_dict())
    numbers = [number for number, _ in enumerate(larger.batches(larger), start=larger.batches_done)]
    assert numbers == [2, 3]
    assert len(larger) == 4
    assert larger.batches_done == 0


def test_stream_continues_over_the_end_of_an_epoch() -> None:
    def stream(sampler: ResumableSampler) -> Iterator[list[int]]:
        return sampler.stream(AheadLoader(sampler, 2))

    whole = list(itertools.islice(stream(ResumableSampler(10, batch_size=4)), 12))
    for taken in range(12):
        before = ResumableSampler(10, batch_size=4)
        assert list(itertools.islice(stream(before), taken)) == whole[:taken]
        after = ResumableSampler(10, batch_size=4)
        after.load_state_dict(before.state_dict())
        assert list(itertools.islice(stream(after), 12 - taken)) == whole[taken:]


def test_the_position_has_moved_when_the_loop_has_the_batch() -> None:
    sampler = ResumableSampler(10, batch_size=4)
    positions = [sampler.position_samples for _ in sampler.batches(AheadLoader(sampler, 5))]
    assert positions == [4, 8, 10]


def test_save_after_the_last_batch_resumes_with_an_empty_epoch() -> None:
    sampler = ResumableSampler(8, batch_size=4)
    batches = sampler.batches(sampler)
    next(batches)
    next(batches)
    state = sampler.state_dict()
    assert (state["epoch"], state["position_samples"]) == (0, 8)
    after = ResumableSampler(8, batch_size=4)
    after.load_state_dict(state)
    assert [(epoch, len(list(after.batches(after)))) for epoch in after.epochs(2)] == [(0, 0), (1, 2)]


def test_a_job_that_is_done_has_no_epoch_left() -> None:
    sampler = ResumableSampler(8, batch_size=4)
    batches_of(sampler, 2)
    after = ResumableSampler(8, batch_size=4)
    after.load_state_dict(sampler.state_dict())
    assert list(after.epochs(2)) == []


def test_other_batch_size_resumes_at_the_same_sample() -> None:
    whole = flat(ResumableSampler(23, batch_size=1, seed=3))
    before = ResumableSampler(23, batch_size=5, seed=3)
    head = list(itertools.islice(before.batches(before), 3))
    after = ResumableSampler(23, batch_size=4)
    after.load_state_dict(before.state_dict())
    assert flat(head) + flat(after.batches(after)) == whole


def test_what_is_stored_wins_over_what_was_asked_for() -> None:
    before = ResumableSampler(9, batch_size=2, seed=5, shuffle=False)
    after = ResumableSampler(9, batch_size=2, seed=6, shuffle=True)
    after.load_state_dict(before.state_dict())
    assert flat(after) == list(range(9))
    assert after.seed == 5


def test_the_state_is_plain_and_named() -> None:
    sampler = ResumableSampler(range(9), batch_size=2, seed=5)
    next(iter(sampler.batches(sampler)))
    assert sampler.state_dict() == {
        "version": 1,
        "epoch": 0,
        "position_samples": 2,
        "seed": 5,
        "length": 9,
        "shuffle": True,
    }


def test_another_length_is_refused() -> None:
    state = ResumableSampler(9, batch_size=2).state_dict()
    sampler = ResumableSampler(10, batch_size=2)
    with pytest.raises(MismatchError, match="stored 9 samples, live 10"):
        sampler.load_state_dict(state)
    assert sampler.state_dict()["length"] == 10


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"epoch": -1},
        {"epoch": "0"},
        {"position_samples": 10},
        {"position_samples": 1.0},
        {"seed": 1 << 64},
        {"shuffle": 1},
        {"length": True},
    ],
    ids=str,
)
def test_a_malformed_state_is_refused(change: dict[str, Any]) -> None:
    sampler = ResumableSampler(9, batch_size=2)
    with pytest.raises(UsageError):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    no_states: list[Any] = [{}, [], None, {"version": 1}]
    for state in no_states:
        with pytest.raises(UsageError, match="expected the state of a sampler"):
            sampler.load_state_dict(state)


class TestLoadersIteratedDirectly:
    def test_the_state_is_refused_once_a_batch_was_handed_out(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        assert sampler.state_dict()["position_samples"] == 0
        for _ in AheadLoader(sampler, 1):
            with pytest.raises(UsageError, match=r"iterated directly"):
                sampler.state_dict()
        with pytest.raises(UsageError, match=r"sampler\.batches\(loader\)"):
            sampler.state_dict()

    def test_the_beginning_of_the_next_epoch_is_known_again(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            assert sampler.state_dict()["epoch"] == epoch
            list(AheadLoader(sampler, 1))

    def test_a_look_while_the_loop_is_followed_does_no_harm(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        loader = AheadLoader(sampler, 1)
        batches = sampler.batches(loader)
        first = next(batches)
        looked_at = next(iter(loader))
        with pytest.raises(UsageError):
            sampler.state_dict()
        assert next(batches) == looked_at != first
        assert sampler.state_dict()["position_samples"] == 4

    def test_a_pass_that_is_left_open_does_not_cover_for_it(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        stream = sampler.stream(sampler)
        next(stream)
        list(AheadLoader(sampler, 0))
        with pytest.raises(UsageError, match="iterated directly"):
            sampler.state_dict()

    def test_iterating_the_sampler_gives_the_rest_and_moves_nothing(self) -> None:
        sampler = ResumableSampler(9, batch_size=2, shuffle=False)
        next(iter(sampler.batches(sampler)))
        assert flat(sampler) == flat(sampler) == list(range(2, 9))
        assert sampler.position_samples == 2


def sampler_of_nine() -> ResumableSampler:
    return ResumableSampler(9, batch_size=2, seed=4)


class TestPasses:
    def test_leaving_early_and_coming_back_continues(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        whole = flat(sampler)
        seen = []
        for batch in sampler.batches(sampler):
            seen.append(batch)
            if len(seen) == 2:
                break
        assert flat(seen) + flat(sampler.batches(sampler)) == whole
        assert sampler.epoch == 1

    def test_leaving_early_within_epochs_ends_the_epoch(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        seen = [(epoch, next(iter(sampler.batches(sampler)))) for epoch in sampler.epochs(3)]
        assert [epoch for epoch, _ in seen] == [0, 1, 2]
        assert (sampler.epoch, sampler.position_samples) == (3, 0)

    def test_only_the_newest_pass_can_be_taken_from(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        older, newer = sampler.batches(sampler), sampler.batches(sampler)
        first = next(older)
        second = next(newer)
        with pytest.raises(UsageError, match="another loop over this loader has started"):
            next(older)
        assert next(newer) not in (first, second)
        assert sampler.position_samples == 6

    def test_a_loop_that_asks_for_exactly_the_batches_of_each_epoch_gets_them(self) -> None:
        """It never asks for one more, so it never hears that an epoch has ended."""

        def loop(sampler: ResumableSampler) -> Iterator[list[int]]:
            while True:
                batches = iter(sampler.batches(sampler))
                for _ in range(len(sampler)):
                    yield next(batches)

        sampler = sampler_of_nine()
        whole = list(itertools.islice(sampler.stream(sampler), 13))
        assert list(itertools.islice(loop(sampler_of_nine()), 13)) == whole
        # Of three workers the last batch goes on into the next epoch where fewer were there before.
        odd = ResumableSampler(10, batch_size=3, world_size=3)
        odd.load_state_dict({**odd.state_dict(), "position_samples": 9})
        next(odd.batches(odd))
        assert (odd.epoch, odd.position_samples) == (1, 2)
        next(odd.batches(odd))
        assert (odd.epoch, odd.position_samples) == (1, 5)

    def test_a_loop_of_that_kind_takes_a_stream_over_a_restart(self) -> None:
        whole_of = sampler_of_nine()
        whole = list(itertools.islice(whole_of.stream(whole_of), 13))
        for taken in range(13):
            before, after = sampler_of_nine(), sampler_of_nine()
            head = list(itertools.islice(before.stream(before), taken))
            after.load_state_dict(before.state_dict())
            stream = after.stream(after)
            tail: list[list[int]] = []
            while len(tail) < 13 - taken:
                again = iter(stream)
                tail += [next(again) for _ in range(len(stream))]
            assert head + tail[: 13 - taken] == whole

    def test_a_loop_that_counts_from_0_again_does_not_rewind_what_was_restored(self) -> None:
        whole_of = sampler_of_nine()
        whole = list(itertools.islice(whole_of.stream(whole_of), 20))
        for taken in range(6, 15):
            before, after = sampler_of_nine(), sampler_of_nine()
            head = list(itertools.islice(before.stream(before), taken))
            after.load_state_dict(before.state_dict())
            tail: list[list[int]] = []
            for epoch in range(2):
                after.set_epoch(epoch)
                tail += list(after.batches(after))
            assert head + tail == whole[: taken + len(tail)]
            assert len(tail) > 5
        fresh = sampler_of_nine()
        fresh.set_epoch(3)
        fresh.set_epoch(1)
        assert fresh.epoch == 1, "what was not restored goes wherever it is told to"

    def test_epoch_restored_at_its_end_gives_no_batch_to_epochs(self) -> None:
        before, after = sampler_of_nine(), sampler_of_nine()
        following = iter(before.batches(before))
        for _ in range(len(before)):
            next(following)
        after.load_state_dict(before.state_dict())
        assert [(epoch, len(list(after.batches(after)))) for epoch in after.epochs(3)] == [(0, 0), (1, 5), (2, 5)]

    def test_loading_ends_a_pass_and_moves_a_stream(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        start = sampler.state_dict()
        batches = sampler.batches(sampler)
        first = next(batches)
        sampler.load_state_dict(start)
        with pytest.raises(UsageError, match="another loop over this loader has started"):
            next(batches)
        stream = sampler.stream(AheadLoader(sampler, 2))
        assert next(stream) == first
        assert next(stream) != first
        sampler.load_state_dict(start)
        assert next(stream) == first

    def test_going_back_within_epochs_stays_there(self) -> None:
        sampler = ResumableSampler(4, batch_size=2)
        start = sampler.state_dict()
        epochs = []
        for epoch in sampler.epochs(2):
            epochs.append(epoch)
            list(sampler.batches(sampler))
            if len(epochs) == 1:
                sampler.load_state_dict(start)
        assert epochs == [0, 0, 1]

    def test_a_loop_that_counts_from_0_after_a_restore_is_warned_of_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        sampler.set_epoch(1)
        state = sampler.state_dict()
        sampler.load_state_dict(state)
        for _ in range(2):
            sampler.set_epoch(0)
        assert sampler.epoch == 1
        (record,) = caplog.records
        assert "loader.epochs(n)" in record.getMessage()

    def test_setting_the_present_epoch_keeps_the_position(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        next(iter(sampler.batches(sampler)))
        sampler.set_epoch(0)
        assert sampler.position_samples == 2
        sampler.set_epoch(4)
        assert (sampler.epoch, sampler.position_samples) == (4, 0)

    def test_an_error_of_the_loader_comes_through_and_the_position_stays(self) -> None:
        sampler = ResumableSampler(9, batch_size=2, shuffle=False)

        class Failing:
            def __iter__(self) -> Iterator[list[int]]:
                for batch in sampler:
                    if 4 in batch:
                        raise OSError("cannot read sample 4")
                    yield batch

        with pytest.raises(OSError, match="sample 4"):
            list(sampler.batches(Failing()))
        assert sampler.state_dict()["position_samples"] == 4


class TestLoadersThatCannotBeFollowed:
    def test_one_that_is_not_built_on_the_sampler(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        with pytest.raises(UsageError, match="did not produce"):
            next(sampler.batches(AheadLoader(ResumableSampler(9, batch_size=2), 0)))

    def test_one_that_ends_early(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)

        class Short:
            def __iter__(self) -> Iterator[list[int]]:
                return itertools.islice(iter(sampler), 2)

        with pytest.raises(UsageError, match="ended after 2 of the 5 remaining batches"):
            list(sampler.batches(Short()))

    def test_one_with_a_position_of_its_own(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        with pytest.raises(UsageError, match="saves its own position"):
            sampler.batches(ResumableSampler(9, batch_size=2))

    def test_one_that_does_not_keep_the_order(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        loader = AheadLoader(sampler, 0)
        loader.in_order = False  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="in_order"):
            sampler.stream(loader)


class DrawingLoader(AheadLoader):
    """Draws from the global generators when it begins, as torch's loader does, and notes what."""

    def __init__(self, sampler: Iterable[list[int]]) -> None:
        super().__init__(sampler, 0)
        self.drawn: list[tuple[float, float]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn.append((random.random(), float(np.random.random())))
        return super().__iter__()


def test_beginning_a_pass_does_not_disturb_the_global_generators() -> None:
    sampler = ResumableSampler(9, batch_size=2)
    loader = DrawingLoader(sampler)
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    for _ in sampler.epochs(3):
        list(sampler.batches(loader))
    assert expected == (random.random(), np.random.random())
    assert len(set(loader.drawn)) == 3, "each epoch draws other numbers"


class TestArguments:
    @pytest.mark.parametrize("length", [-1, 1.5, None, iter([]), True, (1 << 62) + 1])
    def test_lengths(self, length: Any) -> None:
        with pytest.raises(UsageError):
            ResumableSampler(length, batch_size=1)

    @pytest.mark.parametrize("batch_size", [0, -1, 1.5, None, True])
    def test_batch_sizes(self, batch_size: Any) -> None:
        with pytest.raises(UsageError):
            ResumableSampler(5, batch_size=batch_size)

    @pytest.mark.parametrize("seed", [-1, 1 << 64, 1.5, None])
    def test_seeds(self, seed: Any) -> None:
        with pytest.raises(UsageError):
            ResumableSampler(5, batch_size=1, seed=seed)

    def test_epochs(self) -> None:
        with pytest.raises(UsageError):
            ResumableSampler(5, batch_size=1).set_epoch(-1)

    def test_nothing_to_give(self) -> None:
        for sampler in (ResumableSampler(0, batch_size=4), ResumableSampler(3, batch_size=4, drop_last=True)):
            assert len(sampler) == 0
            assert [list(sampler.batches(sampler)) for _ in sampler.epochs(2)] == [[], []]
            with pytest.raises(UsageError, match="no batch"):
                sampler.stream(sampler)

    def test_a_length_beyond_memory(self) -> None:
        sampler = ResumableSampler(10**12, batch_size=3)
        seen = flat(itertools.islice(sampler.stream(sampler), 100))
        assert len(set(seen)) == 300
        assert max(seen) > 10**11

    def test_repr(self) -> None:
        sampler = ResumableSampler(5, batch_size=2, seed=3)
        assert repr(sampler) == "ResumableSampler(5, batch_size=2, shuffle=True, seed=3, drop_last=False)"


class TestInACheckpoint:
    def test_goes_there_and_back(self) -> None:
        before = ResumableSampler(9, batch_size=2, seed=5)
        next(iter(before.batches(before)))
        stored = capture_objects({"data": before})
        after = ResumableSampler(9, batch_size=3)
        matching = match_objects({"data": after}, stored.objects, {})
        assert not matching.differences
        matching.apply()
        assert after.state_dict() == before.state_dict()

    def test_another_length_is_a_difference_before_anything_has_changed(self) -> None:
        stored = capture_objects({"data": ResumableSampler(9, batch_size=2)})
        after = ResumableSampler(10, batch_size=2)
        matching = match_objects({"data": after}, stored.objects, {})
        assert matching.differences.wrong_shape == [
            'data: stored 9 samples, live 10; with on_resize="next_epoch" it continues with the next epoch'
        ]
        matching.apply()
        assert after.state_dict() == ResumableSampler(10, batch_size=2).state_dict()

    def test_a_sampler_that_is_not_followed_is_not_saved(self) -> None:
        sampler = ResumableSampler(9, batch_size=2)
        list(sampler)
        with pytest.raises(UsageError, match="iterated directly"):
            capture_objects({"data": sampler})


# Several workers.


def shares(
    samplers: list[ResumableSampler], steps: int | None = None
) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
    """What each worker takes, at most so many batches, and where each stands afterwards."""
    taken = []
    for sampler in samplers:
        batches = sampler.batches(sampler)
        taken.append(list(itertools.islice(batches, steps) if steps is not None else batches))
    return taken, [sampler.state_dict() for sampler in samplers]


def team(length: int, world_size: int, batch_size: int, **options: Any) -> list[ResumableSampler]:
    return [
        ResumableSampler(length, batch_size=batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def in_order(length: int, epochs: int, shuffle: bool) -> list[int]:
    """All samples of some epochs, as one worker alone would take them."""
    alone = ResumableSampler(length, batch_size=1, shuffle=shuffle, seed=3)
    return [batch[0] for _ in alone.epochs(epochs) for batch in alone.batches(alone)]


def joined(taken: list[list[list[int]]]) -> list[int]:
    """What the workers have taken together, batch by batch. All have as many batches, and none is empty."""
    assert len({len(own) for own in taken}) == 1
    assert all(batch for own in taken for batch in own)
    return [index for batch in zip(*taken, strict=True) for own in batch for index in own]


def loop_of(sampler: ResumableSampler, epochs: int) -> Iterator[list[int]]:
    return (batch for _ in sampler.epochs(epochs) for batch in sampler.batches(sampler))


def taken_over(samplers: list[ResumableSampler], states: list[dict[str, Any]]) -> None:
    """Gives each worker what was saved by the one that a restore takes it from."""
    for rank, sampler in enumerate(samplers):
        sampler.load_state_dict(states[rank % len(states)])


TEAMS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=5)


@given(st.integers(1, 120), TEAMS, st.booleans(), st.integers(0, 3))
def test_every_sample_comes_once_per_epoch_across_changing_jobs(
    length: int, teams: list[tuple[int, int, int]], shuffle: bool, ahead: int
) -> None:
    """A job goes on again and again, each time with other workers, another batch, and what each of them saved."""
    seen: list[int] = []
    states = [ResumableSampler(length, batch_size=1, shuffle=shuffle, seed=3).state_dict()]
    for world_size, batch_size, steps in teams:
        samplers = team(length, world_size, max(batch_size, world_size))
        taken_over(samplers, states)
        taken = [list(itertools.islice(one.stream(AheadLoader(one, ahead)), steps)) for one in samplers]
        seen += joined(taken)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        assert states[0]["epoch"] * length + states[0]["position_samples"] == len(seen)
    assert seen == in_order(length, len(seen) // length + 1, shuffle)[: len(seen)]


@given(st.integers(1, 120), TEAMS, st.booleans())
def test_loops_over_epochs_have_as_many_batches_on_all_workers(
    length: int, teams: list[tuple[int, int, int]], shuffle: bool
) -> None:
    """The same by epochs: the last workers go on to the end of the third, and a sample for each at the most beyond."""
    seen: list[int] = []
    states = [ResumableSampler(length, batch_size=1, shuffle=shuffle, seed=3).state_dict()]
    for number, (world_size, batch_size, steps) in enumerate(teams):
        samplers = team(length, world_size, max(batch_size, world_size))
        taken_over(samplers, states)
        loops = [loop_of(sampler, 3) for sampler in samplers]
        is_last = number == len(teams) - 1
        seen += joined([list(loop if is_last else itertools.islice(loop, steps)) for loop in loops])
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
    assert states[0]["epoch"] * length + states[0]["position_samples"] == len(seen)
    assert seen == in_order(length, len(seen) // length + 1, shuffle)[: len(seen)]
    assert len(seen) >= 3 * length
    assert len(seen) - 3 * length < max(world_size for world_size, _, _ in teams)


def test_last_samples_are_joined_by_the_first_of_the_next_epoch() -> None:
    """Two workers stop at 20 of 23, six go on: three samples are left. Then three workers take the rest."""
    pair = team(23, 2, 10, seed=3)
    first, states = shares(pair, 2)
    assert [state["position_samples"] for state in states] == [20, 20]
    six = team(23, 6, 10)
    taken_over(six, states)
    assert [len(own) for own in shares(six)[0]] == [1] * 6
    taken_over(six, states)
    second, states = shares(six, 1)
    assert {(state["epoch"], state["position_samples"]) for state in states} == {(1, 3)}
    three = team(23, 3, 10)
    taken_over(three, states)
    third, states = shares(three)
    assert joined(first) + joined(second) + joined(third) == in_order(23, 2, shuffle=True)
    assert {(state["epoch"], state["position_samples"]) for state in states} == {(2, 0)}


def test_a_position_between_two_epochs_is_that_of_the_next() -> None:
    """A stored place at the very end of an epoch, and a few samples before it, whatever the number of workers."""
    for place in (22, 23):
        six = team(23, 6, 10)
        for sampler in six:
            sampler.load_state_dict({**sampler.state_dict(), "position_samples": place})
        taken = [next(sampler.stream(sampler)) for sampler in six]
        assert all(taken)
        assert {(sampler.epoch, sampler.position_samples) for sampler in six} == {(1, 5 if place == 22 else 10)}


@given(st.integers(0, 300), st.integers(1, 7), st.integers(1, 40), st.booleans())
def test_all_workers_have_as_many_batches_and_as_many_samples(
    length: int, world_size: int, batch_size: int, drop_last: bool
) -> None:
    batch_size = max(batch_size, world_size)
    samplers = team(length, world_size, batch_size, drop_last=drop_last)
    taken, _ = shares(samplers)
    assert [len(own) for own in taken] == [len(sampler) for sampler in samplers]
    together = joined(taken)
    for batch in zip(*taken, strict=True):
        assert max(map(len, batch)) - min(map(len, batch)) <= 1
    alone = flat(ResumableSampler(length, batch_size=batch_size, drop_last=drop_last))
    assert together[: len(alone)] == alone
    # Only data that are fewer than the workers are not enough for one epoch.
    assert len(together) == len(alone) or length < len(together) == world_size


@given(st.integers(0, 30), st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(0, 30), st.integers(0, 90))
def test_a_way_of_many_batches_ends_where_single_ones_do(
    length: int, batch_size: int, world_size: int, drop_last: bool, place: int, batches: int
) -> None:
    cut = Batches(length, max(batch_size, world_size), drop_last, 0, world_size)
    epoch, place = 3, min(place, length)
    moved = cut.move(epoch, place, batches)
    for _ in range(batches if cut.count_from(0) else 0):
        if not cut.count_from(place):
            epoch, place = epoch + 1, 0
        further, place = cut.end_of(place)
        epoch += further
    assert moved == (epoch, place)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0), (0, 9), (0, 1.5), (True, 2)])
def test_workers_that_cannot_share_a_batch_are_refused(rank: Any, world_size: Any) -> None:
    with pytest.raises(UsageError, match="cannot share a batch of 8" if world_size == 9 else "must be a whole number"):
        ResumableSampler(100, batch_size=8, rank=rank, world_size=world_size)
