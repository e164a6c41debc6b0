"""Arrays that cannot be changed: where the same ones are saved again, what was trained since is in others."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.state.finding import arrays_in
from holdfast.state.registry import fixed_types


class FixedArrays:
    """Looks at objects again and again, and keeps nothing of them alive."""

    def __init__(self) -> None:
        self._seen: dict[str, list[weakref.ref[Any]]] = {}
        self._told: set[str] = set()

    def look(self, objects: Mapping[str, object]) -> list[str]:
        """The objects whose arrays cannot be changed, and are the very ones of the look before; each is named once."""
        types = fixed_types()
        if not types:
            return []
        before, self._seen = self._seen, {}
        same: list[str] = []
        for name, root in objects.items():
            found = [array for array in _unique(arrays_in(root)) if isinstance(array, types)]
            seen = before.get(name, [])
            if found and len(found) == len(seen) and all(map(_is_seen, seen, found)) and name not in self._told:
                same.append(name)
            self._seen[name] = list(map(weakref.ref, found))
        self._told.update(same)
        return same


def _unique(arrays: Iterator[object]) -> list[object]:
    return list({id(array): array for array in arrays}.values())


def _is_seen(seen: weakref.ref[Any], array: object) -> bool:
    return seen() is array
