"""The layout of one worker's data file, and the index that records it, with the state other than arrays. Pure.

A data file is a plain safetensors file: eight bytes with the header's length, a JSON header padded with spaces so that
the arrays begin on a multiple of 4096 bytes, and the arrays one after the other without gaps. Arrays whose sizes are
multiples of a cache line come first, then of half a line, and so on: so each array is aligned to its own elements, and
all but the odd ones to a line, as they are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

import msgspec

from holdfast.errors import UsageError
from holdfast.format.digests import Digest, SealedRecord
from holdfast.format.dtypes import QuantizerRecord, array_bytes, stored_form
from holdfast.format.names import AttemptNumber, GenerationNumber, Size, StepName, StepNumber, WorldSize, data_name
from holdfast.format.shapes import Box, StridesRecord, whole_box

ALIGNMENT_BYTES: Final = 4096
"""The alignment that direct I/O requires of addresses, offsets and lengths on every device in use."""

_LINE_BYTES: Final = 64
"""A copy or read between two places with the same offset in their lines is faster."""

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit that safetensors readers set for a header."""

METADATA_KEY: Final = "__metadata__"
"""The one name in a header that is not an array's."""


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
        entries: The part of the header that names the arrays, after the metadata.
    """

    header: bytes
    places: tuple[Place, ...]
    size_bytes: int
    entries: bytes = field(repr=False, compare=False)


def round_up(size_bytes: int) -> int:
    """**Pure.** Rounds up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def plan_layout(arrays: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """**Pure.** Lays out a data file.

    Args:
        arrays: Name, element type and shape of each; names are distinct.
        metadata: Text to store in the header, too.

    Raises:
        UsageError: If there are so many arrays that readers of safetensors would refuse the header.
    """
    ordered = sorted(arrays, key=lambda array: (-_alignment_bytes(array[1], array[2]), array[0]))
    header: dict[str, object] = {}
    spans: list[tuple[int, int]] = []
    offset = 0
    for name, dtype, shape in ordered:
        end = offset + array_bytes(dtype, shape)
        stored_dtype, stored_shape = stored_form(dtype, shape)
        header[name] = {"dtype": stored_dtype, "shape": stored_shape, "data_offsets": (offset, end)}
        spans.append((offset, end))
        offset = end
    entries = msgspec.json.encode(header)[1:]
    encoded = _make_header(metadata, entries)
    data_begin = len(encoded)
    if data_begin - 8 > MAX_HEADER_BYTES:
        raise UsageError(
            f"{len(ordered)} arrays make a header of {data_begin} bytes; readers refuse more than {MAX_HEADER_BYTES}",
            hint="Stack small arrays into larger ones.",
        )
    places = tuple(
        Place(name, dtype, shape, data_begin + begin, data_begin + end)
        for (name, dtype, shape), (begin, end) in zip(ordered, spans, strict=True)
    )
    return Layout(encoded, places, data_begin + offset, entries)


def relabel(layout: Layout, metadata: Mapping[str, str]) -> Layout | None:
    """**Pure.** Returns the same file with other metadata; None if that needs another number of blocks."""
    header = _make_header(metadata, layout.entries)
    return replace(layout, header=header) if len(header) == len(layout.header) else None


def _alignment_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the largest power of two, up to a line, that divides the array's size, and so its elements' size."""
    size_bytes = array_bytes(dtype, shape) | _LINE_BYTES
    return size_bytes & -size_bytes


def _make_header(metadata: Mapping[str, str], entries: bytes) -> bytes:
    """Returns a header with its length before it, padded: the metadata, then the entries of arrays, if any."""
    opening = msgspec.json.encode({METADATA_KEY: dict(metadata)})[:-1]
    encoded = opening + (b"," if len(entries) > 1 else b"") + entries
    header_bytes = round_up(8 + len(encoded)) - 8
    return header_bytes.to_bytes(8, "little") + encoded.ljust(header_bytes)


MAX_INDEX_BYTES: Final = 1 << 30

MAX_SOURCES: Final = 64
"""How many files of other steps an index may refer to: a reader has them all open at once."""


class LeafRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One array of a data file.

    Attributes:
        name: The leaf's name.
        dtype: The element type.
        shape: The length of each dimension.
        begin: Where its bytes begin, from the file's beginning.
        end: Where they end, exclusive.
        spans: The digests of its spans, in order, without separators.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    spans: str


class DataFile(msgspec.Struct, frozen=True):
    """A worker's data file in a checkpoint. It is never named by a path.

    Attributes:
        step: The step that it belongs to.
        generation: The generation that saved that step.
        attempt: The number of the attempt in that generation.
        rank: The worker that wrote the file.
        world_size: The number of workers.
        data_bytes: The file's size.
    """

    step: StepNumber
    generation: GenerationNumber
    attempt: AttemptNumber
    rank: Size
    world_size: WorldSize
    data_bytes: Size

    @property
    def name(self) -> StepName:
        """The checkpoint that it belongs to."""
        return StepName(self.step, self.generation, self.attempt)


class Source(DataFile, frozen=True, order=True):
    """A data file of an earlier step of the same run."""

    @property
    def file_name(self) -> str:
        """The file's name in that checkpoint's directory."""
        return data_name(self.rank, self.world_size)


class ReferredRecord(LeafRecord, frozen=True, array_like=True, gc=False):
    """One array whose bytes are in a data file of an earlier step.

    Attributes:
        source: The number of that file among the index's sources; `begin` and `end` are offsets in it.
    """

    source: int


class BoxRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An array that is not a leaf by itself, but a box of one.

    Attributes:
        name: The array's name among the index's arrays.
        leaf: The leaf's name; empty if it is the same.
        global_shape: The leaf's shape.
        offsets: Where the array begins in the leaf, in elements.
    """

    name: str
    leaf: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class ElsewhereRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A leaf of the worker's state that it did not write in full.

    Attributes:
        name: The leaf's name.
        dtype: The element type.
        shape: The leaf's shape.
        ranks: The workers that wrote the rest, as far as that is known; a hint where to look first.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class StoredBox(msgspec.Struct, frozen=True):
    """The position of one box of a leaf.

    Attributes:
        leaf: The leaf's name.
        dtype: The element type.
        global_shape: The leaf's shape.
        box: The part of the leaf.
        record: The array.
        rank: The worker whose index has it.
    """

    leaf: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    record: LeafRecord
    rank: int


class Index(SealedRecord, DataFile, frozen=True, omit_defaults=True):
    """The record of one worker's data file, and of its state.

    Attributes:
        header_bytes: How many bytes precede the first array.
        header_digest: The digest of those bytes.
        span_bytes: The length of a span.
        leaves: The arrays, in the order of the file.
        objects: For each named object, its state with references instead of arrays.
        sources: The files of earlier steps that contain some of the arrays; left out if there are none.
        referred: Those arrays, in the order of the sources and of their offsets; left out if there are none.
        boxes: The boxes that arrays are, if not whole leaves; left out if all are whole.
        elsewhere: The leaves that other workers wrote in part or in full; left out if there are none.
        strides: The leaves that were not in row-major order in this worker's memory; left out if all were.
        quantizers: Those of quantized leaves; left out if there are none.
    """

    kind: ClassVar[str] = "index"

    header_bytes: Annotated[int, msgspec.Meta(ge=8, le=MAX_HEADER_BYTES + 8)]
    header_digest: Digest
    span_bytes: Annotated[int, msgspec.Meta(ge=1)]
    leaves: tuple[LeafRecord, ...]
    objects: dict[str, Any]
    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=MAX_SOURCES)] = ()
    referred: tuple[ReferredRecord, ...] = ()
    boxes: tuple[BoxRecord, ...] = ()
    elsewhere: tuple[ElsewhereRecord, ...] = ()
    strides: tuple[StridesRecord, ...] = ()
    quantizers: tuple[QuantizerRecord, ...] = ()

    @property
    def own_source(self) -> Source:
        """The data file that it describes, as later steps refer to it."""
        return Source(self.step, self.generation, self.attempt, self.rank, self.world_size, self.data_bytes)

    def all_leaves(self) -> Iterator[LeafRecord]:
        """All arrays, in any file."""
        yield from self.leaves
        yield from self.referred

    @property
    def is_shared(self) -> bool:
        """True if it has leaves that are not whole in one array."""
        return bool(self.boxes or self.elsewhere)

    def stored_boxes(self) -> Iterator[StoredBox]:
        """Yields all arrays, each with the leaf that it is, or is a box of."""
        boxes = {part.name: part for part in self.boxes}
        for record in self.all_leaves():
            name, shape, box = record.name, record.shape, whole_box(record.shape)
            if (part := boxes.get(name)) is not None:
                name, shape, box = part.leaf or name, part.global_shape, Box(part.offsets, record.shape)
            yield StoredBox(name, record.dtype, shape, box, record, self.rank)

    def list_leaves(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the leaves that it names, with element type and shape."""
        leaves = {leaf.name: (leaf.dtype, leaf.shape) for leaf in self.elsewhere}
        boxes = {part.name: part for part in self.boxes}
        for record in self.all_leaves():
            part = boxes.get(record.name)
            if part is None:
                leaves[record.name] = (record.dtype, record.shape)
            else:
                leaves[part.leaf or part.name] = (record.dtype, part.global_shape)
        return leaves

    def refers_to(self) -> dict[StepName, tuple[int, int]]:
        """Returns for each step that it refers to the number of arrays and bytes there; in order of step."""
        counts: dict[StepName, tuple[int, int]] = {}
        for leaf in self.referred:
            name = self.sources[leaf.source].name
            count, size_bytes = counts.get(name, (0, 0))
            counts[name] = (count + 1, size_bytes + leaf.end - leaf.begin)
        return counts
