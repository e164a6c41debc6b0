"""Converts the state of `torch.distributed.checkpoint`, a list of named items, to one holdfast tree. Pure.

An item is a tensor, or any other value. torch names it by its keys, joined with dots; here it is at these keys in a
tree, as `holdfast.save` would have written the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from holdfast.convert.leaf_tree import nest
from holdfast.errors import UsageError
from holdfast.format.codecs import Codec
from holdfast.format.decoding import Decoder, SubclassNode
from holdfast.format.encoding import escape
from holdfast.format.index import Index
from holdfast.format.scalars import Node, encode_str, is_text, tagged
from holdfast.integrations.torch.tensors import TORCH_DTYPES

TREE: Final = "tree"
"""The single object of such a step, as in `holdfast.save`."""

ItemPath: TypeAlias = tuple[str | int, ...]
"""The keys of dicts, and the indices of lists, on the way to an item."""


def find_path(paths: object, name: str) -> ItemPath:
    """**Pure.** Returns the path of an item, from the planner's data; without that, its name is its only key."""
    path = paths.get(name) if isinstance(paths, Mapping) else None
    return path if type(path) is tuple else (name,)


def leaf_name(path: ItemPath) -> str:
    """**Pure.** Returns the name of an item's leaf."""
    return "/".join((TREE, *(escape(str(part)) for part in path)))


class _Ready(msgspec.Struct, frozen=True):
    node: Node


def join_nodes(nodes: Mapping[ItemPath, Node]) -> Node:
    """**Pure.** Joins the nodes of all items to the node of a tree; raises `UsageError` if their paths contradict."""
    tree = nest(((path, _Ready(node)) for path, node in nodes.items()), lambda what: UsageError(f"the state: {what}"))
    return _join(tree)


def _join(tree: Any) -> Node:
    """Returns the node of a tree. Numbered entries are a list; an entry that a planner left out is None."""
    if type(tree) is _Ready:
        return tree.node
    parts = {key: _join(part) for key, part in tree.items()}
    if parts and all(type(key) is int for key in parts):
        return [parts.get(number) for number in range(max(parts) + 1)]
    if all(is_text(key) and key[:1] != "$" for key in parts):
        return parts
    return tagged("dict", [[encode_str(key), part] for key, part in parts.items()])


class Items(msgspec.Struct, frozen=True):
    """The items of a step.

    Attributes:
        paths: The path of each item, by name; None if the state was not split below its own keys.
        leaves: The leaf of each item, in order; empty for one that is not a tensor.
        nodes: The node of each item that is not a tensor.
    """

    paths: dict[str, ItemPath] | None
    leaves: dict[str, str]
    nodes: dict[str, Node]


def list_items(tree: Node, leaves: Mapping[str, tuple[str, tuple[int, ...]]], *, flattened: bool) -> Items:
    """**Pure.** Splits a tree into items, with torch's own function.

    Args:
        tree: The node of the tree.
        leaves: Dtype and shape of each leaf.
        flattened: True to split below the keys of the state itself.

    Raises:
        FormatError: If it is malformed.
    """
    outline = _Outline(leaves)
    state = outline.decode(tree)
    if flattened:
        items, paths = flatten_state_dict(state)
    else:
        items, paths = state, None
    found = {name: outline.leaf_of.get(id(value), "") for name, value in items.items()}
    nodes = {name: find_node(tree, find_path(paths, name)) for name, leaf in found.items() if not leaf}
    return Items(paths, found, nodes)


def find_node(tree: Node, path: ItemPath) -> Node:
    """**Pure.** Returns the node of an item."""
    for part in path:
        if type(tree) is dict and "$" in tree:
            tree = next(node for key, node in tree["v"] if Decoder().decode(key) == part)
        else:
            tree = tree[part]
    return tree


class _Outline(Decoder):
    """Decodes a tree in which every tensor has only its shape, and values that need a type of the program are left out.

    Attributes:
        leaf_of: The leaf of each tensor, by its identity.
    """

    def __init__(self, leaves: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        super().__init__(lambda tag: Codec(object, tag, lambda value: value, lambda value: value))
        self._leaves = leaves
        self._made: list[torch.Tensor] = []  # Their identities stay their own.
        self.leaf_of: dict[int, str] = {}

    def array(self, leaf: str, library: str, live: Any, path: str) -> Any:
        if library != "torch":
            return None
        dtype, shape = self._leaves[leaf]
        self._made.append(torch.empty(shape, dtype=TORCH_DTYPES[dtype], device="meta"))
        self.leaf_of[id(self._made[-1])] = leaf
        return self._made[-1]

    def coded(self, codec: Codec, payload: Node, live: Any, path: str, depth: int) -> Any:
        return None

    def stateful(self, kind: str, state: Node, live: Any, path: str, depth: int) -> Any:
        return None

    def subclass(self, name: str, stored: SubclassNode, live: Any, path: str, depth: int) -> Any:
        return None

    def unknown_type(self, name: str, live: Any, path: str) -> Any:
        return None


def list_leaves(indexes: tuple[Index, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """**Pure.** Returns dtype and shape of each leaf of a step."""
    return {leaf: form for index in indexes for leaf, form in index.list_leaves().items()}
