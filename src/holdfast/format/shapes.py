"""Splits arrays into boxes, and describes their elements in memory. Pure.

An array of n dimensions is split into boxes by cuts along its dimensions. A box has offsets, one for each dimension,
and a shape of its own. An array without dimensions has one box, without offsets and lengths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from holdfast.format.dtypes import MAX_ARRAY_BYTES


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """A part of an array.

    Attributes:
        offsets: For each dimension, where the box begins in the array, in elements.
        shape: For each dimension, how many elements of the array it covers.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """For each dimension, where the box ends in the array, exclusive."""
        return tuple(offset + length for offset, length in zip(self.offsets, self.shape, strict=True))

    @property
    def elements(self) -> int:
        """How many elements it holds."""
        return math.prod(self.shape)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Returns True if it is all of an array of that shape."""
        return self.shape == tuple(shape) and not any(self.offsets)

    def __str__(self) -> str:
        ranges = (f"{offset}:{end}" for offset, end in zip(self.offsets, self.ends, strict=True))
        return f"[{', '.join(ranges)}]"


def whole_box(shape: Sequence[int]) -> Box:
    """**Pure.** Returns the box that is all of an array."""
    return Box((0,) * len(shape), tuple(shape))


def find_box_problem(box: Box, shape: Sequence[int]) -> str:
    """**Pure.** Returns why a box cannot be a part of an array of that shape; empty if it can."""
    if not len(box.offsets) == len(box.shape) == len(shape):
        return f"a box of {len(box.shape)} dimensions at {len(box.offsets)} offsets, in {len(shape)} dimensions"
    for offset, length, limit in zip(box.offsets, box.shape, shape, strict=True):
        if offset < 0 or length < 0 or offset + length > limit:
            return f"{box} is outside of {list(shape)}"
    return ""


def intersect(one: Box, other: Box) -> Box | None:
    """**Pure.** Returns the intersection of two boxes of one array; None if it is empty."""
    begins = tuple(map(max, one.offsets, other.offsets))
    shape = tuple(map(int.__sub__, map(min, one.ends, other.ends), begins))
    return Box(begins, shape) if all(length > 0 for length in shape) else None


def shift(box: Box, origin: Sequence[int]) -> Box:
    """**Pure.** Returns the same box relative to another one that begins at `origin`."""
    return Box(tuple(map(int.__sub__, box.offsets, origin)), box.shape)


def split_box(box: Box, parts: int) -> list[Box]:
    """**Pure.** Splits a box into parts that are contiguous in it, as even as possible.

    It is split along its first dimension that is longer than 1, so there may be fewer parts than requested.

    Args:
        box: The box; an empty one stays whole.
        parts: How many parts there should be, at least 1.
    """
    dimension = next((number for number, length in enumerate(box.shape) if length > 1), None)
    if dimension is None:
        return [box]
    length = box.shape[dimension]
    parts = min(parts, length)
    cuts = [length * number // parts for number in range(parts + 1)]
    return [
        Box(
            (*box.offsets[:dimension], box.offsets[dimension] + begin, *box.offsets[dimension + 1 :]),
            (*box.shape[:dimension], end - begin, *box.shape[dimension + 1 :]),
        )
        for begin, end in itertools.pairwise(cuts)
    ]


def byte_ranges(shape: Sequence[int], box: Box, item_bytes: int, gap_bytes: int = 1) -> Iterator[tuple[int, int]]:
    """**Pure.** Returns the ranges of a box in an array's bytes, in order, ends exclusive.

    Args:
        shape: The array, whose elements are in row-major order.
        box: The box; an empty one has no range.
        item_bytes: The bytes of one element.
        gap_bytes: Ranges with fewer bytes than this between them are joined, including the bytes between.
    """
    if not box.elements:
        return
    strides = strides_of(shape, item_bytes)
    begin = sum(map(int.__mul__, box.offsets, strides))
    extent = item_bytes
    # From the last dimension on, ranges are one as long as the gaps are small; they never get smaller further out.
    dimension = len(shape)
    while dimension and (box.shape[dimension - 1] == 1 or strides[dimension - 1] - extent < gap_bytes):
        dimension -= 1
        extent += (box.shape[dimension] - 1) * strides[dimension]
    outer = (
        range(0, length * stride, stride)
        for length, stride in zip(box.shape[:dimension], strides[:dimension], strict=True)
    )
    for steps in itertools.product(*outer):
        first = begin + sum(steps)
        yield first, first + extent


def strides_of(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """**Pure.** Returns for each dimension of a row-major array the bytes from one element to the next."""
    lengths = [item_bytes, *reversed(shape[1:])] if shape else []
    return tuple(reversed(list(itertools.accumulate(lengths, int.__mul__))))


def split_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """**Pure.** Returns the boxes that a range of an array's elements consists of, in order.

    There are at most two for each dimension, less one.

    Args:
        shape: The array, whose elements are counted in row-major order.
        begin: The first of them.
        end: The end, exclusive; at most the number of elements.
    """
    if begin >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if first == last:
        yield from _in_row(shape, first, begin - first * row, end - first * row)
        return
    if begin > first * row:
        yield from _in_row(shape, first, begin - first * row, row)
        first += 1
    rows = end // row
    if rows > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (rows - first, *shape[1:]))
    if end > rows * row:
        yield from _in_row(shape, rows, 0, end - rows * row)


def _in_row(shape: Sequence[int], number: int, begin: int, end: int) -> Iterator[Box]:
    for box in split_range(shape[1:], begin, end):
        yield Box((number, *box.offsets), (1, *box.shape))


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """**Pure.** Returns the positions of two boxes in the sequence that have an element in common; None if none do.

    Boxes on a grid, such as shards, are separated by one dimension after the other, without comparing all pairs.
    """
    filled = [place for place, box in enumerate(boxes) if box.elements]
    if len(filled) < 2:
        return None
    clusters = [filled]
    for dimension in range(len(boxes[filled[0]].shape)):
        clusters = [part for cluster in clusters for part in _clusters(boxes, cluster, dimension) if len(part) > 1]
    for cluster in clusters:
        for one, other in itertools.combinations(cluster, 2):
            if intersect(boxes[one], boxes[other]):
                return one, other
    return None


def _clusters(boxes: Sequence[Box], places: list[int], dimension: int) -> Iterator[list[int]]:
    """Splits a cluster along one dimension wherever no box reaches across."""
    ordered = sorted(places, key=lambda place: boxes[place].offsets[dimension])
    cluster: list[int] = []
    reach = 0
    for place in ordered:
        box = boxes[place]
        if cluster and box.offsets[dimension] >= reach:
            yield cluster
            cluster, reach = [], 0
        cluster.append(place)
        reach = max(reach, box.offsets[dimension] + box.shape[dimension])
    if cluster:
        yield cluster


class StridesRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The strides of a leaf in the memory of the worker that stored it, if that was not row-major order.

    Attributes:
        leaf: The leaf's name.
        strides: For each dimension, the distance in elements from one to the next; those of a dense array.
    """

    leaf: str
    strides: tuple[int, ...]


