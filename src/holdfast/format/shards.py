"""How several arrays, of one worker or of many, make up one leaf. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.format.boxes import Box, find_box_problem, find_overlap, whole_box
from holdfast.format.dtypes import array_bytes
from holdfast.format.soundness import MAX_DIMENSIONS

if TYPE_CHECKING:
    from holdfast.format.index import Index, LeafRecord


class BoxRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an array is that is no leaf by itself, but a box of one.

    Attributes:
        name: The array's name, as it stands among the index's arrays.
        leaf: The leaf's name; empty if it is the same.
        global_shape: The leaf's shape.
        offsets: Where the array begins in the leaf, in elements.
    """

    name: str
    leaf: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class ElsewhereRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A leaf that the worker's state names, and of which it did not write all that it held.

    Attributes:
        name: The leaf's name.
        dtype: The element type.
        shape: The leaf's shape.
        ranks: The workers that wrote what is missing, as far as that is known; a hint where to look first.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class StoredBox(msgspec.Struct, frozen=True):
    """Where one box of a leaf lies.

    Attributes:
        leaf: The leaf's name.
        dtype: The element type.
        global_shape: The leaf's shape.
        box: Which part of the leaf it is.
        record: The array.
        rank: The worker whose index says so.
    """

    leaf: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    record: LeafRecord
    rank: int


def make_stored_box(record: LeafRecord, boxes: Mapping[str, BoxRecord], rank: int) -> StoredBox:
    """**Pure.** What part of which leaf an array is.

    Args:
        record: The array.
        boxes: The index's boxes by the name of the array.
        rank: Whose index it is.
    """
    part = boxes.get(record.name)
    if part is None:
        return StoredBox(record.name, record.dtype, record.shape, whole_box(record.shape), record, rank)
    box = Box(part.offsets, record.shape)
    return StoredBox(part.leaf or part.name, record.dtype, part.global_shape, box, record, rank)


def find_part_problem(index: Index) -> str:
    """**Pure.** What is wrong with what an index says of the leaves that its arrays are boxes of; empty if nothing."""
    records = {record.name: record for record in index.all_leaves()}
    leaves: dict[str, tuple[str, tuple[int, ...]]] = {}
    seen: set[str] = set()
    for part in index.boxes:
        record = records.get(part.name)
        if record is None or part.name in seen:
            return f"the box {part.name!r} is of no array, or stands twice"
        seen.add(part.name)
        problem = _find_leaf_problem(record.dtype, part.global_shape) or find_box_problem(
            Box(part.offsets, record.shape), part.global_shape
        )
        if problem:
            return f"{part.name!r}: {problem}"
        leaf = (record.dtype, part.global_shape)
        if leaves.setdefault(part.leaf or part.name, leaf) != leaf:
            return f"the boxes of {part.leaf or part.name!r} are not of one leaf"
    wholes = records.keys() - seen
    if not wholes.isdisjoint(leaves):
        return f"{min(wholes & leaves.keys())!r} is a whole leaf, and a box of one"
    return _find_elsewhere_problem(index, leaves, wholes)


def _find_elsewhere_problem(
    index: Index, leaves: Mapping[str, tuple[str, tuple[int, ...]]], wholes: Container[str]
) -> str:
    seen: set[str] = set()
    for absent in index.elsewhere:
        if absent.name in seen or absent.name in wholes:
            return f"{absent.name!r} cannot be elsewhere, or stands twice"
        seen.add(absent.name)
        problem = _find_leaf_problem(absent.dtype, absent.shape)
        if problem:
            return f"{absent.name!r}: {problem}"
        if leaves.get(absent.name, (absent.dtype, absent.shape)) != (absent.dtype, absent.shape):
            return f"{absent.name!r} is not the leaf elsewhere that it is here"
        if any(not 0 <= rank < index.world_size or rank == index.rank for rank in absent.ranks):
            return f"{absent.name!r} cannot lie with the ranks {list(absent.ranks)}"
    return ""


def _find_leaf_problem(dtype: str, shape: Sequence[int]) -> str:
    if len(shape) > MAX_DIMENSIONS:
        return f"a leaf has {len(shape)} dimensions"
    try:
        array_bytes(dtype, shape)
    except ValueError as error:
        return str(error)
    return ""


def find_cover_problem(indexes: Iterable[Index]) -> str:
    """**Pure.** What is wrong with the boxes of a whole step, of all its workers together; empty if nothing is.

    Each leaf that any of them names must be covered exactly: boxes have no element in common, unless they are the same
    box with the same digests, and together they leave none out.
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
            return f"{leaf!r}, which rank {rank} names, {problem}"
    return ""


def _find_name_problem(
    named: dict[str, tuple[str, tuple[int, ...], int]], leaf: str, dtype: str, shape: tuple[int, ...], rank: int
) -> str:
    known = named.setdefault(leaf, (dtype, shape, rank))
    if known[:2] == (dtype, shape):
        return ""
    return f"{leaf!r} is {known[0]} {list(known[1])} to rank {known[2]}, and {dtype} {list(shape)} to rank {rank}"


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
        return f"is incomplete: {found} of its {wanted} elements lie with a rank"
    return ""
