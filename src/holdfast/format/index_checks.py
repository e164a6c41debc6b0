"""Checks an index, by itself and together with those of a step's other workers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar, Final

import msgspec

from holdfast.errors import FormatError
from holdfast.format.digests import DIGEST_CHARACTERS, SealedRecord, unseal
from holdfast.format.dtypes import QUANTIZED_TYPES, array_bytes, find_quantizer_problem
from holdfast.format.index import Index, LeafRecord, Source, StoredBox
from holdfast.format.names import find_order_problem
from holdfast.format.nodes import list_tagged
from holdfast.format.shapes import Box, find_box_problem, find_overlap, is_dense, whole_box

_NAME_CHARACTERS: Final = 200


def decode_index(data: bytes, *, path: str, step: int | None = None) -> Index:
    """**Pure.** Returns the index in the bytes, after checks.

    Raises:
        FormatError: If it is damaged or invalid: arrays that overlap or leave gaps, sizes that do not follow from shape
            and type, names that appear twice.
    """
    index = unseal(Index, data, path=path, step=step)
    problem = _find_problem(index)
    if problem:
        raise FormatError(f"{path}: {problem}", path=path, step=step)
    return index


class _ObjectNames(SealedRecord, frozen=True):
    """The part of an index that names the objects."""

    kind: ClassVar[str] = Index.kind

    objects: dict[str, msgspec.Raw]


def decode_object_names(data: bytes, *, path: str, step: int | None = None) -> list[str]:
    """**Pure.** Returns the names of the objects in an index, without what it says of them and of arrays.

    Raises:
        FormatError: If it is damaged.
    """
    return list(unseal(_ObjectNames, data, path=path, step=step).objects)


def _find_problem(index: Index) -> str:
    if index.rank >= index.world_size:
        return f"rank {index.rank} of {index.world_size} workers is not possible"
    problem = find_leaf_problem(index)
    if not problem and index.is_shared:
        problem = find_part_problem(index)
    problem = problem or (_find_strides_problem(index) if index.strides else "")
    is_quantized = index.quantizers or not QUANTIZED_TYPES.keys().isdisjoint(
        {leaf.dtype for leaf in index.all_leaves()}
    )
    return problem or (_find_quantizers_problem(index) if is_quantized else "")


def find_leaf_problem(index: Index) -> str:
    """**Pure.** Describes a problem of the leaves of an index; empty if there is none."""
    problem = _find_form_problem([*index.leaves, *index.referred], index.span_bytes)
    if problem:
        return problem
    offset = index.header_bytes
    for leaf in index.leaves:
        if leaf.begin != offset:
            return f"{leaf.name!r} should begin at byte {offset}, not {leaf.begin}"
        offset = leaf.end
    if index.data_bytes != offset:
        return f"the data file should have {offset} bytes, not {index.data_bytes}"
    return _find_source_problem(index) or _find_referred_problem(index)


def _find_form_problem(leaves: Sequence[LeafRecord], span_bytes: int) -> str:
    """Describes a problem of leaves, apart from where each begins. There may be very many, most of them similar."""
    sizes_bytes: dict[tuple[str, tuple[int, ...]], int] = {}
    for leaf in leaves:
        kind = (leaf.dtype, leaf.shape)
        size_bytes = sizes_bytes.get(kind)
        if size_bytes is None:
            try:
                size_bytes = sizes_bytes[kind] = array_bytes(*kind)
            except ValueError as error:
                return f"{leaf.name!r}: {error}"
        if leaf.end != leaf.begin + size_bytes:
            return f"{leaf.name!r} should occupy bytes {leaf.begin} to {leaf.begin + size_bytes}, not to {leaf.end}"
        if len(leaf.spans) != DIGEST_CHARACTERS * -(-size_bytes // span_bytes):
            return f"{leaf.name!r}: its digests are malformed"
    if not _is_hexadecimal("".join([leaf.spans for leaf in leaves])):
        name = next(leaf.name for leaf in leaves if not _is_hexadecimal(leaf.spans))
        return f"{name!r}: its digests are malformed"
    if len({leaf.name for leaf in leaves}) != len(leaves):
        name = next(name for name, count in Counter(leaf.name for leaf in leaves).items() if count > 1)
        return f"{name!r} appears twice"
    return ""


def _is_hexadecimal(text: str) -> bool:
    return not text.strip("0123456789abcdef")


def find_name_problem(index: Index) -> str:
    """**Pure.** Names a leaf in an index's objects that exists neither in it nor elsewhere; empty if there is none."""
    known = index.list_leaves()
    for node in list_tagged(index.objects.values()):
        name = node.get("v")
        if node["$"] == "array" and not (isinstance(name, str) and name in known):
            return f"its objects refer to the leaf {str(name)[:_NAME_CHARACTERS]!r}, which is missing"
    return ""


