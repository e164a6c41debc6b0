"""Boxes of arrays, held against what NumPy makes of the same slices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.shapes import (
    Box,
    byte_ranges,
    find_box_problem,
    find_overlap,
    intersect,
    shift,
    split_box,
    split_range,
    strides_of,
    whole_box,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    begins = [draw(st.integers(0, length)) for length in shape]
    ends = [draw(st.integers(begin, length)) for begin, length in zip(begins, shape, strict=True)]
    return Box(tuple(begins), tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


@st.composite
def shapes_with_boxes(draw: st.DrawFn, count: int = 1) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(offset, end) for offset, end in zip(box.offsets, box.ends, strict=True))


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


def elements(shape: tuple[int, ...], box: Box) -> set[int]:
    return set(numbered(shape)[slices(box)].reshape(-1).tolist())


@given(shapes_with_boxes(2))
def test_what_two_boxes_have_in_common(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (one, other) = case
    common = intersect(one, other)
    expected = elements(shape, one) & elements(shape, other)
    assert (elements(shape, common) if common else set()) == expected
    if common:
        part = numbered(shape)[slices(one)]
        assert set(part[slices(shift(common, one.offsets))].reshape(-1).tolist()) == expected


@given(shapes_with_boxes(), st.integers(1, 7))
def test_the_parts_of_a_box(case: tuple[tuple[int, ...], list[Box]], parts: int) -> None:
    shape, (box,) = case
    found = split_box(box, parts)
    assert 1 <= len(found) <= parts
    assert list(itertools.chain.from_iterable(numbered(shape)[slices(part)].reshape(-1) for part in found)) == list(
        numbered(shape)[slices(box)].reshape(-1)
    )
    sizes = [part.elements for part in found]
    longest = max((length for length in box.shape if length > 1), default=1)
    assert len(found) == 1 or max(sizes) - min(sizes) <= box.elements // max(1, min(longest, len(found)))
    assert all(numbered(box.shape)[slices(shift(part, box.offsets))].flags.c_contiguous for part in found)


@given(shapes_with_boxes(), st.sampled_from([1, 2, 4]), st.integers(1, 40))
def test_byte_ranges_cover_exactly_the_bytes_of_a_box(
    case: tuple[tuple[int, ...], list[Box]], item_bytes: int, gap_bytes: int
) -> None:
    shape, (box,) = case
    whole = np.zeros((*shape, item_bytes), np.uint8)
    whole[slices(box)] = 1
    wanted = np.flatnonzero(whole.reshape(-1)).tolist()
    ranges = list(byte_ranges(shape, box, item_bytes, gap_bytes))
    covered = [place for begin, end in ranges for place in range(begin, end)]
    assert set(wanted) <= set(covered)
    assert len(covered) == len(set(covered))
    assert all(other[0] - one[1] >= gap_bytes for one, other in itertools.pairwise(ranges))
    if gap_bytes == 1:
        assert covered == wanted
    # What is read along is less than a gap in any place.
    for place in set(covered) - set(wanted):
        before = max((byte for byte in wanted if byte < place), default=None)
        after = min((byte for byte in wanted if byte > place), default=None)
        assert before is not None
        assert after is not None
        assert after - before - 1 < gap_bytes


@given(SHAPES, st.data())
def test_the_boxes_of_a_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    found = list(split_range(shape, begin, end))
    assert all(not find_box_problem(box, shape) and box.elements for box in found)
    assert [n for box in found for n in numbered(shape)[slices(box)].reshape(-1).tolist()] == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(shapes_with_boxes(6))
def test_boxes_that_overlap_are_found(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    pairs = {
        (one, other)
        for one, other in itertools.combinations(range(len(boxes)), 2)
        if elements(shape, boxes[one]) & elements(shape, boxes[other])
    }
    found = find_overlap(boxes)
    assert (found is None) == (not pairs)
    if found is not None:
        assert tuple(sorted(found)) in pairs


def test_a_large_grid_is_looked_through_quickly() -> None:
    boxes = [Box((row, column), (1, 4)) for row in range(100) for column in range(0, 400, 4)]
    assert find_overlap(boxes) is None
    found = find_overlap([*boxes, Box((50, 7), (1, 1))])
    assert found is not None
    assert len(boxes) in found


@given(SHAPES, st.sampled_from([1, 2, 8]))
def test_strides_are_those_of_numpy(shape: tuple[int, ...], item_bytes: int) -> None:
    if math.prod(shape):
        assert strides_of(shape, item_bytes) == np.empty(shape, f"V{item_bytes}").strides


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((0,), (3,)), (2,)),
        (Box((2,), (1,)), (2,)),
        (Box((-1,), (1,)), (2,)),
        (Box((0,), (-1,)), (2,)),
        (Box((0, 0), (1,)), (2,)),
        (Box((0,), (1,)), ()),
    ],
)
def test_boxes_that_cannot_be(box: Box, shape: tuple[int, ...]) -> None:
    assert find_box_problem(box, shape)


@given(shapes_with_boxes())
def test_boxes_that_can_be(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    assert not find_box_problem(box, shape)
    assert box.is_whole(shape) == (box == whole_box(shape))
