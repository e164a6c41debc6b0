"""Inspects many arrays at once, of any libraries, or the rows of a long sequence, such as a replay buffer's.

That takes a fraction of the time that inspecting each takes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress
from math import isfinite
from operator import attrgetter
from typing import Any, Final, NamedTuple

from holdfast.format.codecs import is_namedtuple, name_of
from holdfast.format.encoding import escape
from holdfast.format.records import Worker
from holdfast.format.scalars import Node, is_text, tagged
from holdfast.state.registry import backend_of, backend_of_type, is_made_of_tensors, parts_of, sharder_of_type


class ArrayLook(NamedTuple):
    """The facts of many arrays.

    Attributes:
        bases: The plain arrays that hold their values on this worker.
        addresses: For each of these, the address where its memory begins, or 0.
        keys: Numbers of which two are equal only if two arrays begin with the same memory.
        marks: Equal for two lists of arrays only if they are captured in the same way, as far as it depends on their
            facts.
        firsts: For each array the number of its first base, if all are of one library.
        which, parts: For each array, the number of its library, and the facts of each library's arrays.
    """

    bases: Sequence[Any]
    addresses: Sequence[int]
    keys: Sequence[int]
    marks: object
    firsts: Sequence[int] = ()
    which: Sequence[int] = ()
    parts: Sequence[ArrayLook] = ()

    def list_firsts(self) -> Sequence[int]:
        """Returns for each array the number of its first base."""
        if not self.parts:
            return self.firsts
        begins = accumulate((len(part.bases) for part in self.parts), initial=0)
        ahead = [
            iter([begin + first for first in part.firsts]) for part, begin in zip(self.parts, begins, strict=False)
        ]
        return [next(ahead[number]) for number in self.which]


def look_at(arrays: Sequence[Any]) -> ArrayLook | None:
    """Inspects many arrays of any libraries; returns None if there is no faster way than one by one."""
    kinds = list(map(type, arrays))
    handlers = {kind: sharder_of_type(kind) or backend_of_type(kind) for kind in dict.fromkeys(kinds)}
    distinct = list({id(handler): handler for handler in handlers.values()}.values())
    if len(distinct) == 1:
        return _look_at_some(arrays, distinct[0])
    if not distinct:
        return ArrayLook((), (), (), ())
    numbers = {kind: distinct.index(handler) for kind, handler in handlers.items()}
    which = list(map(numbers.__getitem__, kinds))
    parts: list[ArrayLook] = []
    for number, handler in enumerate(distinct):
        look = _look_at_some(list(compress(arrays, map(number.__eq__, which))), handler)
        if look is None:
            return None
        parts.append(look)
    bases, addresses, keys = ([*chain.from_iterable(column)] for column in list(zip(*parts, strict=True))[:3])
    return ArrayLook(bases, addresses, keys, (which, [part.marks for part in parts]), which=which, parts=parts)


def _look_at_some(arrays: Sequence[Any], handler: Any) -> ArrayLook | None:
    try:
        glance = handler.glance(arrays)
    except Exception:  # noqa: BLE001  Any problem of an array is reported when it is looked at by itself.
        return None
    if glance is None:
        return None
    bases = arrays if glance.bases is None else glance.bases
    keys = glance.keys or glance.addresses
    if 0 in keys:
        keys = [key or -id(base) for key, base in zip(keys, bases, strict=True)]
    return ArrayLook(bases, glance.addresses, keys, (id(handler), glance.marks), glance.firsts or range(len(arrays)))


class CapturedLeaf(NamedTuple):
    """The result for one array.

    Attributes:
        leaf: Its leaf.
        arrays, replicas: The places of the leaf's arrays, and of its replicas, among those of the capture.
        is_own: True if no other worker has a part in it.
    """

    leaf: str
    arrays: range
    replicas: range
    is_own: bool = False


class KnownArrays:
    """The arrays that a capture has met, each with its leaf. Many that come at once are entered together.

    Attributes:
        leaves: By library and memory, the result for each array that was looked at by itself.
        looked_at: By the identity of such an array, the array, which keeps its identity so, and the result.
    """

    def __init__(self, worker: Worker) -> None:
        self.leaves: dict[Hashable, CapturedLeaf] = {}
        self.looked_at: dict[int, tuple[Any, CapturedLeaf]] = {}
        self._worker = worker
        # Arrays that came together, with the results for these; those after the first are in `leaves` already.
        self._taken: list[tuple[Sequence[Any], Sequence[CapturedLeaf]]] = []
        self._indexed = 0
        # Where the memory begins of all arrays that were met, but for the last ones.
        self._met: set[int] = set()
        self._not_met: list[Any] = []

    def add(self, memory: Hashable, written: CapturedLeaf) -> CapturedLeaf:
        """Enters the result for memory, and returns it."""
        self.leaves[memory] = written
        return written

    def note(self, array: Any, written: CapturedLeaf) -> None:
        """Notes the result for an array that was looked at by itself."""
        self.looked_at.setdefault(id(array), (array, written))
        self._not_met.append(array)

    def take(self, arrays: Sequence[Any], written: Sequence[CapturedLeaf], keys: Iterable[int]) -> None:
        """Enters many arrays, all of them new; `keys` are as in `ArrayLook`."""
        self._taken.append((arrays, written))
        self._met.update(keys)

    def are_new(self, keys: Sequence[int]) -> bool:
        """Returns True if no memory that begins at one of these addresses was met before."""
        if self._not_met:
            look = look_at(self._not_met)
            if look is None:
                return False
            self._met.update(look.keys)
            self._not_met.clear()
        return self._met.isdisjoint(keys)

    def find(self, array: Any, memory: Hashable) -> CapturedLeaf | None:
        """Returns the result for the memory of an array, if it was met before."""
        if self._indexed < len(self._taken):
            # Those are entered one array at a time only where it may be one of theirs, which is seldom.
            look = look_at([array])
            if look is None or not self._met.isdisjoint(look.keys):
                for own, written in self._taken[self._indexed :]:
                    self.leaves.update(zip(map(self._memory_of, own), written, strict=True))
                self._indexed = len(self._taken)
        return self.leaves.get(memory)

    def find_held(self, arrays: list[Any]) -> set[int]:
        """Returns the leaves whose memory one of the arrays shows in the same form, by number."""
        known = {key: written for key, (_, written) in self.looked_at.items()}
        for own, written in self._taken:
            known.update(zip(map(id, own), written, strict=True))
        found: list[CapturedLeaf | None] = list(map(known.get, map(id, arrays)))
        others = [array for array, written in zip(arrays, found, strict=True) if written is None]
        while others:
            array = others.pop()
            if is_made_of_tensors(type(array)):
                others += [part for _, part in parts_of(array)]
            elif sharder_of_type(type(array)) is not None or backend_of(array) is not None:
                found.append(self.find(array, self._memory_of(array)))
        return set(chain.from_iterable(map(_arrays, filter(None, found))))

    def _memory_of(self, array: Any) -> Hashable:
        """Returns a key of an array's memory that no other memory has while its object is looked at."""
        sharder = sharder_of_type(type(array))
        if sharder is not None:
            look = sharder.look(array, "", self._worker)
            return look.backend.name, look.memory
        backend = backend_of(array)
        assert backend is not None  # It was found to be an array.
        return backend.name, backend.alias_key(array)


_arrays: Final = attrgetter("arrays")


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


def _are_nodes(cls: type, values: list[Any]) -> bool:
    """**Pure.** Returns True if values of a class are their own nodes."""
    if cls is float:
        return all(map(isfinite, values))
    return cls in (bool, type(None)) or (cls is int and min(values) >= -(1 << 63) and max(values) < 1 << 63)
