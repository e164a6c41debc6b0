"""Many places of memory, and what is done with them in few calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from holdfast.storage.local.direct import address_of

_SMALLEST_SHARED_BYTES: Final = 1 << 17
"""While as much is copied, other threads may run. To let them costs more than a smaller copy takes."""

_T = TypeVar("_T")


def batches(items: Iterable[_T], size_of: Callable[[_T], int], limit_bytes: int) -> Iterator[list[_T]]:
    """Cuts a sequence into runs of at most so many bytes, or of one item that is larger."""
    batch: list[_T] = []
    batch_bytes = 0
    for item in items:
        size_bytes = size_of(item)
        batch_bytes += size_bytes
        if batch_bytes > limit_bytes and batch:
            yield batch
            batch, batch_bytes = [], size_bytes
        batch.append(item)
    if batch:
        yield batch


def fill_parts(parts: Sequence[memoryview], data: memoryview) -> None:
    """Copies bytes into places of memory, one behind the other, until the bytes or the places end."""
    begin, size_bytes = 0, len(data)
    for part in parts:
        end = begin + len(part)
        if end > size_bytes:
            part = part[: size_bytes - begin]
            end = size_bytes
        if end - begin >= _SMALLEST_SHARED_BYTES:
            ctypes.memmove(address_of(part), address_of(data) + begin, end - begin)
        else:
            part[:] = data[begin:end]
        begin = end
        if begin == size_bytes:
            return


def parts_beyond(parts: Sequence[memoryview], filled_bytes: int) -> list[memoryview]:
    """What is left to fill when that many bytes have been filled, fewer than the parts have."""
    for number, part in enumerate(parts):
        if filled_bytes < len(part):
            return [part[filled_bytes:], *parts[number + 1 :]]
        filled_bytes -= len(part)
    return []
