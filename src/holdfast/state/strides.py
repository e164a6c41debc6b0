"""How an array's elements lie in memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence


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
