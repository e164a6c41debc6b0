"""Where the bytes of a checkpoint are: its leaves as a tree, by the parts of their names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

SHOWN_CHILDREN: Final = 16
"""How many children of one branch are listed; those beyond are summed up."""

_MAX_PARTS: Final = 16
_SEPARATOR: Final = re.compile(r"([/.])")
_NUMBER: Final = re.compile(r"([0-9]+)")


@dataclass(slots=True)
class Branch:
    """All leaves whose names begin in the same way.

    Attributes:
        name: What the names have in common beyond the branch above.
        leaves: How many they are.
        size_bytes: What they take.
        children: The branches below, by their part of the name.
    """

    name: str
    leaves: int = 0
    size_bytes: int = 0
    children: dict[str, Branch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a tree that is shown.

    Attributes:
        depth: How deep it stands; 0 for the root.
        label: Its name, or how many branches it sums up.
        leaves: How many leaves.
        size_bytes: What they take.
    """

    depth: int
    label: str
    leaves: int
    size_bytes: int


def grow_tree(root: str, leaves: Iterable[tuple[str, int]]) -> Branch:
    """**Pure.** The tree of one object.

    Args:
        root: The object's name.
        leaves: The name and size of each of its leaves.
    """
    tree = Branch(root)
    for name, size_bytes in leaves:
        branch = tree
        branch.leaves += 1
        branch.size_bytes += size_bytes
        for part in _parts(name.removeprefix(root)):
            branch = branch.children.setdefault(part, Branch(part))
            branch.leaves += 1
            branch.size_bytes += size_bytes
    return tree


def list_tree(tree: Branch, max_depth: int, depth: int = 0) -> Iterator[Line]:
    """**Pure.** The lines of a tree, down to a depth. Below the root, a branch is joined with its only child."""
    label = tree.name.lstrip("/.") or tree.name
    while depth > 0 and len(tree.children) == 1:
        (child,) = tree.children.values()
        if child.leaves < tree.leaves:
            break  # The branch is a leaf itself.
        label, tree = label + child.name, child
    yield Line(depth, label, tree.leaves, tree.size_bytes)
    if depth == max_depth:
        return
    children = sorted(tree.children.values(), key=lambda child: _natural_key(child.name))
    shown = children if len(children) <= SHOWN_CHILDREN else children[: SHOWN_CHILDREN - 1]
    for child in shown:
        yield from list_tree(child, max_depth, depth + 1)
    rest = children[len(shown) :]
    if rest:
        yield Line(
            depth + 1,
            f"({len(rest)} more)",
            sum(child.leaves for child in rest),
            sum(child.size_bytes for child in rest),
        )


def _parts(name: str) -> Iterator[str]:
    """The parts of a name, each with the separator before it."""
    pieces = _SEPARATOR.split(name, _MAX_PARTS)
    if pieces[0]:
        yield pieces[0]
    for separator, text in zip(pieces[1::2], pieces[2::2], strict=True):
        yield separator + text


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Orders `layers.2` before `layers.10`."""
    pieces = _NUMBER.split(name)
    return [(int(piece[:18]) if place % 2 else -1, piece) for place, piece in enumerate(pieces)]