def _find_strides_problem(index: Index) -> str:
    """Describes a problem of the strides of leaves: memory is allocated by them, and they must not reach beyond it."""
    leaves = index.list_leaves()
    for record in index.strides:
        _, shape = leaves.pop(record.leaf, ("", None))
        if shape is None:
            return f"the strides of {record.leaf!r} belong to no leaf, or appear twice"
        if not is_dense(shape, record.strides):
            return f"{record.leaf!r} of shape {list(shape)} cannot have the strides {list(record.strides)}"
    return ""


def _find_quantizers_problem(index: Index) -> str:
    leaves = index.list_leaves()
    quantizers = {record.leaf: record.quantizer for record in index.quantizers}
    if len(quantizers) < len(index.quantizers) or not quantizers.keys() <= leaves.keys():
        return "the quantizer of a leaf belongs to no leaf, or appears twice"
    for leaf, (dtype, shape) in leaves.items():
        problem = find_quantizer_problem(dtype, shape, quantizers.get(leaf))
        if problem:
            return f"{leaf!r} is invalid: {problem}"
    return ""


def _find_source_problem(index: Index) -> str:
    before: Source | None = None
    for source in index.sources:
        problem = find_order_problem(source.name, index.name)
        if problem:
            return problem
        if source.rank >= source.world_size:
            return f"a source of rank {source.rank} of {source.world_size} workers is not possible"
        # A file listed twice could be claimed twice, and so take more memory than its size on disk.
        if before is not None and (before.name, before.rank) >= (source.name, source.rank):
            return f"the source {source.name.directory} appears twice or out of order"
        before = source
    return ""


def _find_referred_problem(index: Index) -> str:
    number, offset = -1, 0
    for leaf in index.referred:
        if not 0 <= leaf.source < len(index.sources) or leaf.source not in (number, number + 1):
            return f"{leaf.name!r} refers to source {leaf.source} of {len(index.sources)}, out of order"
        if leaf.source != number:
            number, offset = leaf.source, 0
        # Arrays that shared bytes could claim more memory than the file's size on disk.
        if not offset <= leaf.begin <= leaf.end <= index.sources[number].data_bytes:
            return (
                f"{leaf.name!r} cannot be at bytes {leaf.begin} to {leaf.end} of a source of "
                f"{index.sources[number].data_bytes} bytes whose bytes before {offset} are taken"
            )
        offset = leaf.end
    if number + 1 != len(index.sources):
        return f"nothing refers to source {number + 1} of {len(index.sources)}"
    return ""


