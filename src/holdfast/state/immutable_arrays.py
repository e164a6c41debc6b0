"""Arrays that cannot be changed: where the same ones are saved again, what was trained since is in others."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

from holdfast.state.registry import immutable_types
from holdfast.state.tree_walk import immutable_arrays_in

_WARNING: Final = (
    "{names}: the very arrays that were there before are saved again, and they cannot change. What was trained since "
    "is in others, and is NOT saved: put those into the checkpoint at the end of each step, as in checkpoint.{name} = "
    "{name} (run.checkpoint, if run is resumable's). If nothing of it is trained, all is well"
)


class ImmutableArrays:
    """Looks at objects again and again, and keeps nothing of them alive."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._seen: dict[str, list[weakref.ref[Any]]] = {}
        self._told: set[str] = set()

    def begin(self, objects: Mapping[str, object], step: int) -> None:
        """Notes what stands there before anything is trained beyond a step."""
        self._step = step
        # Not by `immutable_types` first: a library may be met here for the first time.
        self._seen = {name: list(map(weakref.ref, immutable_arrays_in(root))) for name, root in objects.items()}

    def look(self, objects: Mapping[str, object], step: int) -> str:
        """A warning of objects that hold the very arrays of an earlier step, and such as cannot change; "" if none do.

        Each is named once.
        """
        same = self._find_same(objects, step)
        return _WARNING.format(names=", ".join(same), name=same[0]) if same else ""

    def _find_same(self, objects: Mapping[str, object], step: int) -> list[str]:
        if not immutable_types():
            self._step = step
            return []
        earlier = self._seen if self._step is not None and self._step < step else {}
        self._step, self._seen = step, {}
        same: list[str] = []
        for name, root in objects.items():
            found, seen = immutable_arrays_in(root), earlier.get(name, [])
            if found and len(found) == len(seen) and all(map(_is_seen, seen, found)) and name not in self._told:
                same.append(name)
            self._seen[name] = list(map(weakref.ref, found))
        self._told.update(same)
        return same


def _is_seen(seen: weakref.ref[Any], array: object) -> bool:
    return seen() is array
