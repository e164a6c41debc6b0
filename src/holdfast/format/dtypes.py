"""Element types, named as in safetensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

ITEM_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
}
"""Bytes per element of each type that a data file may hold. Sub-byte types are left out: no framework that
holdfast serves stores them as an element type of a plain tensor."""

MAX_ARRAY_BYTES: Final = 1 << 53
"""No array may be larger: sizes stay exact in JSON readers that hold numbers as doubles."""


def array_bytes(dtype: str, shape: Iterable[int]) -> int:
    """**Pure.** The bytes of a contiguous array.

    Args:
        dtype: A key of `ITEM_BYTES`.
        shape: The length of each dimension; empty for a scalar.

    Raises:
        ValueError: If the type is unknown, a length is negative, or the array would be larger than
            `MAX_ARRAY_BYTES`.
    """
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise ValueError(f"unknown element type {dtype!r}")
    lengths = tuple(shape)
    if lengths and min(lengths) < 0:
        raise ValueError(f"negative length in shape {list(lengths)}")
    total = math.prod(lengths, start=item_bytes)
    if total > MAX_ARRAY_BYTES:
        raise ValueError(f"shape {list(lengths)} of {dtype} is larger than {MAX_ARRAY_BYTES} bytes")
    return total
