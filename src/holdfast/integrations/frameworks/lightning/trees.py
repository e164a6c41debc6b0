"""Trees of values that are saved with a run and given back as stored, regardless of the live ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.state.adapters import Replication, StateAdapter
from holdfast.state.registry import register_adapter


class KeptTree:
    """A tree that is read when it is saved. A restore puts the stored tree into `loaded`, and applies nothing.

    Attributes:
        read: Returns the tree. Its arrays may be live: they are copied at once.
        loaded: The restored tree; None before a restore, or if it had none.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read
        self.loaded: Any = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


class OwnTree(KeptTree):
    """A tree of which each worker has its own."""


def _put(tree: KeptTree, loaded: Any) -> None:
    tree.loaded = loaded


class _TreeAdapter(StateAdapter):
    """Workers may have different values, such as metrics that each logs for itself. Those of rank 0 are saved."""

    def replication_of(self, obj: Any) -> Replication:
        return Replication(trained=())


class _OwnTreeAdapter(StateAdapter):
    is_per_worker = True


register_adapter(KeptTree, _TreeAdapter("lightning.tree", lambda tree: tree.read(), _put, compare=False))
register_adapter(OwnTree, _OwnTreeAdapter("lightning.own_tree", lambda tree: tree.read(), _put, compare=False))