def extent_of(address: int, shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int) -> tuple[int, int]:
    """**Pure.** Returns the addresses between which an array's elements are, the last exclusive.

    Args:
        address: The address of its first element.
        shape: The length of each dimension, none of them 0.
        strides_bytes: The distance from each element to the next.
        item_bytes: The bytes of an element.
    """
    reaches = [(length - 1) * stride for length, stride in zip(shape, strides_bytes, strict=True)]
    low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return address + low, address + high + item_bytes


def may_share_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """**Pure.** Returns True if two elements of one array may be the same memory, as in an expanded or a rolling view.

    Such an array cannot hold arbitrary stored values. Views made by slicing, stepping and transposing never count; a
    view of unusual strides may count although its elements are distinct.

    Args:
        shape: The length of each dimension, none of them 0.
        strides: The distance from each element to the next, in elements or in bytes.
    """
    reach = 0
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride <= reach:
                return True
            reach += stride * (length - 1)
    return False


@lru_cache(maxsize=1 << 12)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """**Pure.** Returns the strides, in elements, of a row-major array; a length of 0 counts as 1, as in torch."""
    return strides_of(tuple(max(length, 1) for length in shape), 1)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """**Pure.** Returns True if an array's elements fill one run of memory, without gaps or overlaps.

    Strides of dimensions of length 1 may be anything from 0 to `MAX_ARRAY_BYTES`, and all those of an empty array.

    Args:
        shape: The length of each dimension.
        strides: The distance from each element to the next, in elements.
    """
    if len(strides) != len(shape) or not all(0 <= stride <= MAX_ARRAY_BYTES for stride in strides):
        return False
    if 0 in shape:
        return True
    reach = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != reach:
                return False
            reach *= length
    return True


def order_dimensions(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """**Pure.** Returns the dimensions in their order in memory, the outermost first.

    It is the order in which torch lays out a copy that preserves the format. A stride of 0 keeps its position.
    """
    innermost_first = list(reversed(range(len(shape))))
    for first in range(1, len(shape)):
        place = first
        for other in reversed(range(first)):
            one, two = innermost_first[other], innermost_first[place]
            if not strides[one] or not strides[two]:
                continue
            apart = abs(strides[one]) - abs(strides[two])
            if apart < 0:
                break
            if apart > 0 or shape[one] > shape[two]:
                innermost_first[other], innermost_first[place] = two, one
                place = other
    return tuple(reversed(innermost_first))


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """**Pure.** Returns the strides of a dense array whose dimensions are in that order, the outermost first."""
    strides = [0] * len(shape)
    for dimension, stride in zip(order, row_major(tuple(shape[one] for one in order)), strict=True):
        strides[dimension] = stride
    return tuple(strides)


def find_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """**Pure.** Returns the strides of a copy that keeps an array's memory layout; None if that is row-major order.

    A dense array keeps its strides. Any other gets those of a dense array with the same order of dimensions.

    Args:
        shape: The length of each dimension.
        strides: The distance from each element to the next, in elements.
    """
    plain = row_major(shape)
    if strides == plain:
        return None
    kept = strides if is_dense(shape, strides) else strides_in_order(shape, order_dimensions(shape, strides))
    return None if kept == plain else kept


def fit_layout(shape: tuple[int, ...], strides: tuple[int, ...], to: tuple[int, ...]) -> tuple[int, ...] | None:
    """**Pure.** Returns the layout of an array that differs from another in its lengths; None if it is row-major order.

    Args:
        shape: The lengths of the other.
        strides: Its strides.
        to: The lengths of this one.
    """
    if to == shape:
        return strides
    if len(to) != len(shape):
        return None
    fitted = strides_in_order(to, order_dimensions(shape, strides))
    return None if fitted == row_major(to) else fitted
