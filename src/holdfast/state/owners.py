"""Which worker writes what several hold. Pure.

All holders of a box decide by the same rule, each alone and box by box: what one of them has more or less than the
others changes nothing for the rest. Nothing is asked, and nothing is counted up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import xxhash

from holdfast.format.boxes import Box, split_box

MOST_WRITERS: Final = 64
"""So many holders share the writing. With more it would not be quicker, and each restore would open more files."""

SMALL_BYTES: Final = 4096
"""What is no larger goes to the first holder: twenty thousand such arrays are little to write, and one file to read."""

PART_BYTES: Final = 256 << 10
"""No part of a box that is shared out is smaller."""


def plan_parts(leaf: str, box: Box, item_bytes: int, holders: Sequence[int]) -> list[tuple[int, Box]]:
    """**Pure.** Who writes a box of a leaf that several workers hold.

    A large box is cut into parts that are contiguous in it and as even as may be; which holder takes the first of them
    depends on the leaf's name, so that many boxes are spread as well.

    Args:
        leaf: The leaf's name.
        box: The box that each of them holds.
        item_bytes: The bytes of one element.
        holders: Their ranks, in the same order with each of them; at least one.

    Returns:
        The parts of the box, in their order, each with the worker that writes it.
    """
    if len(holders) == 1:
        return [(holders[0], box)]
    size_bytes = box.elements * item_bytes
    if size_bytes <= SMALL_BYTES:
        return [(holders[0], box)]
    writers = choose_writers(holders)
    parts = split_box(box, max(1, min(len(writers), size_bytes // PART_BYTES)))
    first = xxhash.xxh3_64_intdigest(f"{leaf}\n{box.offsets}".encode(errors="surrogatepass"))
    return [(writers[(first + number) % len(writers)], part) for number, part in enumerate(parts)]


def choose_writers(holders: Sequence[int]) -> Sequence[int]:
    """**Pure.** Those of the holders that write: far from each other, since neighbours share a machine."""
    if len(holders) <= MOST_WRITERS:
        return holders
    return [holders[number * len(holders) // MOST_WRITERS] for number in range(MOST_WRITERS)]
