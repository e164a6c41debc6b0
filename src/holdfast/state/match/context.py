"""What an adapter is given to prepare the loading of its object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.format.decoding import ABSENT, UNFILLED, malformed
from holdfast.format.encoding import escape
from holdfast.state.adapters import HANDED_OVER, Rules
from holdfast.state.leaves import ArraySpec, Differences, Skeleton
from holdfast.state.match.update_in_place import update_in_place

if TYPE_CHECKING:
    from holdfast.state.match.compare import Comparison


class ObjectLoading:
    """What an adapter may ask for one object; see `Loading`."""

    def __init__(self, comparison: Comparison, path: str, depth: int) -> None:
        self.path = path
        self.context = comparison.context
        self._comparison = comparison
        self._depth = depth

    @property
    def differences(self) -> Differences:
        """Where differences are noted."""
        return self._comparison.differences

    def name(self, *at: str) -> str:
        """The path of something in the object."""
        return "/".join([self.path, *map(escape, at)])

    def complete(self, value: Any) -> Any:
        """The value, with all arrays in their places."""
        return self._comparison.complete(value)

    def put(self, live: Any, value: Any) -> Any:
        """The value there once the live one has been changed."""
        return update_in_place(live, self.complete(value), {})

    def wants(self, *at: str) -> bool:
        """Whether what stands there is restored."""
        return self._comparison.whole or self._comparison.wants(self.name(*at))

    def value(self, stored: Skeleton, live: Any, *at: str, rules: Rules = HANDED_OVER, like: Any = None) -> Any:
        """The stored value."""
        comparison = self._comparison
        outer, comparison.rules = comparison.rules, rules
        outer_like, comparison.like = comparison.like, like
        try:
            path = self.name(*at)
            value = comparison.decode(stored, UNFILLED if live is None else live, path, self._depth + len(at))
        finally:
            comparison.rules, comparison.like = outer, outer_like
        return live if value is ABSENT else value

    def values(
        self,
        stored: Mapping[str, Skeleton],
        live: Mapping[str, Any],
        *at: str,
        rules: Rules = HANDED_OVER,
        like: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The stored values of many parts."""
        nodes: list[Skeleton] = []
        parts: list[Any] = []
        places: dict[str, range] = {}
        for name, node in stored.items():
            begin, part = len(nodes), live.get(name)
            if type(node) is dict and type(part) is dict and "$" not in node and node.keys() == part.keys():
                nodes += node.values()
                parts += map(part.__getitem__, node)
            else:
                nodes.append(node)
                parts.append(part)
            places[name] = range(begin, len(nodes))
        comparison = self._comparison
        outer, comparison.rules = comparison.rules, rules
        try:
            standing = comparison.standing(nodes, parts, self._depth + len(at) + 2)
        finally:
            comparison.rules = outer
        values: dict[str, Any] = {}
        for name, node in stored.items():
            if places[name] and all(map(standing.__contains__, places[name])):
                values[name] = dict(live[name]) if type(live[name]) is dict else live[name]
            else:
                one = None if like is None else like.get(name)
                values[name] = self.value(node, live.get(name), *at, name, rules=rules, like=one)
        return values

    def spec_of(self, stored: Skeleton) -> ArraySpec | None:
        """What a stored array is."""
        leaf = stored.get("v") if type(stored) is dict and stored.get("$") == "array" else None
        return self._comparison.spec_of(leaf) if type(leaf) is str else None

    def children(self, stored: Skeleton, *at: str) -> dict[str, Skeleton]:
        """The parts of a stored dict."""
        if type(stored) is not dict or "$" in stored:
            raise malformed(self.name(*at), "a dict is expected")
        return stored
