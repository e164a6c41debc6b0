"""Takes apart long sequences whose elements are alike, such as the transitions of a replay buffer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

from holdfast.format.codecs import is_namedtuple, name_of
from holdfast.format.encoding import escape
from holdfast.format.scalars import Node, is_text, tagged


class Rows(NamedTuple):
    """The parts of a sequence's elements, or the elements themselves if they are not alike.

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

    def list_paths(self, path: str) -> list[str]:
        """Returns the path of each value in a sequence at that path."""
        if self.cls is None:
            return [f"{path}/{number}" for number in range(len(self.values))]
        keys = [escape(str(key)) for key in self.keys]
        return [f"{path}/{number}/{key}" for number in range(len(self.values) // len(keys)) for key in keys]

    def list_groups(self) -> Iterator[tuple[type, list[int], list[Any]]]:
        """Yields the values of each class that are not nodes already, with their positions."""
        kinds = list(map(type, self.values))
        for cls in dict.fromkeys(kinds):
            places = [place for place, kind in enumerate(kinds) if kind is cls]
            values = [self.values[place] for place in places]
            if not _are_nodes(cls, values):
                yield cls, places, values

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


def split_rows(elements: Collection[Any]) -> Rows:
    """Takes a sequence apart."""
    first = next(iter(elements))
    cls, keys, parts = type(first), [], elements
    if set(map(type, elements)) == {cls} and (cls in (tuple, list, dict) or is_namedtuple(cls)):
        keys = list(first) if cls is dict else list(getattr(cls, "_fields", range(len(first))))
        if cls is dict:
            parts = [one.values() for one in elements if list(one) == keys]
        is_named = cls is not dict or all(type(key) is str and key[:1] != "$" and is_text(key) for key in keys)
        if is_named and keys and len(parts) == len(elements) and set(map(len, parts)) == {len(keys)}:
            return Rows(cls, keys, [*chain.from_iterable(parts)], len(elements) * (1 + len(keys)))
    return Rows(None, (), [*elements], len(elements))


def _are_nodes(cls: type, values: list[Any]) -> bool:
    """**Pure.** Returns True if values of a class are their own nodes."""
    if cls is float:
        return all(map(isfinite, values))
    return cls in (bool, type(None)) or (cls is int and min(values) >= -(1 << 63) and max(values) < 1 << 63)
