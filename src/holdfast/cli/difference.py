"""Compares two checkpoints: their arrays, number by number, and the values that are not arrays.

Arrays are streamed, a few megabytes of each checkpoint at a time. An array whose digests are equal in both is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from holdfast.cli.target import Contents
from holdfast.convert.leaf_stream import Extent, LeafReader, StoredLeaf
from holdfast.format.dtypes import ITEM_BYTES, is_numeric, to_numbers
from holdfast.format.encoding import MAX_DEPTH
from holdfast.format.nodes import SHOWN_ELEMENTS, describe, find_array, find_random, is_sequence, list_children
from holdfast.format.scalars import Node

if TYPE_CHECKING:
    from holdfast.format.dtypes import Bytes, Numbers

ChangeKind: TypeAlias = Literal["changed", "added", "removed", "dtype", "shape"]

WINDOW_BYTES: Final = 8 << 20
_RANDOM_FORMS: Final = (("U8", (5056,)), ("U32", (624,)))
"""Types and shapes of the states of torch's and NumPy's random generators: their norms would say nothing."""

_CHUNK_ELEMENTS: Final = WINDOW_BYTES // max(ITEM_BYTES.values())


@dataclass(slots=True)
class Norms:
    """Norms of the numbers of one array, or of the differences of two, over the numbers added so far."""

    squares: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0

    def add(self, data: Bytes, dtype: str) -> Numbers:
        """Adds the numbers of an array, and returns them."""
        numbers = to_numbers(data, dtype)
        self.add_numbers(numbers)
        return numbers

    def add_numbers(self, numbers: Numbers) -> None:
        """Adds numbers. Infinities and NaN are counted, and left out of the norm."""
        magnitudes = np.abs(numbers)
        finite = np.isfinite(magnitudes)
        if not finite.all():
            self.nonfinite += int(finite.size - np.count_nonzero(finite))
            magnitudes = magnitudes[finite]
        if magnitudes.size:
            self.largest = max(self.largest, float(magnitudes.max()))
            with np.errstate(over="ignore"):
                self.squares += float(np.dot(magnitudes, magnitudes))

    @property
    def norm(self) -> float | None:
        """The Euclidean norm; None if it is too large for a float."""
        return math.sqrt(self.squares) if math.isfinite(self.squares) else None


@dataclass(frozen=True, slots=True)
class LeafChange:
    """One array that is not the same in both checkpoints, called A and B.

    Attributes:
        name: The leaf.
        kind: `added` if only B has it, `removed` if only A has it; `shape` or `dtype` if that differs; else `changed`.
        a: Its type and shape in A; None if A has none.
        b: The same for B.
        changed_elements: Number of elements that differ in any bit; None if they cannot be compared one by one.
        norm_a: Norms of A; None if it was not read, or its elements are not numbers.
        norm_b: Norms of B, likewise.
        norm_difference: Norms of B - A; None if the two cannot be subtracted.
    """

    name: str
    kind: ChangeKind
    a: StoredLeaf | None
    b: StoredLeaf | None
    changed_elements: int | None = None
    norm_a: Norms | None = None
    norm_b: Norms | None = None
    norm_difference: Norms | None = None

    @property
    def relative(self) -> float | None:
        """The norm of B - A divided by the norm of A; None if one of them is not known, or A's is 0."""
        before = self.norm_a.norm if self.norm_a else None
        difference = self.norm_difference.norm if self.norm_difference else None
        return difference / before if before and difference is not None else None


def find_changed(a: Contents, b: Contents, select: Callable[[str], bool] | None) -> tuple[list[LeafChange], int]:
    """**Pure.** Compares arrays by their records alone. Returns those that differ, and the number of equal ones."""
    before, after = _signatures(a), _signatures(b)
    leaves_a, leaves_b = a.leaves(), b.leaves()
    changes: list[LeafChange] = []
    names = [name for name in sorted(before.keys() | after.keys()) if select is None or select(name)]
    for name in names:
        if before.get(name) == after.get(name):
            continue
        leaf_a, leaf_b = leaves_a.get(name), leaves_b.get(name)
        kind: ChangeKind = "changed"
        if leaf_a is None or leaf_b is None:
            kind = "added" if leaf_a is None else "removed"
        elif leaf_a.shape != leaf_b.shape:
            kind = "shape"
        elif leaf_a.dtype != leaf_b.dtype:
            kind = "dtype"
        changes.append(LeafChange(name, kind, leaf_a, leaf_b))
    return changes, len(names) - len(changes)


def _signatures(contents: Contents) -> dict[str, set[tuple[object, ...]]]:
    """Returns for each leaf its type and shape, and of each of its boxes the offsets and the digests."""
    signatures: dict[str, set[tuple[object, ...]]] = {}
    for index in contents.opened.indexes:
        for stored in index.stored_boxes():
            form = (stored.dtype, stored.global_shape, stored.box.offsets, stored.box.shape)
            signatures.setdefault(stored.leaf, set()).add((*form, index.span_bytes, stored.record.spans))
    return signatures


def measure(changes: Sequence[LeafChange], a: LeafReader, b: LeafReader) -> Iterator[LeafChange | None]:
    """**Blocks.** Reads the arrays that changed. Yields each with its norms, in order, or None if it is the same.

    An array may be the same although its digests differ: it may have been divided into other boxes.

    Raises:
        DamageError: If bytes are not what was written.
        StorageError: If a place fails.
    """
    pieces_a = a.stream(extent for one in changes for extent in _cut(one.name, one.a))
    pieces_b = b.stream(extent for one in changes for extent in _cut(one.name, one.b))
    for change in changes:
        yield _measure_one(change, pieces_a, pieces_b)


