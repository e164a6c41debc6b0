"""Plans copies between addresses of this process as jobs for several threads."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from holdfast.storage.buffers import batches

Job: TypeAlias = Callable[[], object]
Move: TypeAlias = tuple[int, int, int]
"""The destination, the source, and the number of bytes."""
NativeCopy: TypeAlias = "Callable[[array[int], array[int], array[int]], None]"
"""Takes columns of the same length: destinations, sources, and numbers of bytes."""


class Copy(NamedTuple):
    """Several copies that are made in one go.

    Attributes:
        begin: The lowest address that they fill.
        run: Makes them.
    """

    begin: int
    run: Job


PART_BYTES: Final = 16 << 20
"""How much of a large array one thread copies at a time, so that the work is shared evenly."""

_NATIVE_BATCH_BYTES: Final = 4 << 20
"""The same for the compiled copy, for all arrays."""

_LARGE_BYTES: Final = 128 << 10
"""Arrays from this size on are copied with the interpreter's lock released. For smaller ones, releasing it and taking
it again takes longer than the copy.
"""

_BATCH_BYTES: Final = 2 << 20
"""How much of small arrays is copied in one go: a fraction of a millisecond without a chance for other threads."""

_move_held = ctypes.PyDLL(None).memmove
_move_held.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_move_held.restype = None


NATIVE: NativeCopy | None = None
"""The compiled copy (`_moves.c`); None if holdfast was installed without a compiler."""
with suppress(ImportError, AttributeError):  # There is none, or it is of another version.
    # By its name, since those who check what imports what know of no compiled modules.
    NATIVE = import_module("holdfast.save._moves").copy


def plan_copies(moves: Sequence[Move], *, native: bool = True) -> list[Copy]:
    """Joins copies, which are in the order of their destinations and without overlap, to jobs for one thread."""
    copy = NATIVE if native else None
    if copy is None:
        large = (move for move in moves if move[2] >= _LARGE_BYTES)
        # The small ones last, so that the other threads have something to do meanwhile.
        copies = [Copy(part[0], partial(ctypes.memmove, *part)) for part in _cut(large, PART_BYTES)]
        small = batches((move for move in moves if move[2] < _LARGE_BYTES), itemgetter(2), _BATCH_BYTES)
        return copies + [
            Copy(batch[0][0], partial(_move_small, *map(list, zip(*batch, strict=True)))) for batch in small
        ]
    return [
        Copy(batch[0][0], partial(copy, *(array("Q", column) for column in zip(*batch, strict=True))))
        for batch in batches(_cut(moves, _NATIVE_BATCH_BYTES), itemgetter(2), _NATIVE_BATCH_BYTES)
    ]


def _cut(moves: Iterable[Move], limit_bytes: int) -> Iterator[Move]:
    for move in moves:
        target, source, size_bytes = move
        if size_bytes <= limit_bytes:
            yield move
            continue
        for begin in range(0, size_bytes, limit_bytes):
            yield target + begin, source + begin, min(limit_bytes, size_bytes - begin)


def _move_small(targets: list[int], sources: list[int], sizes: list[int]) -> None:
    deque(map(_move_held, targets, sources, sizes), maxlen=0)
