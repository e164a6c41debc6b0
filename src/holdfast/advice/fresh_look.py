"""Detects what a restart would refuse, at the save that holds it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import UnsupportedValueError
from holdfast.format.encoding import escape
from holdfast.state.adapters import LoadNeeds
from holdfast.state.registry import adapter_of, backend_of, list_unmade


class FreshLook:
    """Detects what a restart would refuse: what is saved, and a program that has just begun cannot take."""

    def __init__(self) -> None:
        self._first: dict[str, str] | None = None
        self._layouts: dict[str, LoadNeeds] = {}
        self._names: set[str] = set()
        self._is_begun = False
        self._warned: set[str] = set()
        self._rests_until_at = 0.0

    def note(self, objects: Mapping[str, object]) -> None:
        """Called before the first restore, or else the first save: notes what the program begins with."""
        if self._first is None:
            (self._first, self._layouts), self._names = _list_looks(objects), {*objects}

    def look(self, objects: Mapping[str, object]) -> list[str]:
        """Returns the warnings at a save, each once; after a look that takes long, the next saves go without."""
        begun_at = time.monotonic()
        if begun_at < self._rests_until_at:
            return []
        looks, layouts = _list_looks(objects)
        if self._first is None:
            self._first, self._names, self._layouts = looks, {*objects}, layouts
        if not self._is_begun:  # What was named before the first save is there at a restart as well.
            new = {name: root for name, root in objects.items() if name not in self._names}
            new_looks, new_layouts = _list_looks(new)
            self._is_begun, self._first, self._layouts = True, self._first | new_looks, self._layouts | new_layouts
        texts = []
        for path, layout in layouts.items():
            change = _describe_change(self._layouts.get(path, layout), layout)
            if change and path not in self._warned:
                self._warned.add(path)
                texts.append(
                    f"{path} {change}. A restart that begins as this program did is refused: {_ADVICE['object']}"
                )
        for path in looks.keys() | self._first.keys():
            then, now = self._first.get(path, ""), looks.get(path, "")
            kind = _kind_refused(then, now)
            if kind and path not in self._warned:
                self._warned.add(path)
                texts.append(
                    f"{path} is saved as {now or 'another value'}, and the program began with "
                    f"{then or 'no such thing'}. A restart that begins so is refused: {_ADVICE[kind]}"
                )
        ended_at = time.monotonic()
        if ended_at - begun_at > _SHORT_SECONDS:
            self._rests_until_at = ended_at + _RESTS * (ended_at - begun_at)
        return texts


_MOST_NAMED: Final = 3
_SHORT_SECONDS: Final = 0.001
_RESTS: Final = 100
"""After a look that was not short, there is no other for this many times as long."""

_ADVICE: Final = {
    "object": "let it begin with what it saves, or keep the state_dict() of what comes later as a value",
    "type": "call holdfast.register_type for the type when the program starts",
    "array": "keep it in a dict, which takes what is stored",
}


def _kind_refused(then: str, now: str) -> str:
    """**Pure.** Returns the kind of what a restart would refuse, "" for nothing."""
    kind = now.partition(" ")[0]
    if then == now or then.startswith("type"):
        return ""
    if kind in ("object", "type") or then.startswith("object"):
        return "type" if kind == "type" else "object"
    # Arithmetic makes a number of an array without dimensions; any other value takes an array.
    return "array" if then and not (then.endswith("[]") and not now) else ""


def _describe_change(then: LoadNeeds, now: LoadNeeds) -> str:
    """**Pure.** Returns what an object has gained, lost or reshaped, as far as a load would refuse it; "" for nothing.

    What it loads in its own way may change: its class decides.
    """
    gained, lost, reshaped = (
        [name for name in names if not name.startswith(then.own_prefixes or (" ",))]
        for names in (
            now.shapes.keys() - then.shapes.keys(),
            then.shapes.keys() - now.shapes.keys(),
            [name for name, shape in now.shapes.items() if then.shapes.get(name, shape) != shape],
        )
    )
    parts = [
        f"{word} {', '.join(sorted(names)[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}"
        for word, names in (("has gained", gained), ("has lost", lost), ("has another shape of", reshaped))
        if names
    ]
    return f"{', '.join(parts)} since the program began" if parts else ""


def _list_looks(objects: Mapping[str, object]) -> tuple[dict[str, str], dict[str, LoadNeeds]]:
    """Returns what a restart must find in the program, by its path; types by their names. Also what loads need."""
    looks: dict[str, str] = {}
    layouts: dict[str, LoadNeeds] = {}
    value: Any
    for name, root in objects.items():
        for path, value in list_unmade(root, escape(name)):
            adapter, library = adapter_of(value), backend_of(value)
            if adapter is not None:
                if (layout := adapter.layout_of(value)) is not None:
                    layouts[path] = layout
                groups = value.param_groups if adapter.kind == "torch.optimizer" else ()
                numbers = [len(group["params"]) for group in groups]
                looks[path] = f"object ({adapter.kind})" + (f" with {numbers} parameters in groups" if numbers else "")
            elif library is not None:
                with suppress(UnsupportedValueError):  # A save says so.
                    spec = library.describe([value]).check(0, path)
                    looks[path] = f"array {spec.dtype} {list(spec.shape)}"
            else:
                looks[f"{type(value).__qualname__} in {path}"] = "type that is not registered"
    return looks, layouts
