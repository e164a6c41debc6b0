"""What is remembered from capture to capture, and from snapshot to snapshot, against doing all of it anew."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.process.worker_pool import WorkerPool
from holdfast.save.image import HostBuffer, Stager
from holdfast.state import CaptureCache, Captured, capture_objects
from repetitions import repeated

COUNT = 40


def fresh(kind: str, number: int) -> Any:
    if kind == "numpy":
        return np.full(3 + number % 3, number, np.float32)
    return torch.full((3 + number % 3,), float(number))


def change(draw: Any, objects: dict[str, Any], kind: str) -> None:
    """Changes the live state in one of the ways in which programs do."""
    states: dict[str, Any] = objects["states"]
    inner = [part for part in states.values() if type(part) is dict and part]
    bank: dict[str, Any] = draw(st.sampled_from([objects["bank"], states, *inner[:3]]))
    name = draw(st.sampled_from(sorted(bank, key=str)))
    what = draw(st.sampled_from(CHANGES))
    array = bank[name]
    if what == "values" and isinstance(array, (np.ndarray, torch.Tensor)):
        array[...] = draw(st.integers(0, 9))
    elif what == "another":
        bank[name] = fresh(kind, draw(st.integers(0, 9)))
    elif what == "no array":
        bank[name] = draw(st.integers(0, 9))
    elif what == "of the other library":
        bank[name] = fresh("torch" if kind == "numpy" else "numpy", 1)
    elif what == "alias within":
        bank[name] = bank[draw(st.sampled_from(sorted(bank, key=str)))]
    elif what == "alias before":
        objects["before"] = array
    elif what == "alias behind":
        objects["list"][0] = array
    elif what == "strided":
        bank[name] = fresh(kind, 2)[::2]
    elif what == "empty":
        bank[name] = fresh(kind, 2)[:0]
    elif what == "remove and add":
        bank["new"] = bank.pop(name)
    elif what == "other order":
        objects["bank"] = dict(sorted(objects["bank"].items(), key=lambda item: hash((item[0], 7))))
    elif what == "an object's name taken":
        objects["bank/" + name] = fresh(kind, 4)
    elif what == "other memory" and isinstance(array, torch.Tensor):
        array.data = array.data.clone()
    elif what == "other type in place" and isinstance(array, torch.Tensor):
        array.data = array.data.to(torch.float64)
    elif what == "other shape in place" and isinstance(array, torch.Tensor):
        array.unsqueeze_(0)
    elif what == "a dict":
        bank[name] = {"only": fresh(kind, 5)}
    elif what == "the same dict twice" and all(bank is not part for part in inner):
        bank[name] = states[draw(st.sampled_from(sorted(states, key=str)))]
    elif what == "a key that is equal":
        bank[draw(st.sampled_from([1, True, 1.0]))] = fresh(kind, 5)
    elif what == "a dict of its own kind":
        bank[name] = OrderedDict(only=fresh(kind, 5))
    elif what == "no dict any more":
        bank[name] = {}
    elif what == "conjugate" and isinstance(array, torch.Tensor):
        bank[name] = torch.tensor([1 + 2j]).conj()


CHANGES = [
    "nothing",
    "values",
    "another",
    "no array",
    "of the other library",
    "alias within",
    "alias before",
    "alias behind",
    "strided",
    "empty",
    "remove and add",
    "other order",
    "an object's name taken",
    "other memory",
    "other type in place",
    "other shape in place",
    "conjugate",
    "a dict",
    "the same dict twice",
    "a key that is equal",
    "a dict of its own kind",
    "no dict any more",
]


def assert_same_capture(found: Captured, expected: Captured) -> None:
    assert found.names == expected.names
    assert found.specs == expected.specs
    assert found.addresses == expected.addresses
    assert found.backends == expected.backends
    assert found.objects == expected.objects
    assert [id(array) for array in found.arrays] == [id(array) for array in expected.arrays]


@settings(deadline=None, max_examples=repeated(150, in_gate=40))
@given(st.data(), st.sampled_from(["numpy", "torch"]))
def test_captures_and_snapshots_are_as_if_nothing_was_remembered(data: st.DataObject, kind: str) -> None:
    objects: dict[str, Any] = {
        "before": fresh(kind, 1),
        "bank": {f"a{number}": fresh(kind, number) for number in range(COUNT)},
        "list": [fresh(kind, number) for number in range(COUNT)],
        "states": {f"p{number}": {"mean": fresh(kind, number), "square": fresh(kind, 2)} for number in range(COUNT)},
    }
    captures = CaptureCache()
    stager = Stager(HostBuffer())
    pool = WorkerPool(2, "stage")
    pool.start()
    try:
        for step in range(data.draw(st.integers(2, 6))):
            found = capture_objects(objects, captures)
            expected = capture_objects(objects)
            assert_same_capture(found, expected)
            staging = stager.stage(found, 10**step)
            pool.run(staging.copies_now())
            renewed = Stager(HostBuffer()).stage(expected, 10**step)
            pool.run(renewed.copies_now())
            assert staging.snapshot.layout == renewed.snapshot.layout
            assert bytes(staging.snapshot.image) == bytes(renewed.snapshot.image)
            change(data.draw, objects, kind)
    finally:
        pool.close()


def test_the_image_holds_what_each_array_says_of_itself() -> None:
    """Plain moves against what the library itself makes of an array."""
    arrays = {f"t{n}": torch.randn(n * 7000 + 1) for n in range(8)} | {"big": torch.randn(6_000_000)}
    arrays |= {"strided": torch.randn(40, 50).t(), "half": torch.randn(9).to(torch.bfloat16), "none": torch.empty(0, 3)}
    captured = capture_objects({"x": arrays})
    pool = WorkerPool(3, "stage")
    pool.start()
    staging = Stager(HostBuffer()).stage(captured, 1)
    pool.run(staging.copies_now())
    pool.close()
    image = staging.snapshot.image
    for place in staging.snapshot.layout.places:
        array = arrays[place.name.removeprefix("x/")]
        assert bytes(image[place.begin : place.end]) == array.contiguous().view(torch.uint8).numpy().tobytes()
    assert not any(image[staging.snapshot.layout.size_bytes :])


SIZES = st.one_of(st.integers(0, 9), st.integers(1000, 60_000), st.sampled_from([131_071, 131_072, 131_073, 3 << 20]))


@settings(deadline=None, max_examples=repeated(60, in_gate=20))
@given(st.lists(st.tuples(SIZES, st.integers(1, 70), st.sampled_from(["plain", "strided", "view"])), max_size=6))
def test_runs_of_any_length_of_arrays_of_any_size(parts: list[tuple[int, int, str]]) -> None:
    """Small arrays that become neighbours are copied by one call; these against each array's own bytes."""
    random = np.random.default_rng(7)
    memory = random.integers(0, 256, 4 << 20, np.uint8)
    arrays: dict[str, Any] = {}
    for number, (size_bytes, count, kind) in enumerate(parts):
        for one in range(count if size_bytes < 1 << 17 else 1):
            array = memory[: 2 * size_bytes : 2] if kind == "strided" and size_bytes < 2 << 20 else memory[:size_bytes]
            arrays[f"{number}-{one}"] = array.copy() if kind == "plain" else array[: max(0, len(array) - one)]
    captured = capture_objects({"x": arrays})
    pool = WorkerPool(2, "stage")
    pool.start()
    try:
        staging = Stager(HostBuffer()).stage(captured, 1)
        pool.run(staging.copies_now())
    finally:
        pool.close()
    places = staging.snapshot.layout.places
    by_name = dict(zip(captured.names, captured.arrays, strict=True))
    for place in places:
        assert bytes(staging.snapshot.image[place.begin : place.end]) == by_name[place.name].tobytes(), place.name


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_nothing_is_kept_alive(kind: str) -> None:
    arrays = {f"a{number}": fresh(kind, number) for number in range(COUNT)}
    gone = weakref.ref(arrays["a0"])
    captures = CaptureCache()
    stager = Stager(HostBuffer())
    pool = WorkerPool(1, "stage")
    pool.run(stager.stage(capture_objects({"x": arrays}, captures), 1).copies_now())
    assert captures.trees
    del arrays
    gc.collect()
    assert gone() is None


def test_long_container_without_arrays_is_captured_again_each_time() -> None:
    """As the state of an optimizer that has been looked into before its first step."""
    objects: dict[str, Any] = {"state": {str(number): {} for number in range(COUNT)}}
    cache = CaptureCache()
    first, second = capture_objects(objects, cache), capture_objects(objects, cache)
    assert first.objects == second.objects
    assert first.objects["state"].keys() == objects["state"].keys()
