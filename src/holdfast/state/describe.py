"""Inspects many arrays at once, of any libraries, or the rows of a long sequence, such as a replay buffer's.

That takes a fraction of the time that inspecting each takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain
from math import isfinite
from typing import Any, NamedTuple

from holdfast.format.codecs import is_namedtuple, name_of
from holdfast.format.encoding import escape
from holdfast.format.scalars import Node, is_text, tagged
from holdfast.state.leaves import Pieces
from holdfast.state.registry import group_by_library, sharder_of_type


class ArrayLook(NamedTuple):
    """The facts of many arrays.

    Attributes:
        bases: The plain arrays that hold their values on this worker.
        addresses: For each of these, where its values begin in host memory in the stored layout, or 0.
        keys: For each array, a number that another one has only if both begin with the same memory.
        marks: Equal for two lists of arrays only if they are captured in the same way, as far as it depends on their
            facts.
        firsts: For each array the number of its first base.
    """

    bases: Sequence[Any]
    addresses: Sequence[int]
    keys: Sequence[int]
    marks: object
    firsts: Sequence[int]


def look_at(arrays: Sequence[Any]) -> ArrayLook | None:
    """Inspects many arrays of any libraries; returns None if there is no faster way than one by one."""
    if not arrays:
        return ArrayLook((), (), (), (), ())
    groups = group_by_library(arrays)
    if len(groups) == 1:
        return _look_at_some(arrays, groups[0][0])
    which = [0] * len(arrays)
    parts: list[ArrayLook] = []
    for number, (handler, places) in enumerate(groups):
        look = _look_at_some([arrays[place] for place in places], handler)
        if look is None:
            return None
        parts.append(look)
        for place in places:
            which[place] = number
    begins = accumulate((len(part.bases) for part in parts), initial=0)
    firsts = [iter([begin + first for first in part.firsts]) for part, begin in zip(parts, begins, strict=False)]
    keys = [iter(part.keys) for part in parts]
    return ArrayLook(
        [*chain.from_iterable(part.bases for part in parts)],
        [*chain.from_iterable(part.addresses for part in parts)],
        [next(keys[number]) for number in which],
        (which, [part.marks for part in parts]),
        [next(firsts[number]) for number in which],
    )


def _look_at_some(arrays: Sequence[Any], handler: Any) -> ArrayLook | None:
    """Inspects arrays of one library, or of one kind of sharded ones."""
    is_sharded = sharder_of_type(type(arrays[0])) is not None
    try:
        pieces = handler.take_apart(arrays) if is_sharded else Pieces(handler, arrays, None)
    except Exception:  # noqa: BLE001  Any problem of an array is reported when it is looked at by itself.
        return None
    if pieces is None:
        return None
    facts = pieces.backend.describe(pieces.arrays)
    if facts.problems:
        return None
    marks = id(handler), pieces.marks, facts.specs, facts.forms
    return ArrayLook(
        pieces.arrays, facts.addresses, pieces.keys or facts.keys, marks, pieces.firsts or range(len(arrays))
    )


class SplitRows(NamedTuple):
    """The parts of a sequence's elements, or the elements themselves if these have different forms.

    Attributes:
        cls: The class of all elements, whose parts `values` are; None if these are the elements themselves.
        keys: The key, field or number of each part of an element.
        values: The parts of the first element, then those of the next.
        total: How many values all of this is.
    """

    cls: type | None
    keys: Sequence[Any]
    values: list[Any]
    total: int

    @property
    def depth(self) -> int:
        """How many levels the values are below the elements."""
        return self.cls is not None

    def name_paths(self, path: str) -> Callable[[int], str]:
        """Returns a function from the number of a value to its path in a sequence at that path."""
        if self.cls is None:
            return lambda number: f"{path}/{number}"
        keys, width = [escape(str(key)) for key in self.keys], len(self.keys)
        return lambda number: f"{path}/{number // width}/{keys[number % width]}"

    def join(self, nodes: list[Node]) -> list[Node]:
        """Returns the nodes of the elements, given those of the values."""
        width, cls = len(self.keys), self.cls
        if cls is None:
            return nodes
        parts = [nodes[first : first + width] for first in range(0, len(nodes), width)]
        if cls is list:
            return parts
        if cls is tuple:
            return [{"$": "tuple", "v": part} for part in parts]
        named = [dict(zip(self.keys, part, strict=True)) for part in parts]
        return named if cls is dict else [tagged("namedtuple", part, name_of(cls)) for part in named]


def split_rows(elements: Collection[Any]) -> SplitRows:
    """Takes a sequence apart."""
    first = next(iter(elements))
    cls, keys, parts = type(first), [], elements
    if set(map(type, elements)) == {cls} and (cls in (tuple, list, dict) or is_namedtuple(cls)):
        keys = list(first) if cls is dict else list(getattr(cls, "_fields", range(len(first))))
        if cls is dict:
            parts = [one.values() for one in elements if list(one) == keys]
        is_named = cls is not dict or all(type(key) is str and key[:1] != "$" and is_text(key) for key in keys)
        if is_named and keys and len(parts) == len(elements) and set(map(len, parts)) == {len(keys)}:
            return SplitRows(cls, keys, [*chain.from_iterable(parts)], len(elements) * (1 + len(keys)))
    return SplitRows(None, (), [*elements], len(elements))


def are_nodes(cls: type, values: Sequence[Any]) -> bool:
    """**Pure.** Returns True if values of a class are their own nodes."""
    if cls is float:
        return all(map(isfinite, values))
    return cls in (bool, type(None)) or (cls is int and min(values) >= -(1 << 63) and max(values) < 1 << 63)
