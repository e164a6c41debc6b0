"""How an array's elements lie in memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from holdfast.format.boxes import strides_of
from holdfast.format.dtypes import MAX_ARRAY_BYTES


class StridesRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a leaf lay in the memory of the worker that stored it, where that was not row-major order.

    Attributes:
        leaf: The leaf's name.
        strides: For each dimension, how many elements lie from one to the next; those of a dense array.
    """

    leaf: str
    strides: tuple[int, ...]


def extent_of(address: int, shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int) -> tuple[int, int]:
    """**Pure.** The addresses between which the elements of an array lie, the last exclusive.

    Args:
        address: Where its first element lies.
        shape: The length of each dimension, none of them 0.
        strides_bytes: The distance from each element to the next.
        item_bytes: What an element takes.
    """
    reaches = [(length - 1) * stride for length, stride in zip(shape, strides_bytes, strict=True)]
    low, high = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return address + low, address + high + item_bytes


def may_share_elements(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """**Pure.** Whether two elements of one array may be the same memory, as in an expanded or a rolling view.

    Such an array cannot take any values that are stored for it. What slicing, stepping and transposing make never
    counts; a view of unusual strides may count although its elements are apart.

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
    """**Pure.** The strides, in elements, of an array in row-major order; a length of 0 counts as 1, as in torch."""
    return strides_of(tuple(max(length, 1) for length in shape), 1)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """**Pure.** True if an array's elements fill one run of memory: without gaps, and none in the place of another.

    Strides of dimensions of length 1 may be anything from 0 to `MAX_ARRAY_BYTES`, and so may all strides of an array
    without elements.

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
    """**Pure.** The dimensions in the order in which they lie in memory, the outermost first.

    It is the order in which torch lays out a copy that preserves the format. A stride of 0 keeps its place.
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
    """**Pure.** The strides of a dense array whose dimensions lie in that order, the outermost first."""
    strides = [0] * len(shape)
    for dimension, stride in zip(order, row_major(tuple(shape[one] for one in order)), strict=True):
        strides[dimension] = stride
    return tuple(strides)


def find_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """**Pure.** The strides of a copy that keeps an array's memory layout; None if that is row-major order.

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
    """**Pure.** The layout of an array that is like another one but for its lengths; None if it is row-major order.

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
