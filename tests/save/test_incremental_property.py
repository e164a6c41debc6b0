"""Whatever changes when, and whatever is kept: an incremental run restores what a usual one restores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.format.names import StepName
from holdfast.policies import RetentionPolicy
from holdfast.restore.verify import open_step, verify_data
from holdfast.save.incremental import MAX_KEPT_STEPS, MAX_SHARE, SMALL_BYTES, Offer, choose_sources
from holdfast.storage import MemoryStorage

Arrays: TypeAlias = dict[str, np.ndarray]


@dataclass
class World:
    """One run, and the job that saves into it."""

    incremental: bool
    keep: RetentionPolicy
    storage: MemoryStorage = field(default_factory=MemoryStorage)
    step: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process: it goes on from the newest step."""
        self.checkpoint = hf.Checkpoint(arrays={})
        self.manager = hf.CheckpointManager(
            self.storage, self.checkpoint, keep=self.keep, incremental=self.incremental, threads=1
        )
        restored = self.manager.restore()
        self.step = restored.step if restored is not None else 0

    @property
    def arrays(self) -> Arrays:
        return self.checkpoint["arrays"]  # type: ignore[no-any-return]

    def save(self, *, replace: bool = False) -> None:
        self.step += not replace
        self.manager.save(self.step, replace=replace)
        self.manager.wait()

    def go_back(self, step: int) -> None:
        self.arrays.clear()
        self.manager.restore(step)
        self.step = step

    def read(self, step: int) -> Arrays:
        checkpoint = hf.Checkpoint(arrays={})
        with hf.CheckpointManager(self.storage, checkpoint, threads=1) as manager:
            manager.restore(step)
        return checkpoint["arrays"]  # type: ignore[no-any-return]


def shared_steps(usual: World, incremental: World) -> list[int]:
    """The steps that both worlds would restore from the same save.

    What the usual world has, the other one has too. But a step that another one replaced may be on the line again when
    that one has been removed; and here it may have stayed, since something refers to it.
    """
    catalogs = [StoredRun(world.storage).look() for world in (usual, incremental)]
    assert set(catalogs[0].committed) <= set(catalogs[1].committed)
    assert catalogs[0].newest == catalogs[1].newest
    return [name.step for name in catalogs[0].living if name in catalogs[1].living]


NAMES = st.sampled_from("abcde")
VALUES = st.integers(0, 2)
CHANGES = st.one_of(
    st.tuples(st.just("set"), NAMES, VALUES),
    st.tuples(st.just("shape"), NAMES, st.sampled_from([(6,), (2, 3), (), (0, 3), (2000,)])),
    st.tuples(st.just("type"), NAMES, st.sampled_from(["float32", "int32", "float64", "bool"])),
    st.tuples(st.just("drop"), NAMES),
)
MOVES = st.one_of(
    st.just(("save",)),
    st.just(("save",)),
    st.just(("replace",)),
    st.just(("restart",)),
    st.tuples(st.just("back"), st.integers(0, 4)),
)
POLICIES = st.sampled_from([hf.Latest(1), hf.Latest(2), hf.Latest(1) | hf.EveryN(3), hf.All()])


def change(arrays: Arrays, change: tuple[Any, ...]) -> None:
    kind, name, *rest = change
    old = arrays.get(name, np.zeros(6))
    if kind == "set":
        arrays[name] = np.full_like(old, rest[0])
    elif kind == "shape":
        arrays[name] = np.full(rest[0], old.flat[0] if old.size else 0, old.dtype)
    elif kind == "type":
        arrays[name] = old.astype(rest[0])
    else:
        arrays.pop(name, None)


