"""Caches the captures of trees that are captured again and again.

A tree of dicts, lists, arrays and plain values is remembered together with everything that its capture added. The next
capture compares the containers with their keys, the classes of all parts, the facts that each library reports of many
arrays at once, and plain values. Only if all of that is the same, the cached results are used. Addresses of memory are
never kept, but always read again, so arrays may move. The cache holds no array and no container, so it keeps nothing
alive.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.format.encoding import MAX_DEPTH
from holdfast.format.scalars import ENCODERS, Malformed, Node, is_text, tagged
from holdfast.state.leaf_table import LeafEntries
from holdfast.state.own import MemoryGroups
from holdfast.state.registry import backend_of_type, is_made_of_tensors, sharder_of_type

LEAST_PARTS: Final = 32
"""Smaller trees are looked at part by part, which takes no longer."""

_MOST_MISSES: Final = 2
_LONGEST: Final = 4096
"""Trees with longer strings, or bytes, are not remembered: they would be kept in memory."""

_EXACT: Final = frozenset({str, int, bool, type(None), bytes})
"""Classes whose values are the same if they are equal. Of the others, 0.0 equals -0.0."""

_INEXACT: Final = frozenset({float, tuple})
_STRINGS: Final = frozenset({str})


class Rows(NamedTuple):
    """Parts of a container that are all dicts, or all lists, and contain only arrays or plain values.

    Attributes:
        names: The keys of each dict, or the length of each list.
        types: The classes of the values in the first, then in the next.
        are_arrays: True if all of these are arrays.
    """

    names: list[list[str]] | list[int]
    types: list[type]
    are_arrays: bool


@dataclass(slots=True)
class TreeShape:
    """A dict or a list within a tree.

    Attributes:
        cls: `dict` or `list`.
        keys: The keys of a dict.
        types: The classes of its parts.
        arrays: The places of arrays among the parts.
        scalars: Those of plain values.
        branches: Those of dicts and lists, with their shapes.
        slots: The numbers, in the whole tree, of the first plain value of this branch and the one after its last,
            including those of the branches in it.
        depth: Its depth in the tree.
        rows: The same facts for all of its parts at once, if these are uniform.
    """

    cls: type
    keys: list[str]
    types: list[type]
    depth: int
    arrays: list[int] = field(default_factory=list)
    scalars: list[int] = field(default_factory=list)
    branches: list[tuple[int, TreeShape]] = field(default_factory=list)
    slots: tuple[int, int] = (0, 0)
    rows: Rows | None = None


@dataclass(slots=True)
class TreeParts:
    """The contents of a tree, in one order for each `TreeShape`: its arrays, plain values, and containers."""

    arrays: list[Any] = field(default_factory=list)
    scalars: list[Any] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)


class CachedTree(msgspec.Struct):
    """A tree as it was when it was last captured.

    Attributes:
        conditions: The conditions on which its capture depends, besides the tree.
        branch: Its containers.
        depths: The depth of each of them in the tree.
        scalars: Its plain values.
        marks: The facts of its arrays.
        pattern: Which of its arrays have memory in common; None if none have.
        nodes: The nodes of its containers.
        sizes: How many values they count for.
        entries: What its arrays have added to the table of leaves.
    """

    conditions: tuple[object, ...]
    branch: TreeShape
    depths: list[int]
    scalars: list[Any]
    marks: object
    pattern: list[int] | None
    nodes: list[Node]
    sizes: list[int]
    entries: LeafEntries


class CaptureCache:
    """Passes results from one capture of the same objects to the next.

    Attributes:
        trees: By path.
        misses: By path, how many times in a row a tree had changed. The parts of one that changes each time are
            remembered one by one.
        groups: By path, the results for arrays that an object has named, and the arrays' facts.
    """

    def __init__(self) -> None:
        self.trees: dict[str, CachedTree] = {}
        self.misses: dict[str, int] = {}
        self.groups: MemoryGroups = {}

    def try_take(self, path: str, value: Any) -> tuple[CachedTree, TreeParts] | None:
        """Returns the tree that was remembered at a path, if the value has the same containers and classes."""
        cached = self.trees.get(path)
        if cached is None:
            return None
        contents = TreeParts()
        if take(cached.branch, value, contents):
            self.misses.pop(path, None)
            return cached, contents
        del self.trees[path]
        self._note_miss(path)
        return None

    def try_plan(self, path: str, value: Any, depth: int) -> TreeShape | None:
        """Returns the plan of a dict or a list that can be remembered as a whole; else None."""
        if self.misses.get(path, 0) >= _MOST_MISSES:
            return None
        shape = _plan(value, [0], 0, depth)
        if shape is None:
            self._note_miss(path)
        return shape

    def _note_miss(self, path: str) -> None:
        self.misses[path] = self.misses.get(path, 0) + 1


def _plan(value: Any, slots: list[int], depth: int, outer_depth: int) -> TreeShape | None:
    cls: type = type(value)
    if depth + outer_depth >= MAX_DEPTH:
        return None
    keys: list[str] = []
    parts: Any = value
    if cls is dict:
        keys, parts = list(value), list(value.values())
        if not all(type(key) is str and key[:1] != "$" and is_text(key) for key in keys):
            return None
    branch = TreeShape(cls, keys, list(map(type, parts)), depth)
    first = slots[0]
    inner: list[int] = []
    for place, (kind, part) in enumerate(zip(branch.types, parts, strict=True)):
        if kind is dict or kind is list:
            inner.append(place)
        elif is_fixed(part):
            branch.scalars.append(place)
        elif (backend_of_type(kind) or sharder_of_type(kind)) and not is_made_of_tensors(kind):
            branch.arrays.append(place)
        else:
            return None
    slots[0] += len(branch.scalars)
    for place in inner:
        within = _plan(parts[place], slots, depth + 1, outer_depth)
        if within is None:
            return None
        branch.branches.append((place, within))
    branch.slots = first, slots[0]
    branch.rows = _find_rows(branch)
    return branch


def _find_rows(branch: TreeShape) -> Rows | None:
    inner = [one for _, one in branch.branches]
    if len(inner) < len(branch.types) or not inner or any(one.branches for one in inner):
        return None
    arrays, scalars = sum(len(one.arrays) for one in inner), sum(len(one.scalars) for one in inner)
    if len(set(branch.types)) > 1 or (arrays and scalars):
        return None
    names: Any = [one.keys for one in inner] if branch.types[0] is dict else [len(one.types) for one in inner]
    return Rows(names, [kind for one in inner for kind in one.types], bool(arrays))


def is_fixed(value: Any) -> bool:
    """**Pure.** Returns True if a value is short and immutable."""
    cls = type(value)
    if cls is str or cls is bytes:
        return len(value) <= _LONGEST
    if cls is tuple and len(value) <= _LONGEST:
        return all(type(part) is not tuple and is_fixed(part) for part in value)
    return cls in _EXACT or cls is float


def take(branch: TreeShape, value: Any, contents: TreeParts) -> bool:
    """**Pure.** Gathers the contents of a value; returns False if its containers or classes differ."""
    cls: type = type(value)
    if cls is not branch.cls:
        return False
    contents.containers.append(value)
    parts: Any = value
    if branch.cls is dict:
        if list(value) != branch.keys or not _STRINGS.issuperset(map(type, value)):
            return False
        parts = list(value.values())
    if list(map(type, parts)) != branch.types:
        return False
    if branch.rows is not None:
        return _take_rows(branch.rows, parts, contents)
    if len(branch.arrays) == len(branch.types):
        contents.arrays += parts
    elif len(branch.scalars) == len(branch.types):
        contents.scalars += parts
    else:
        contents.arrays += [parts[place] for place in branch.arrays]
        contents.scalars += [parts[place] for place in branch.scalars]
        for place, inner in branch.branches:
            if not take(inner, parts[place], contents):
                return False
    return True


def _take_rows(rows: Rows, parts: list[Any], contents: TreeParts) -> bool:
    """**Pure.** Does the same as `take` with each part; all are of the right class."""
    if type(parts[0]) is dict:
        flat = list(chain.from_iterable(map(dict.values, parts)))
        names: Any = list(map(list, parts))
        if not _STRINGS.issuperset(map(type, chain.from_iterable(parts))):
            return False
    else:
        flat, names = list(chain.from_iterable(parts)), list(map(len, parts))
    if names != rows.names or list(map(type, flat)) != rows.types:
        return False
    contents.containers += parts
    if rows.are_arrays:
        contents.arrays += flat
    else:
        contents.scalars += flat
    return True


def list_branches(branch: TreeShape) -> list[TreeShape]:
    """**Pure.** Returns a branch and those in it, in the order of `TreeParts.containers`."""
    found = [branch]
    for _, inner in branch.branches:
        found += list_branches(inner)
    return found


def find_changed(old: Sequence[Any], new: Sequence[Any]) -> list[int]:
    """**Pure.** Returns the numbers of plain values that may have changed, of the same classes."""
    if all(map(operator.is_, old, new)):
        return []
    return [
        number
        for number, (before, now) in enumerate(zip(old, new, strict=True))
        if before is not now and (type(now) not in _EXACT or before != now)
    ]


def try_renew(cached: CachedTree, contents: TreeParts) -> list[Node] | None:
    """Returns the nodes of a tree's containers with its current plain values; None if one cannot be remembered."""
    changed = find_changed(cached.scalars, contents.scalars)
    if not changed:
        return cached.nodes
    nodes: dict[int, Node] = {}
    for number in changed:
        value = contents.scalars[number]
        if not is_fixed(value):
            return None
        try:
            nodes[number] = _encode(value)
        except Malformed:
            return None
    renewed: list[Node] = []
    _renew(cached.branch, iter(cached.nodes), nodes, renewed)
    return renewed


def _encode(value: Any) -> Node:
    if type(value) is tuple:
        return tagged("tuple", [ENCODERS[type(part)](part) for part in value])
    return ENCODERS[type(value)](value)


def _renew(branch: TreeShape, old: Any, changed: dict[int, Node], renewed: list[Node]) -> Node:
    node: Any = next(old)
    place = len(renewed)
    renewed.append(node)
    first = branch.slots[0]
    own = [number for number in range(first, first + len(branch.scalars)) if number in changed]
    parts = {branch.scalars[number - first]: changed[number] for number in own}
    for index, inner in branch.branches:
        made = _renew(inner, old, changed, renewed)
        if made is not node[branch.keys[index] if branch.cls is dict else index]:
            parts[index] = made
    if parts:
        node = node.copy()
        for index, part in parts.items():
            node[branch.keys[index] if branch.cls is dict else index] = part
        renewed[place] = node
    return node


def find_pattern(keys: Sequence[int]) -> list[int] | None:
    """**Pure.** Returns for each key the first place where it occurs; None if no two are equal."""
    if len(set(keys)) == len(keys):
        return None
    firsts: dict[int, int] = {}
    return [firsts.setdefault(key, place) for place, key in enumerate(keys)]
