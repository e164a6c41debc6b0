"""State that is saved in one division and restored in another: whatever the two are, the values are the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import holdfast as hf
from holdfast.format.boxes import Box
from holdfast.format.workers import Worker
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage.memory import MemoryStorage
from simulated_job import restore_part, save_job

Array = NDArray[Any]


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Box, tuple[int, ...]]]:
    """Cuts an array along its dimensions: boxes, some of them empty, each with the workers that hold it."""
    cuts = [
        sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) if length else [0, 0]
        for length in shape
    ]
    boxes = [
        Box(tuple(begin for begin, _ in sides), tuple(end - begin for begin, end in sides))
        for sides in itertools.product(*(list(itertools.pairwise(own)) for own in cuts))
    ]
    replicas = draw(st.integers(1, 2))
    ranks = draw(st.permutations(range(len(boxes) * replicas)))
    return [
        (box, tuple(sorted(ranks[number * replicas : (number + 1) * replicas]))) for number, box in enumerate(boxes)
    ]


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
DTYPES = st.sampled_from(["u1", "<i2", "<f4", "<f8"])


def values_of(shape: tuple[int, ...], dtype: str) -> Array:
    return np.arange(1, math.prod(shape) + 1).astype(dtype).reshape(shape)


def slices(box: Box) -> tuple[Any, ...]:
    return (*map(slice, box.offsets, box.ends), ...)


def divide(whole: Array, division: Sequence[tuple[Box, tuple[int, ...]]]) -> list[dict[str, Any]]:
    """The objects of each worker: its box, and something that all have."""
    jobs: dict[int, dict[str, Any]] = {}
    for box, holders in division:
        for rank in holders:
            shard = hf.Shard(whole[slices(box)].copy(), whole.shape, box.offsets, holders=holders)
            jobs[rank] = {"whole": shard, "plain": whole.copy(), "number": 7}
    return [jobs[rank] for rank in range(len(jobs))]


@st.composite
def trips(draw: st.DrawFn) -> tuple[Array, list[Any], list[Any]]:
    shape = draw(SHAPES)
    return values_of(shape, draw(DTYPES)), draw(divisions(shape)), draw(divisions(shape))


@given(trips())
def test_any_division_goes_into_any_other(trip: tuple[Array, list[Any], list[Any]]) -> None:
    whole, before, after = trip
    storage = MemoryStorage()
    manifest = save_job(storage, divide(whole, before))
    opened = open_step(storage, manifest.name.directory, manifest.name)
    assert verify_data(storage, opened) == []
    jobs = divide(np.zeros_like(whole), after)
    for rank, objects in enumerate(jobs):
        restore_part(storage, objects, Worker(rank, len(jobs)))
        assert np.array_equal(objects["plain"], whole)
    for box, holders in after:
        for rank in holders:
            assert np.array_equal(jobs[rank]["whole"].tensor, whole[slices(box)])


@given(trips())
def test_one_process_reads_and_writes_what_many_do(trip: tuple[Array, list[Any], list[Any]]) -> None:
    whole, before, after = trip
    storage = MemoryStorage()
    save_job(storage, divide(whole, before))
    plain: dict[str, Any] = {"whole": np.zeros_like(whole), "plain": np.zeros_like(whole), "number": 0}
    restore_part(storage, plain, Worker(0, 1))
    assert np.array_equal(plain["whole"], whole)
    save_job(storage, [plain], step=2)
    jobs = divide(np.zeros_like(whole), after)
    for rank, objects in enumerate(jobs):
        restore_part(storage, objects, Worker(rank, len(jobs)))
        assert objects["number"] == 7
    for box, holders in after:
        for rank in holders:
            assert np.array_equal(jobs[rank]["whole"].tensor, whole[slices(box)])
