"""State that is saved in one division and restored in another: whatever the two are, the values are the same."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import holdfast as hf
from holdfast import errors
from holdfast.catalog import StoredRun, StoredStep
from holdfast.cluster.protocol import Cluster
from holdfast.format.names import StepName
from holdfast.format.records import Worker
from holdfast.format.shapes import Box
from holdfast.restore.engine import restore_objects
from holdfast.restore.verify import open_step, verify_data
from holdfast.state import capture_objects
from holdfast.storage import LocalStorage
from holdfast.storage.memory import MemoryStorage
from memory_engine import run_workers
from simulated_job import commit_parts, restore_part, save_job, save_part

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


# Large arrays, of many spans, and arrays that cannot be filled where they are.


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_boxes_of_many_spans(axis: int, transposed: bool) -> None:
    whole = np.arange(3_000_001, dtype=np.float32)[:3_000_000].reshape(1500, 2000)
    storage = MemoryStorage()
    save_job(storage, cut(whole, axis, 4, transposed=False))
    for others in (1, 3):
        for other_axis in (0, 1):
            jobs = cut(np.zeros_like(whole), other_axis, others, transposed)
            for rank, objects in enumerate(jobs):
                restored = restore_part(storage, objects, Worker(rank, others))
                length = whole.shape[other_axis]
                expected = whole.take(range(length * rank // others, length * (rank + 1) // others), other_axis)
                assert np.array_equal(objects["x"].tensor, expected)
                # What is read is what is wanted, and what shares a span with it.
                if axis == other_axis == 0:
                    assert restored.size_bytes <= expected.nbytes + (4 << 20)


def cut(whole: Array, axis: int, workers: int, transposed: bool) -> list[dict[str, Any]]:
    jobs = []
    for rank in range(workers):
        begin, end = (whole.shape[axis] * number // workers for number in (rank, rank + 1))
        part = whole.take(range(begin, end), axis)
        part = np.asfortranarray(part) if transposed else part
        jobs.append({"x": hf.Shard(part, whole.shape, (begin, 0) if axis == 0 else (0, begin))})
    return jobs


def test_replicas_are_shared_out_by_bytes() -> None:
    storage = MemoryStorage()
    state: dict[str, Any] = {f"layer{number}": np.full((512, 1024), number, np.float32) for number in range(20)}
    state |= {f"bias{number}": np.full(64, number, np.float32) for number in range(20)}
    manifest = save_job(storage, [dict(state) for _ in range(4)])
    sizes = [worker.data_bytes for worker in manifest.workers]
    assert sum(sizes) < 20 * (2 << 20) * 1.01
    assert max(sizes) < 1.1 * min(sizes)


# What is each worker's own.


def test_each_worker_has_its_own_back() -> None:
    storage = MemoryStorage()
    save_job(storage, [{"own": hf.PerWorker({"n": rank, "x": np.array([rank])})} for rank in range(3)])
    for rank in range(3):
        array = np.array([-1])
        value = {"n": -1, "x": array}
        events: list[Any] = []
        restore_part(storage, {"own": hf.PerWorker(value)}, Worker(rank, 3), events.append)
        assert value == {"n": rank, "x": array}
        assert array is value["x"]
        assert array.tolist() == [rank]
        assert not [event for event in events if isinstance(event, hf.events.Resized)]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_with_another_number_of_workers_it_stays_as_it_is(workers: int) -> None:
    storage = MemoryStorage()
    save_job(storage, [{"own": hf.PerWorker({"n": rank}), "x": np.ones(2)} for rank in range(3)])
    for rank in range(workers):
        objects: dict[str, Any] = {"own": hf.PerWorker({"n": -1}), "x": np.zeros(2)}
        events: list[Any] = []
        restore_part(storage, objects, Worker(rank, workers), events.append)
        assert objects["own"].value == {"n": -1}
        assert objects["x"].tolist() == [1, 1]
        (event,) = (event for event in events if isinstance(event, hf.events.Resized))
        assert (event.stored_workers, event.workers, event.left, event.reseeded) == (3, workers, ("own",), ())
        assert "was saved by 3 workers" in str(event)


@pytest.mark.parametrize("way", ["manager", "resumable", "WorkerTrainingState"])
def test_another_number_of_workers_may_be_refused(tmp_path: Path, way: str) -> None:
    x = np.ones(2)

    def save(cluster: Cluster) -> None:
        if way == "WorkerTrainingState":
            with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(x=x), cluster=cluster, on_resize="refuse") as state:
                state.back_up(3)
            return
        with hf.CheckpointManager(tmp_path, hf.Checkpoint(x=x), cluster=cluster, on_resize="refuse") as manager:
            manager.save(30).wait_committed()
            restored = manager.restore()
            assert restored is not None
            assert restored.workers == 2
            assert restored.path == str(tmp_path / "step-000000030.g0001")
            assert StoredStep(LocalStorage(restored.path), "").index(restored.manifest, 1).rank == 1

    def restore(on_resize: Any) -> None:
        if way == "manager":
            with hf.CheckpointManager(tmp_path, hf.Checkpoint(x=x), cluster="alone", on_resize=on_resize) as manager:
                manager.restore()
        elif way == "resumable":
            with hf.resumable(tmp_path, x=x, cluster="alone", on_resize=on_resize):
                pass
        else:
            with hf.WorkerTrainingState(tmp_path, hf.Checkpoint(x=x), cluster="alone", on_resize=on_resize) as state:
                state.restore()

    run_workers(2, save)
    x[:] = 0
    with pytest.raises(errors.MismatchError, match="was saved by 2 workers, but this job has 1") as caught:
        restore("refuse")
    assert "the same number of workers" in caught.value.hint
    assert x.tolist() == [0, 0]
    with pytest.raises(errors.UsageError, match=r"on_resize must be .* got 'never'"):
        restore("never")
    restore("allow")
    assert x.tolist() == [1, 1]


def test_random_generators_are_each_workers_own() -> None:
    storage = MemoryStorage()
    drawn = []
    jobs = [{"rng": hf.RNG()} for _ in range(2)]
    name = StepName(1, StoredRun(storage).open_generation())
    receipts = []
    for rank, objects in enumerate(jobs):
        random.seed(rank)
        np.random.seed(rank)
        receipts.append(save_part(storage, objects, name, Worker(rank, 2)))
        drawn.append((random.random(), np.random.rand()))
    commit_parts(storage, receipts, name)
    for rank in range(2):
        restore_part(storage, {"rng": hf.RNG()}, Worker(rank, 2))
        assert (random.random(), np.random.rand()) == drawn[rank]
    # With more workers or fewer, each draws other numbers, and the same whenever it is restored.
    for workers in (1, 3):
        draws = []
        for rank in (*range(workers), *range(workers)):
            events: list[Any] = []
            restore_part(storage, {"rng": hf.RNG()}, Worker(rank, workers), events.append)
            draws.append((random.random(), np.random.rand()))
            (event,) = (event for event in events if isinstance(event, hf.events.Resized))
            assert event.reseeded == ("rng",)
        assert draws[:workers] == draws[workers:]
        assert len({*drawn, *draws}) == 2 + workers


def test_what_is_shared_is_not_ones_own() -> None:
    shard = hf.Shard(np.zeros(2), (4,), (0,))
    with pytest.raises(errors.UnsupportedValueError, match="within PerWorker"):
        capture_objects({"own": hf.PerWorker([shard])}, worker=Worker(0, 2))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_array_that_is_both_shared_and_a_workers_own_is_refused(names: tuple[str, str]) -> None:
    """Each would be written, and a restore could not tell which of the two it is to hold."""
    both = np.zeros(3)
    objects = {names[0]: both, names[1]: hf.PerWorker({"view": both})}
    with pytest.raises(
        errors.UnsupportedValueError, match=r"an array that is also \w+(/view~w0)?, one of the two"
    ) as caught:
        capture_objects({name: objects[name] for name in sorted(objects)}, worker=Worker(0, 2))
    assert "PerWorker" in caught.value.message
    capture_objects(objects)
    # Nothing is no memory.
    capture_objects({"a": np.zeros(0), "b": hf.PerWorker({"view": np.zeros(0)})}, worker=Worker(0, 2))


# What a user may do wrong.


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([1, 2], (4,), (0,)), "needs a tensor or an array"),
        ((np.zeros(2), (4,), (3,)), "is outside of"),
        ((np.zeros(2), (4, 4), (0,)), "dimensions"),
        ((np.zeros(2), (4,), (0.5,)), "whole numbers"),
        ((np.zeros(2), 4, (0,)), "whole numbers"),
    ],
)
def test_shards_that_cannot_be(arguments: Any, problem: str) -> None:
    with pytest.raises(errors.UsageError, match=problem):
        hf.Shard(*arguments)


def test_a_part_needs_other_workers() -> None:
    with pytest.raises(errors.UnsupportedValueError, match="there is no other") as caught:
        capture_objects({"x": [hf.Shard(np.zeros(2), (4,), (0,))]})
    assert caught.value.path == "x/0"
    with pytest.raises(errors.UnsupportedValueError, match="names the workers"):
        capture_objects({"x": hf.Shard(np.zeros(2), (4,), (0,), holders=(1, 2))}, worker=Worker(0, 3))
    with pytest.raises(errors.UnsupportedValueError, match="names the workers"):
        capture_objects({"x": hf.Shard(np.zeros(2), (4,), (0,), holders=(0, 3))}, worker=Worker(0, 3))


def test_other_shapes_and_types_are_differences() -> None:
    storage = MemoryStorage()
    save_job(storage, cut(np.zeros((4, 4)), 0, 2, transposed=False))
    for live in (hf.Shard(np.zeros((2, 4)), (6, 4), (0, 0)), hf.Shard(np.zeros((2, 4), np.float32), (4, 4), (0, 0))):
        with pytest.raises(errors.MismatchError, match=r"stored (\[4, 4\]|F64), live (\[6, 4\]|F32)"):
            restore_part(storage, {"x": live}, Worker(0, 2))


def test_a_gap_is_named() -> None:
    storage = MemoryStorage()
    save_job(storage, [{"x": hf.Shard(np.zeros(2), (6,), (0,))}, {"x": hf.Shard(np.zeros(2), (6,), (4,))}])
    with pytest.raises(errors.NoWholeCheckpointError, match=r"'x': no worker has 2 of the elements of \[0:6\]"):
        restore_objects(
            storage, {"x": np.zeros(6)}, step=None, select=None, strict=True, threads=1, emit=lambda event: None
        )


class CountingStorage(MemoryStorage):
    """Notes which indexes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.indexes: list[str] = []

    def read(self, path: str, limit_bytes: int) -> bytes:
        if "/index-" in path:
            self.indexes.append(path)
        return super().read(path, limit_bytes)


@pytest.mark.parametrize("after", [16, 24, 48])
def test_another_number_of_workers_reads_few_indexes(after: int) -> None:
    storage, before = CountingStorage(), 32
    rows = np.arange(96.0 * 2).reshape(96, 2)
    each = 96 // before
    save_job(storage, [{"rows": hf.Shard(rows[each * one :][:each], rows.shape, (each * one, 0))} for one in range(32)])
    each = 96 // after
    for rank in range(after):
        storage.indexes.clear()
        shard = hf.Shard(np.zeros((each, 2)), rows.shape, (each * rank, 0))
        restore_part(storage, {"rows": shard}, Worker(rank, after))
        assert np.array_equal(shard.tensor, rows[each * rank :][:each])
        # Its own, those that hold its rows, and one or two beside them.
        assert len(storage.indexes) <= 1 + before // after + 3