def find_part_problem(index: Index) -> str:
    """**Pure.** Describes a problem of the boxes of leaves in an index; empty if there is none."""
    records = {record.name: record for record in index.all_leaves()}
    leaves: dict[str, tuple[str, tuple[int, ...]]] = {}
    seen: set[str] = set()
    for part in index.boxes:
        record = records.get(part.name)
        if record is None or part.name in seen:
            return f"the box {part.name!r} belongs to no array, or appears twice"
        seen.add(part.name)
        problem = _find_kind_problem(record.dtype, part.global_shape) or find_box_problem(
            Box(part.offsets, record.shape), part.global_shape
        )
        if problem:
            return f"{part.name!r}: {problem}"
        leaf = (record.dtype, part.global_shape)
        if leaves.setdefault(part.leaf or part.name, leaf) != leaf:
            return f"the boxes of {part.leaf or part.name!r} are not of one leaf"
    wholes = records.keys() - seen
    if not wholes.isdisjoint(leaves):
        return f"{min(wholes & leaves.keys())!r} is both a whole leaf and a box of one"
    return _find_elsewhere_problem(index, leaves, wholes)


def _find_elsewhere_problem(
    index: Index, leaves: Mapping[str, tuple[str, tuple[int, ...]]], wholes: Container[str]
) -> str:
    seen: set[str] = set()
    for absent in index.elsewhere:
        if absent.name in seen or absent.name in wholes:
            return f"{absent.name!r} cannot be stored by another worker, or appears twice"
        seen.add(absent.name)
        problem = _find_kind_problem(absent.dtype, absent.shape)
        if problem:
            return f"{absent.name!r}: {problem}"
        if leaves.get(absent.name, (absent.dtype, absent.shape)) != (absent.dtype, absent.shape):
            return f"{absent.name!r} has another dtype or shape on another worker"
        if any(not 0 <= rank < index.world_size or rank == index.rank for rank in absent.ranks):
            return f"{absent.name!r} cannot be stored by the ranks {list(absent.ranks)}"
    return ""


def _find_kind_problem(dtype: str, shape: Sequence[int]) -> str:
    try:
        array_bytes(dtype, shape)
    except ValueError as error:
        return str(error)
    return ""


def find_cover_problem(indexes: Iterable[Index]) -> str:
    """**Pure.** Describes a problem of the boxes of a whole step, of all its workers together; empty if there is none.

    Each leaf that any of them names must be covered exactly: boxes have no element in common, unless they are the same
    box with the same digests, and together they cover all.
    """
    named: dict[str, tuple[str, tuple[int, ...], int]] = {}
    boxes: dict[str, dict[Box, StoredBox]] = {}
    for index in indexes:
        for stored in index.stored_boxes():
            problem = _find_name_problem(named, stored.leaf, stored.dtype, stored.global_shape, index.rank)
            if problem:
                return problem
            same = boxes.setdefault(stored.leaf, {}).setdefault(stored.box, stored)
            if same.record.spans != stored.record.spans:
                return f"{stored.leaf!r}: ranks {same.rank} and {stored.rank} have different values for {stored.box}"
        for absent in index.elsewhere:
            problem = _find_name_problem(named, absent.name, absent.dtype, absent.shape, index.rank)
            if problem:
                return problem
    for leaf, (_, shape, rank) in named.items():
        problem = _find_gap(shape, boxes.get(leaf, {}))
        if problem:
            return f"{leaf!r}, named by rank {rank}, {problem}"
    return ""


def _find_name_problem(
    named: dict[str, tuple[str, tuple[int, ...], int]], leaf: str, dtype: str, shape: tuple[int, ...], rank: int
) -> str:
    known = named.setdefault(leaf, (dtype, shape, rank))
    if known[:2] == (dtype, shape):
        return ""
    return f"{leaf!r} is {known[0]} {list(known[1])} on rank {known[2]}, but {dtype} {list(shape)} on rank {rank}"


def _find_gap(shape: tuple[int, ...], boxes: Mapping[Box, StoredBox]) -> str:
    wanted = whole_box(shape).elements
    found = sum(box.elements for box in boxes)
    if len(boxes) > 1:
        places = list(boxes)
        overlap = find_overlap(places)
        if overlap is not None:
            one, other = (boxes[places[place]] for place in overlap)
            return f"overlaps: rank {one.rank} has {one.box}, rank {other.rank} has {other.box}"
    if found != wanted:
        return f"is incomplete: the workers have {found} of its {wanted} elements"
    return ""
