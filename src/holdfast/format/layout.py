"""Where each array lies in a data file. Pure.

A data file is a plain safetensors file: eight bytes with the header's length, a JSON header padded with spaces so that
the arrays begin on a multiple of 4096 bytes, and the arrays one behind the other without gaps. Those whose sizes are
multiples of a line of the processor's cache come first, then of half a line, and so on: so each array is aligned to its
own elements, and all but the odd ones to a line, as they are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from holdfast.errors import UsageError
from holdfast.format.dtypes import array_bytes, stored_form

ALIGNMENT_BYTES: Final = 4096
"""What direct I/O asks of addresses, offsets and lengths on every device in use."""

_LINE_BYTES: Final = 64
"""A copy or read between two places that lie alike in their lines is the faster."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that safetensors readers set for a header."""

METADATA_KEY: Final = "__metadata__"
"""The one name in a header that does not stand for an array."""


class Place(msgspec.Struct, frozen=True):
    """An array's place in a data file, in bytes from the file's beginning; `end` is exclusive."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A data file before it has values.

    Attributes:
        header: The file's first bytes, up to the first array.
        places: The arrays in the order of the file.
        size_bytes: The size of the whole file.
        entries: The part of the header that names the arrays, behind the metadata.
    """

    header: bytes
    places: tuple[Place, ...]
    size_bytes: int
    entries: bytes = field(repr=False, compare=False)

    @property
    def padded_bytes(self) -> int:
        """The size rounded up to whole blocks: what a buffer for the file must hold."""
        return round_up(self.size_bytes)


def round_up(size_bytes: int) -> int:
    """**Pure.** The smallest multiple of `ALIGNMENT_BYTES` that is not smaller."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan_layout(arrays: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """**Pure.** Lays out a data file.

    Args:
        arrays: Name, element type and shape of each; names are distinct.
        metadata: Text to keep in the header beside the arrays.

    Raises:
        UsageError: If there are so many arrays that readers of safetensors would refuse the header.
    """
    ordered = sorted(arrays, key=lambda array: (-_alignment_bytes(array[1], array[2]), array[0]))
    header: dict[str, object] = {METADATA_KEY: dict(metadata)}
    spans: list[tuple[int, int]] = []
    offset = 0
    for name, dtype, shape in ordered:
        end = offset + array_bytes(dtype, shape)
        stored_dtype, stored_shape = stored_form(dtype, shape)
        header[name] = {"dtype": stored_dtype, "shape": stored_shape, "data_offsets": (offset, end)}
        spans.append((offset, end))
        offset = end
    encoded = msgspec.json.encode(header)
    entries = encoded[len(_opening(metadata)) :]
    data_begin = round_up(8 + len(encoded))
    if data_begin - 8 > MAX_HEADER_BYTES:
        raise UsageError(
            f"{len(ordered)} arrays make a header of {len(encoded)} bytes; readers refuse more than {MAX_HEADER_BYTES}",
            hint="Stack small arrays into larger ones.",
        )
    places = tuple(
        Place(name, dtype, shape, data_begin + begin, data_begin + end)
        for (name, dtype, shape), (begin, end) in zip(ordered, spans, strict=True)
    )
    return Layout(_frame(encoded, data_begin), places, data_begin + offset, entries)


def relabel(layout: Layout, metadata: Mapping[str, str]) -> Layout | None:
    """**Pure.** The same file with other metadata; None if that takes more blocks or fewer."""
    encoded = _opening(metadata) + layout.entries
    if round_up(8 + len(encoded)) != len(layout.header):
        return None
    return replace(layout, header=_frame(encoded, len(layout.header)))


def _alignment_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The largest power of two, up to a line, of which the array's size is a multiple; so its elements' size is one."""
    size_bytes = array_bytes(dtype, shape) | _LINE_BYTES
    return size_bytes & -size_bytes


def _opening(metadata: Mapping[str, str]) -> bytes:
    """A header's first bytes: up to the end of the metadata."""
    return msgspec.json.encode({METADATA_KEY: dict(metadata)})[:-1]


def _frame(encoded: bytes, data_begin: int) -> bytes:
    """A header with its length, padded."""
    padded = encoded.ljust(data_begin - 8)
    return len(padded).to_bytes(8, "little") + padded
