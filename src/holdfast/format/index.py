"""The index: what lies where in one worker's data file, and the state that is not arrays. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from holdfast.errors import FormatError
from holdfast.format.digests import is_digest, span_count
from holdfast.format.dtypes import (
    QUANTIZED_TYPES,
    QuantizerRecord,
    array_bytes,
    find_quantizer_problem,
)
from holdfast.format.envelope import seal, unseal
from holdfast.format.layout import MAX_HEADER_BYTES
from holdfast.format.names import MAX_WORKERS, StepName, data_name, find_order_problem
from holdfast.format.shards import BoxRecord, ElsewhereRecord, StoredBox, find_part_problem, make_stored_box
from holdfast.format.soundness import MAX_DIMENSIONS, is_hexadecimal, try_end
from holdfast.format.strides import StridesRecord, is_dense

KIND: Final = "index"
MAX_INDEX_BYTES: Final = 1 << 30

MAX_SOURCES: Final = 64
"""How many files of other steps an index may refer to: a reader has them all open at once."""

_NAME_CHARACTERS: Final = 200


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


class Source(msgspec.Struct, frozen=True, order=True):
    """A data file of an earlier step of the same run. It is never named by a path.

    Attributes:
        step: The step whose directory it lies in.
        generation: The generation that saved that step.
        attempt: Which attempt of that generation.
        rank: The worker that wrote the file.
        world_size: How many workers there were.
        data_bytes: The file's size.
    """

    step: int
    generation: int
    attempt: int
    rank: int
    world_size: int
    data_bytes: int

    @property
    def name(self) -> StepName:
        """The checkpoint that it belongs to."""
        return StepName(self.step, self.generation, self.attempt)

    @property
    def file_name(self) -> str:
        """The file's name in that checkpoint's directory."""
        return data_name(self.rank, self.world_size)


class ReferredRecord(LeafRecord, frozen=True, array_like=True, gc=False):
    """One array whose bytes lie in a data file of an earlier step.

    Attributes:
        source: The number of that file among the index's sources; `begin` and `end` are places in it.
    """

    source: int


class Index(msgspec.Struct, frozen=True, omit_defaults=True):
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
        sources: The files of earlier steps that arrays are referred to in; left out if there are none.
        referred: Those arrays, in the order of the sources and of their places there; left out if there are none.
        boxes: What those arrays are that are no whole leaves; left out if all are.
        elsewhere: The leaves of which others have written a part, or all; left out if there are none.
        strides: The leaves that did not lie in row-major order in this worker's memory; left out if all did.
        quantizers: Those of leaves that are quantized; left out if none is.
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
    sources: tuple[Source, ...] = ()
    referred: tuple[ReferredRecord, ...] = ()
    boxes: tuple[BoxRecord, ...] = ()
    elsewhere: tuple[ElsewhereRecord, ...] = ()
    strides: tuple[StridesRecord, ...] = ()
    quantizers: tuple[QuantizerRecord, ...] = ()

    @property
    def name(self) -> StepName:
        """The checkpoint that it belongs to."""
        return StepName(self.step, self.generation, self.attempt)

    @property
    def own_source(self) -> Source:
        """The data file that it describes, as later steps refer to it."""
        return Source(self.step, self.generation, self.attempt, self.rank, self.world_size, self.data_bytes)

    def all_leaves(self) -> Iterator[LeafRecord]:
        """All arrays, wherever they lie."""
        yield from self.leaves
        yield from self.referred

    @property
    def is_shared(self) -> bool:
        """Whether it says anything of leaves that do not lie whole in one array."""
        return bool(self.boxes or self.elsewhere)

    def stored_boxes(self) -> Iterator[StoredBox]:
        """All arrays, each with the leaf that it is, or is a box of."""
        boxes = {part.name: part for part in self.boxes}
        for record in self.all_leaves():
            yield make_stored_box(record, boxes, self.rank)

    def list_leaves(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The leaves that it names, wherever they lie: element type and shape of each."""
        leaves = {leaf.name: (leaf.dtype, leaf.shape) for leaf in self.elsewhere}
        for stored in self.stored_boxes():
            leaves[stored.leaf] = (stored.dtype, stored.global_shape)
        return leaves

    def refers_to(self) -> dict[StepName, tuple[int, int]]:
        """For each step that it refers to, how many arrays and how many of their bytes lie there; in order of step."""
        counts: dict[StepName, tuple[int, int]] = {}
        for leaf in self.referred:
            name = self.sources[leaf.source].name
            count, size_bytes = counts.get(name, (0, 0))
            counts[name] = (count + 1, size_bytes + leaf.end - leaf.begin)
        return counts


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
    is_alone = not index.sources and not index.referred
    if is_alone and try_end(index.leaves, index.header_bytes, index.span_bytes) == index.data_bytes:
        problem = find_part_problem(index) if index.is_shared else ""
    else:
        problem = find_leaf_problem(index) or find_part_problem(index)
    problem = problem or (_find_strides_problem(index) if index.strides else "")
    is_quantized = index.quantizers or not QUANTIZED_TYPES.keys().isdisjoint(
        {leaf.dtype for leaf in index.all_leaves()}
    )
    return problem or (_find_quantizers_problem(index) if is_quantized else "")


