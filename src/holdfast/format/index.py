"""The index: what lies where in one worker's data file, and the state that is not arrays. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.errors import FormatError
from holdfast.format.digests import is_digest, span_count
from holdfast.format.dtypes import array_bytes
from holdfast.format.envelope import seal, unseal
from holdfast.format.layout import MAX_HEADER_BYTES
from holdfast.format.soundness import MAX_DIMENSIONS, is_hexadecimal, try_end

KIND: Final = "index"
MAX_INDEX_BYTES: Final = 1 << 30


class LeafRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One array of a data file.

    Attributes:
        name: The leaf's name.
        dtype: The element type.
        shape: The length of each dimension.
        begin: Where its bytes begin, from the file's beginning.
        end: Where they end, exclusive.
        spans: The digest of each span of its bytes, in order, without anything between them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    spans: str


class Index(msgspec.Struct, frozen=True):
    """What one worker wrote.

    Attributes:
        step: The step that it belongs to.
        generation: The generation that saved it.
        attempt: Which attempt of that generation.
        rank: The worker that wrote it.
        world_size: How many workers there were.
        data_bytes: The size of the data file.
        header_bytes: How many bytes lie before the first array.
        header_digest: The digest of those bytes.
        span_bytes: The length of a span.
        leaves: The arrays, in the order of the file.
        objects: For each named object, its state with references in place of arrays.
    """

    step: int
    generation: int
    attempt: int
    rank: int
    world_size: int
    data_bytes: int
    header_bytes: int
    header_digest: str
    span_bytes: int
    leaves: tuple[LeafRecord, ...]
    objects: dict[str, Any]


def encode_index(index: Index) -> bytes:
    """**Pure.** The bytes of an index."""
    return seal(KIND, index)


def decode_index(data: bytes, *, path: str, step: int | None = None) -> Index:
    """**Pure.** The index that the bytes hold, checked for sense.

    Raises:
        FormatError: If it is damaged, or says what cannot be: arrays that overlap or leave gaps, sizes that do not
            follow from shape and type, names that stand twice.
    """
    index = unseal(KIND, Index, data, path=path, step=step)
    problem = _find_problem(index)
    if problem:
        raise FormatError(f"{path}: {problem}", path=path, step=step)
    return index


def _find_problem(index: Index) -> str:
    if not 0 <= index.rank < index.world_size:
        return f"rank {index.rank} of {index.world_size} workers cannot be"
    if index.span_bytes < 1:
        return f"spans of {index.span_bytes} bytes cannot be"
    if not 8 <= index.header_bytes <= MAX_HEADER_BYTES + 8:
        return f"a header of {index.header_bytes} bytes cannot be"
    if not is_digest(index.header_digest):
        return "the digest of the header is malformed"
    # Very many leaves are looked at together first; one by one only where something is wrong with them.
    if try_end(index.leaves, index.header_bytes, index.span_bytes) == index.data_bytes:
        return ""
    return find_leaf_problem(index)


def find_leaf_problem(index: Index) -> str:
    """**Pure.** What is wrong with the leaves of an index; empty if nothing is."""
    names: set[str] = set()
    offset = index.header_bytes
    for leaf in index.leaves:
        if len(leaf.shape) > MAX_DIMENSIONS:
            return f"{leaf.name!r} has {len(leaf.shape)} dimensions"
        try:
            size_bytes = array_bytes(leaf.dtype, leaf.shape)
        except ValueError as error:
            return f"{leaf.name!r}: {error}"
        if leaf.begin != offset or leaf.end != offset + size_bytes:
            return (
                f"{leaf.name!r} should lie at bytes {offset} to {offset + size_bytes}, not {leaf.begin} to {leaf.end}"
            )
        if len(leaf.spans) != 32 * span_count(size_bytes, index.span_bytes) or not is_hexadecimal(leaf.spans):
            return f"{leaf.name!r}: the digests of its spans are malformed"
        if leaf.name in names:
            return f"{leaf.name!r} stands twice"
        names.add(leaf.name)
        offset = leaf.end
    if index.data_bytes != offset:
        return f"the data file should have {offset} bytes, not {index.data_bytes}"
    return ""
