"""Memory by its address: the one place from which holdfast's Python code reads or writes arrays without their library.

A slice of one view of all memory takes a tenth of the time in which a library makes a view of an array. A wrong address
would be silent corruption: so `memory_between` takes the extent of the array, as its library gives it at that moment.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final, TypeAlias

MEMORY: Final = memoryview((ctypes.c_ubyte * sys.maxsize).from_address(0)).cast("B")
"""All memory there may be, of which only what arrays have may be touched."""

Extent: TypeAlias = tuple[int, int]
"""The addresses between which an array lies, the last exclusive."""


def memory_between(begin: int, end: int, extent: Extent) -> memoryview:
    """The memory between two addresses, which belongs to an array.

    Args:
        begin: The first address.
        end: The last one, exclusive.
        extent: Where the array lies.

    Raises:
        ValueError: If some of that memory is not the array's.
    """
    if not 0 < extent[0] <= begin <= end <= extent[1]:
        raise ValueError(
            f"memory from {begin:#x} to {end:#x} is wanted, and the array lies from {extent[0]:#x} to {extent[1]:#x}"
        )
    return MEMORY[begin:end]