def find_leaf_problem(index: Index) -> str:
    """**Pure.** What is wrong with the leaves of an index; empty if nothing is."""
    names: set[str] = set()
    offset = index.header_bytes
    for leaf in index.leaves:
        if leaf.begin != offset:
            return f"{leaf.name!r} should begin at byte {offset}, not {leaf.begin}"
        problem = _find_leaf_problem(leaf, index.span_bytes, names)
        if problem:
            return problem
        offset = leaf.end
    if index.data_bytes != offset:
        return f"the data file should have {offset} bytes, not {index.data_bytes}"
    if index.sources or index.referred:
        return _find_source_problem(index) or _find_referred_problem(index, names)
    return ""


def find_name_problem(index: Index) -> str:
    """**Pure.** Which leaf the objects of an index name that it does not have, not even elsewhere; empty if none."""
    known = {stored.leaf for stored in index.stored_boxes()}
    known.update(absent.name for absent in index.elsewhere)
    for name in _named_leaves(index):
        if not isinstance(name, str) or name not in known:
            return f"its objects name the leaf {str(name)[:_NAME_CHARACTERS]!r}, which is not there"
    return ""


def _named_leaves(index: Index) -> Iterator[Any]:
    # Not by recursion: who made it up may have nested it very deep.
    waiting: list[Any] = list(index.objects.values())
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if node.get("$") == "array":
                yield node.get("v")
            else:
                waiting += node.values()


def _find_leaf_problem(leaf: LeafRecord, span_bytes: int, names: set[str]) -> str:
    """What is wrong with a leaf, wherever it begins; its name is added to the names that stand already."""
    if len(leaf.shape) > MAX_DIMENSIONS:
        return f"{leaf.name!r} has {len(leaf.shape)} dimensions"
    try:
        size_bytes = array_bytes(leaf.dtype, leaf.shape)
    except ValueError as error:
        return f"{leaf.name!r}: {error}"
    if leaf.end != leaf.begin + size_bytes:
        return f"{leaf.name!r} should lie at bytes {leaf.begin} to {leaf.begin + size_bytes}, not to {leaf.end}"
    if len(leaf.spans) != 32 * span_count(size_bytes, span_bytes) or not is_hexadecimal(leaf.spans):
        return f"{leaf.name!r}: the digests of its spans are malformed"
    if leaf.name in names:
        return f"{leaf.name!r} stands twice"
    names.add(leaf.name)
    return ""


def _find_strides_problem(index: Index) -> str:
    """What is wrong with the strides of leaves: memory is taken by them, and they are not to reach beyond it."""
    leaves = index.list_leaves()
    for record in index.strides:
        _, shape = leaves.pop(record.leaf, ("", None))
        if shape is None:
            return f"the strides of {record.leaf!r} are those of no leaf, or stand twice"
        if not is_dense(shape, record.strides):
            return f"{record.leaf!r} of shape {list(shape)} cannot have the strides {list(record.strides)}"
    return ""


def _find_quantizers_problem(index: Index) -> str:
    leaves = index.list_leaves()
    quantizers = {record.leaf: record.quantizer for record in index.quantizers}
    if len(quantizers) < len(index.quantizers) or not quantizers.keys() <= leaves.keys():
        return "the quantizer of a leaf stands twice, or is that of none"
    for leaf, (dtype, shape) in leaves.items():
        problem = find_quantizer_problem(dtype, shape, quantizers.get(leaf))
        if problem:
            return f"{leaf!r} cannot be {problem}"
    return ""


def _find_source_problem(index: Index) -> str:
    if len(index.sources) > MAX_SOURCES:
        return f"{len(index.sources)} sources are more than the {MAX_SOURCES} that may be"
    before: Source | None = None
    for source in index.sources:
        problem = find_order_problem(source.name, index.name)
        if problem:
            return problem
        if not 0 <= source.rank < source.world_size <= MAX_WORKERS:
            return f"a source of rank {source.rank} of {source.world_size} workers cannot be"
        # One file that stood twice could be claimed twice, and so take more memory than lies on the disk.
        if before is not None and (before.name, before.rank) >= (source.name, source.rank):
            return f"the source {source.name.directory} stands twice, or not in its place"
        before = source
    return ""


def _find_referred_problem(index: Index, names: set[str]) -> str:
    number, offset = -1, 0
    for leaf in index.referred:
        problem = _find_leaf_problem(leaf, index.span_bytes, names)
        if problem:
            return problem
        if not 0 <= leaf.source < len(index.sources) or leaf.source not in (number, number + 1):
            return f"{leaf.name!r} refers to source {leaf.source} of {len(index.sources)}, out of order"
        if leaf.source != number:
            number, offset = leaf.source, 0
        # Arrays that shared bytes could claim more memory than lies on the disk.
        if not offset <= leaf.begin <= leaf.end <= index.sources[number].data_bytes:
            return (
                f"{leaf.name!r} cannot lie at bytes {leaf.begin} to {leaf.end} of a source of "
                f"{index.sources[number].data_bytes} bytes whose bytes before {offset} are taken"
            )
        offset = leaf.end
    if number + 1 != len(index.sources):
        return f"nothing refers to source {number + 1} of {len(index.sources)}"
    return ""
