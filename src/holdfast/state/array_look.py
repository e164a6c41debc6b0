"""Inspects many arrays at once, of any libraries, in a fraction of the time that inspecting each takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.state.registry import backend_of_type, sharder_of_type


class ArrayLook(NamedTuple):
    """The facts of many arrays.

    Attributes:
        bases: For each, the plain array that holds its values on this worker.
        keys: For each, the address where the memory of its base begins; without one, a unique number below 0.
        marks: Equal for two lists of arrays only if they are captured in the same way, as far as it depends on their
            facts.
    """

    bases: list[Any]
    keys: list[int]
    marks: object


def look_at(arrays: Sequence[Any]) -> ArrayLook | None:
    """Inspects many arrays of any libraries; returns None if there is no faster way than one by one."""
    kinds = set(map(type, arrays))
    handlers = {kind: sharder_of_type(kind) or backend_of_type(kind) for kind in kinds}
    distinct = {id(handler): handler for handler in handlers.values()}
    if len(distinct) == 1:
        return _look_at_some(arrays, next(iter(distinct.values())))
    bases: list[Any] = [None] * len(arrays)
    keys = [0] * len(arrays)
    marks: list[object] = []
    for handler in distinct.values():
        places = [place for place, array in enumerate(arrays) if handlers[type(array)] is handler]
        look = _look_at_some([arrays[place] for place in places], handler)
        if look is None:
            return None
        marks.append((places, look.marks))
        for place, base, key in zip(places, look.bases, look.keys, strict=True):
            bases[place], keys[place] = base, key
    return ArrayLook(bases, keys, marks)


def _look_at_some(arrays: Sequence[Any], handler: Any) -> ArrayLook | None:
    try:
        bases, backend, outer = arrays, handler, None
        if hasattr(handler, "glance_divided"):
            found = handler.glance_divided(arrays)
            if found is None:
                return None
            backend, bases, outer = found
        glance = backend.glance(bases)
    except Exception:  # noqa: BLE001  Any problem of an array is reported when it is looked at by itself.
        return None
    if glance is None:
        return None
    keys = glance.addresses
    if 0 in keys:
        keys = [key or -id(base) for key, base in zip(keys, bases, strict=True)]
    return ArrayLook(list(bases), keys, (id(handler), outer, glance.marks))