def _cut(name: str, leaf: StoredLeaf | None) -> Iterator[Extent]:
    elements = leaf.elements if leaf is not None else 0
    for begin in range(0, elements, _CHUNK_ELEMENTS):
        yield Extent(name, begin, min(begin + _CHUNK_ELEMENTS, elements))


def _measure_one(
    change: LeafChange, pieces_a: Iterator[memoryview], pieces_b: Iterator[memoryview]
) -> LeafChange | None:
    norm_a, norm_b = (
        Norms()
        if leaf is not None and is_numeric(leaf.dtype) and (leaf.dtype, leaf.shape) not in _RANDOM_FORMS
        else None
        for leaf in (change.a, change.b)
    )
    have_same_shape = change.kind in ("changed", "dtype")
    difference = Norms() if have_same_shape and norm_a is not None and norm_b is not None else None
    changed = 0
    for extent_a, extent_b in zip_longest(_cut(change.name, change.a), _cut(change.name, change.b)):
        data_a = np.frombuffer(next(pieces_a) if extent_a else b"", np.uint8)
        data_b = np.frombuffer(next(pieces_b) if extent_b else b"", np.uint8)
        if change.kind == "changed" and change.a is not None:
            changed += _count_changed(data_a, data_b, ITEM_BYTES[change.a.dtype])
        numbers_a = norm_a.add(data_a, change.a.dtype) if norm_a is not None and change.a is not None else None
        numbers_b = norm_b.add(data_b, change.b.dtype) if norm_b is not None and change.b is not None else None
        if difference is not None and numbers_a is not None and numbers_b is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                difference.add_numbers(numbers_b - numbers_a)
    if change.kind == "changed" and changed == 0:
        return None
    count = changed if change.kind == "changed" else None
    return replace(change, changed_elements=count, norm_a=norm_a, norm_b=norm_b, norm_difference=difference)


def _count_changed(a: Bytes, b: Bytes, item_bytes: int) -> int:
    if item_bytes in (1, 2, 4, 8):
        whole = np.dtype(f"u{item_bytes}")
        return int(np.count_nonzero(a.view(whole) != b.view(whole)))
    return int(np.count_nonzero((a != b).reshape(-1, item_bytes).any(axis=1)))


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value, not an array, that differs: its text in each checkpoint; None if that checkpoint lacks it."""

    path: str
    a: str | None
    b: str | None


def compare_values(
    a: Mapping[str, Node], b: Mapping[str, Node], select: Callable[[str], bool] | None
) -> list[ValueChange]:
    """**Pure.** The values that differ, by path. A sequence of scalars counts as one value."""
    found: list[ValueChange] = []
    for name in dict.fromkeys((*a, *b)):
        found += _compare(name, a.get(name, _NOTHING), b.get(name, _NOTHING), 0)
    return found if select is None else [one for one in found if select(one.path)]


_NOTHING: Final = object()


def _compare(path: str, a: Node, b: Node, depth: int) -> Iterator[ValueChange]:
    if a == b and type(a) is type(b):
        return
    array_a, array_b = find_array(a), find_array(b)
    if array_a is not None and array_b is not None and (array_a == array_b or path in (array_a, array_b)):
        return  # Arrays are compared as such.
    if (array_a == path and b is _NOTHING) or (array_b == path and a is _NOTHING):
        return
    parts_a = list_children(a) if depth <= MAX_DEPTH and a is not _NOTHING else None
    parts_b = list_children(b) if depth <= MAX_DEPTH and b is not _NOTHING else None
    is_random = find_random(a) is not None or find_random(b) is not None
    if not is_random and _have_parts_in_common(a, b, parts_a, parts_b):
        before, after = dict(parts_a or ()), dict(parts_b or ())
        for part in dict.fromkeys((*before, *after)):
            yield from _compare(f"{path}/{part}", before.get(part, _NOTHING), after.get(part, _NOTHING), depth + 1)
        return
    note_b = ""
    if (
        not is_random
        and parts_a is not None
        and parts_b is not None
        and max(len(parts_a), len(parts_b)) > SHOWN_ELEMENTS
    ):
        differing = sum(one != other for one, other in zip(parts_a, parts_b, strict=False))
        differing += abs(len(parts_a) - len(parts_b))
        note_b = f" ({differing} of {max(len(parts_a), len(parts_b))} elements differ)"
    text_a, text_b = describe(a), describe(b) + note_b
    if text_a == text_b:
        text_b = "differs"
    yield ValueChange(path, None if a is _NOTHING else text_a, None if b is _NOTHING else text_b)


_Parts: TypeAlias = list[tuple[str, Node]] | None


def _have_parts_in_common(a: Node, b: Node, parts_a: _Parts, parts_b: _Parts) -> bool:
    """True if two containers are to be compared part by part, or one container that the other checkpoint lacks."""
    is_deep = any(list_children(part) or find_array(part) for parts in (parts_a, parts_b) for _, part in parts or ())
    if a is _NOTHING or b is _NOTHING:
        return is_deep
    if parts_a is None or parts_b is None or type(a) is not type(b):
        return False
    if type(a) is dict and (a.get("$"), a.get("k")) != (b.get("$"), b.get("k")):
        return False
    return is_deep or not is_sequence(a)
