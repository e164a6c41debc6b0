"""Tree nodes that programs and libraries register with JAX: modules of Equinox, dataclasses of Flax, and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from holdfast.state.registry import NodeParts, register_nodes


def read_node(value: Any) -> NodeParts | None:
    """Returns the parts of a registered node, and how to rebuild it; None if JAX takes it for a leaf."""
    found, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if len(found) == 1 and not found[0][0]:
        return None
    names = [_name(path[0]) for path, _ in found]
    if len(set(names)) < len(names) or any(name.startswith("$") for name in names):
        names = [str(number) for number in range(len(names))]

    def join(parts: Mapping[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(structure, [parts[name] for name in names])

    return NodeParts(dict(zip(names, (part for _, part in found), strict=True)), join)


def _name(key: Any) -> str:
    """Returns the name of a part: its attribute, its key, or its number."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


register_nodes(read_node)
