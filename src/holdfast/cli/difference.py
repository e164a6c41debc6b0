"""Compares two checkpoints: their arrays, number by number, and the values that are not arrays.

Arrays are streamed, a few megabytes of each checkpoint at a time. An array whose digests are equal in both is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.cli.target import Contents
from holdfast.convert.leaf_stream import Extent, LeafReader, StoredLeaf
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.encoding import MAX_DEPTH
from holdfast.format.nodes import SHOWN_ELEMENTS, describe, find_array, is_sequence, list_children
from holdfast.format.scalars import Node

ChangeKind: TypeAlias = Literal["changed", "added", "removed", "dtype", "shape"]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Numbers: TypeAlias = npt.NDArray[np.float64] | npt.NDArray[np.complex128]

WINDOW_BYTES: Final = 8 << 20
_CHUNK_ELEMENTS: Final = WINDOW_BYTES // max(ITEM_BYTES.values())


@dataclass(slots=True)
class Norms:
    """Norms of the numbers of one array, or of the differences of two, over the numbers added so far."""

    squares: float = 0.0
    largest: float = 0.0
    nonfinite: int = 0

    def add(self, numbers: Numbers) -> None:
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

    def fields(self) -> dict[str, Any]:
        """**Pure.** The change in a JSON document."""
        return {
            "name": self.name,
            "change": self.kind,
            "a": None if self.a is None else {"dtype": self.a.dtype, "shape": list(self.a.shape)},
            "b": None if self.b is None else {"dtype": self.b.dtype, "shape": list(self.b.shape)},
            "changed_elements": self.changed_elements,
            "norm_a": self.norm_a.norm if self.norm_a else None,
            "norm_b": self.norm_b.norm if self.norm_b else None,
            "norm_difference": self.norm_difference.norm if self.norm_difference else None,
            "relative_difference": self.relative,
            "largest_difference": self.norm_difference.largest if self.norm_difference else None,
            "nonfinite_a": self.norm_a.nonfinite if self.norm_a else None,
            "nonfinite_b": self.norm_b.nonfinite if self.norm_b else None,
        }


def find_changed(a: Contents, b: Contents, select: Callable[[str], bool] | None) -> tuple[list[LeafChange], int]:
    """**Pure.** Compares arrays by their records alone. Returns those that differ, and the number of equal ones."""
    before, after = _signatures(a), _signatures(b)
    changes: list[LeafChange] = []
    same = 0
    for name in sorted(before.keys() | after.keys()):
        if select is not None and not select(name):
            continue
        old, new = before.get(name), after.get(name)
        if old == new:
            same += 1
            continue
        leaf_a, leaf_b = old and old[0], new and new[0]
        kind: ChangeKind = "changed"
        if leaf_a is None or leaf_b is None:
            kind = "added" if leaf_a is None else "removed"
        elif leaf_a.shape != leaf_b.shape:
            kind = "shape"
        elif leaf_a.dtype != leaf_b.dtype:
            kind = "dtype"
        changes.append(LeafChange(name, kind, leaf_a, leaf_b))
    return changes, same


_Signature: TypeAlias = tuple[StoredLeaf, frozenset[tuple[object, ...]]]


def _signatures(contents: Contents) -> dict[str, _Signature]:
    """Returns the type and shape of each leaf, and the digests of its boxes with the offsets of each box."""
    spans: dict[str, set[tuple[object, ...]]] = {}
    forms: dict[str, StoredLeaf] = {}
    for index in contents.opened.indexes:
        for stored in index.stored_boxes():
            forms[stored.leaf] = StoredLeaf(stored.dtype, stored.global_shape)
            box = (stored.box.offsets, stored.box.shape, index.span_bytes, stored.record.spans)
            spans.setdefault(stored.leaf, set()).add(box)
    return {name: (form, frozenset(spans[name])) for name, form in forms.items()}


def measure(changes: Sequence[LeafChange], a: LeafReader, b: LeafReader) -> Iterator[LeafChange | None]:
    """**Blocks.** Reads the arrays that changed. Yields each with its norms, in order, or None if it is the same.

    An array may be the same although its digests differ: it may have been divided into other boxes.

    Raises:
        DamageError: If bytes are not what was written.
        StorageError: If a place fails.
    """
    pieces_a = a.stream(_cut([one.name for one in changes if one.a is not None], a))
    pieces_b = b.stream(_cut([one.name for one in changes if one.b is not None], b))
    for change in changes:
        yield _measure_one(change, pieces_a, pieces_b)


def _cut(names: Sequence[str], reader: LeafReader) -> Iterator[Extent]:
    for name in names:
        yield from _chunks(name, reader.leaves[name].elements)


def _chunks(name: str, elements: int) -> Iterator[Extent]:
    for begin in range(0, elements, _CHUNK_ELEMENTS):
        yield Extent(name, begin, min(begin + _CHUNK_ELEMENTS, elements))


def _measure_one(
    change: LeafChange, pieces_a: Iterator[memoryview], pieces_b: Iterator[memoryview]
) -> LeafChange | None:
    norm_a = Norms() if change.a is not None and is_numeric(change.a.dtype) else None
    norm_b = Norms() if change.b is not None and is_numeric(change.b.dtype) else None
    if change.a is None or change.b is None or change.kind == "shape":
        for leaf, pieces, norms in ((change.a, pieces_a, norm_a), (change.b, pieces_b, norm_b)):
            for _ in _chunks(change.name, leaf.elements) if leaf is not None else ():
                data = np.frombuffer(next(pieces), np.uint8)
                if norms is not None and leaf is not None:
                    norms.add(to_numbers(data, leaf.dtype))
        return LeafChange(change.name, change.kind, change.a, change.b, None, norm_a, norm_b)
    changed = 0
    difference = Norms() if norm_a is not None and norm_b is not None else None
    for _ in _chunks(change.name, change.a.elements):
        data_a, data_b = np.frombuffer(next(pieces_a), np.uint8), np.frombuffer(next(pieces_b), np.uint8)
        if change.kind == "changed":
            changed += _count_changed(data_a, data_b, ITEM_BYTES[change.a.dtype])
        numbers_a = to_numbers(data_a, change.a.dtype) if norm_a is not None else None
        numbers_b = to_numbers(data_b, change.b.dtype) if norm_b is not None else None
        if norm_a is not None and numbers_a is not None:
            norm_a.add(numbers_a)
        if norm_b is not None and numbers_b is not None:
            norm_b.add(numbers_b)
        if difference is not None and numbers_a is not None and numbers_b is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                difference.add(numbers_b - numbers_a)
    if change.kind == "changed" and changed == 0:
        return None
    count = changed if change.kind == "changed" else None
    return LeafChange(change.name, change.kind, change.a, change.b, count, norm_a, norm_b, difference)


def _count_changed(a: Bytes, b: Bytes, item_bytes: int) -> int:
    if item_bytes in (1, 2, 4, 8):
        whole = np.dtype(f"u{item_bytes}")
        return int(np.count_nonzero(a.view(whole) != b.view(whole)))
    return int(np.count_nonzero((a != b).reshape(-1, item_bytes).any(axis=1)))


_PLAIN: Final = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "I16": "i2",
    "U16": "u2",
    "F16": "f2",
    "I32": "i4",
    "U32": "u4",
    "F32": "f4",
    "F64": "f8",
    "I64": "i8",
    "U64": "u8",
}
_COMPLEX: Final = {"C64": "c8", "complex128": "c16"}
_EIGHT_BITS: Final = {
    # Bits of the exponent, bits of the fraction, the exponent's bias, and the codes of NaN and of infinity.
    "F8_E5M2": (5, 2, 15, range(0x7D, 0x80), 0x7C),
    "F8_E4M3": (4, 3, 7, range(0x7F, 0x80), None),
    "F8_E5M2FNUZ": (5, 2, 16, range(0), None),
    "F8_E4M3FNUZ": (4, 3, 8, range(0), None),
    "F8_E8M0": (8, 0, 127, range(0), None),
}


def is_numeric(dtype: str) -> bool:
    """**Pure.** True if `to_numbers` can convert elements of this type."""
    return dtype in _PLAIN or dtype in _COMPLEX or dtype in _EIGHT_BITS or dtype == "BF16"


def to_numbers(data: Bytes, dtype: str) -> Numbers:
    """**Pure.** Converts bytes to float64 or complex128; `is_numeric(dtype)` must be true."""
    with np.errstate(invalid="ignore"):  # A NaN that signals is a NaN.
        if dtype in _COMPLEX:
            return data.view(np.dtype(_COMPLEX[dtype])).astype(np.complex128)
        if dtype == "BF16":
            wide = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).astype(np.float64)
        if dtype in _EIGHT_BITS:
            return _eight_bit_table(dtype)[data]
        return data.view(np.dtype(_PLAIN[dtype])).astype(np.float64)


@cache
def _eight_bit_table(dtype: str) -> npt.NDArray[np.float64]:
    exponent_bits, fraction_bits, bias, nans, infinity = _EIGHT_BITS[dtype]
    table = np.zeros(256)
    for code in range(256):
        sign = -1.0 if code >> (exponent_bits + fraction_bits) else 1.0
        magnitude = code & ((1 << (exponent_bits + fraction_bits)) - 1)
        exponent, fraction = magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1)
        # Without bits of a fraction there is no number below the smallest exponent, nor a sign.
        is_normal = exponent > 0 or fraction_bits == 0
        value = (is_normal + fraction / (1 << fraction_bits)) * 2.0 ** (max(exponent, int(not is_normal)) - bias)
        if magnitude in nans or (dtype.endswith("FNUZ") and code == 0x80) or (dtype == "F8_E8M0" and code == 0xFF):
            value = math.nan
        elif infinity is not None and magnitude == infinity:
            value = math.inf
        table[code] = sign * value
    return table


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
    if _are_alike(a, b, parts_a, parts_b):
        before, after = dict(parts_a or ()), dict(parts_b or ())
        for part in dict.fromkeys((*before, *after)):
            yield from _compare(f"{path}/{part}", before.get(part, _NOTHING), after.get(part, _NOTHING), depth + 1)
        return
    note_a = note_b = ""
    if parts_a is not None and parts_b is not None and max(len(parts_a), len(parts_b)) > SHOWN_ELEMENTS:
        differing = sum(one != other for one, other in zip(parts_a, parts_b, strict=False))
        differing += abs(len(parts_a) - len(parts_b))
        note_b = f" ({differing} of {max(len(parts_a), len(parts_b))} elements differ)"
    yield ValueChange(
        path,
        None if a is _NOTHING else describe(a) + note_a,
        None if b is _NOTHING else describe(b) + note_b,
    )


_Parts: TypeAlias = list[tuple[str, Node]] | None


def _are_alike(a: Node, b: Node, parts_a: _Parts, parts_b: _Parts) -> bool:
    """True if two containers are to be compared part by part, or one container that the other checkpoint lacks."""
    is_deep = any(list_children(part) or find_array(part) for parts in (parts_a, parts_b) for _, part in parts or ())
    if a is _NOTHING or b is _NOTHING:
        return is_deep
    if parts_a is None or parts_b is None or type(a) is not type(b):
        return False
    if type(a) is dict and (a.get("$"), a.get("k")) != (b.get("$"), b.get("k")):
        return False
    return is_deep or not is_sequence(a)