@settings(deadline=None)
@given(keep=POLICIES, rounds=st.lists(st.tuples(st.lists(CHANGES, max_size=3), MOVES), min_size=1, max_size=12))
def test_an_incremental_run_restores_what_a_usual_one_restores(
    keep: RetentionPolicy, rounds: list[tuple[list[tuple[Any, ...]], tuple[Any, ...]]]
) -> None:
    usual, incremental = worlds = (World(False, keep), World(True, keep))
    for changes, (move, *rest) in rounds:
        steps = shared_steps(usual, incremental)
        for world in worlds:
            for one in changes:
                change(world.arrays, one)
            if move == "save":
                world.save()
            elif move == "replace":
                world.save(replace=world.step > 0)
            elif move == "restart":
                world.manager.close()
                world.start()
            elif steps:
                world.go_back(steps[rest[0] % len(steps)])
        assert usual.arrays.keys() == incremental.arrays.keys()
    for world in worlds:
        world.manager.close()
    for step in shared_steps(usual, incremental):
        expected, found = usual.read(step), incremental.read(step)
        assert list(expected) == list(found)
        for name, array in expected.items():
            assert (array.dtype, array.shape) == (found[name].dtype, found[name].shape)
            np.testing.assert_array_equal(array, found[name])
    storage = incremental.storage
    for committed in StoredRun(storage).look().committed:
        assert verify_data(storage, open_step(storage, committed.directory, committed)) == []
        sources = [reference.name for reference in StoredRun(storage).step(committed).manifest().references]
        assert all(source < committed for source in sources)


# Which steps are worth being referred to.

STEPS = st.integers(1, 30).map(lambda step: StepName(step, 1))
SIZES = st.integers(0, 10 * SMALL_BYTES)


@st.composite
def make_offers(draw: st.DrawFn) -> list[Offer]:
    data_bytes = draw(st.dictionaries(STEPS, SIZES, max_size=30))
    names = sorted(data_bytes)
    kept_with: dict[StepName, set[StepName]] = {}
    for place, name in enumerate(names):
        direct = draw(st.lists(st.sampled_from(names[:place]), max_size=4)) if place else []
        kept_with[name] = {name}.union(*(kept_with[other] for other in direct))
    offered = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    return [
        Offer(name, draw(st.integers(0, data_bytes[name])), {other: data_bytes[other] for other in kept_with[name]})
        for name in offered
    ]


@given(offers=make_offers(), wanted=st.frozensets(STEPS))
def test_what_is_kept_for_references_is_bounded(offers: list[Offer], wanted: frozenset[StepName]) -> None:
    chosen = choose_sources(offers, wanted)
    assert chosen <= {offer.name for offer in offers}
    assert len(chosen) <= MAX_KEPT_STEPS
    kept = {name: size for offer in offers if offer.name in chosen for name, size in offer.kept_bytes.items()}
    unwanted = {name: size for name, size in kept.items() if name not in wanted}
    held_bytes = sum(offer.held_bytes for offer in offers if offer.name in chosen)
    assert len(unwanted) <= MAX_KEPT_STEPS
    assert sum(unwanted.values()) <= MAX_SHARE * held_bytes + MAX_KEPT_STEPS * SMALL_BYTES
    assert choose_sources(list(reversed(offers)), wanted) == chosen, "the order in which they are offered means nothing"


def test_those_that_hold_most_are_taken_first() -> None:
    offers = [Offer(StepName(step, 1), 100 * step, {StepName(step, 1): 150 * step}) for step in range(1, 31)]
    assert {name.step for name in choose_sources(offers, ())} == set(range(31 - MAX_KEPT_STEPS, 31))
    everything = {offer.name for offer in offers}
    assert len(choose_sources(offers, everything)) == MAX_KEPT_STEPS, "a reader has them all open"


def test_step_is_kept_for_a_small_part_only_if_it_is_kept_anyway() -> None:
    name = StepName(1, 1)
    offer = Offer(name, 10 * SMALL_BYTES, {name: 30 * SMALL_BYTES})
    assert choose_sources([offer], ()) == frozenset()
    assert choose_sources([offer], {name}) == {name}
    assert choose_sources([Offer(name, 10 * SMALL_BYTES, {name: 21 * SMALL_BYTES})], ()) == {name}
