"""Arrays that cannot be changed once they are made: something stands for each until its values have been read."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, TypeAlias

from holdfast.format.codecs import is_plain_dataclass
from holdfast.state.leaves import PendingArray

Finished: TypeAlias = dict[int, Any]
"""By the identity of what stood for it, each array that has been made."""


def finish_arrays(value: Any, finished: Finished) -> Any:
    """Puts arrays in the places of what stands for them.

    Dicts, lists and objects are changed where they are; what cannot be changed is made anew, with all that holds it, if
    there is such a place in it.

    Args:
        value: A tree of values, which does not contain itself.
        finished: The arrays that have been made before; those made now are added.

    Returns:
        The tree.
    """
    if isinstance(value, PendingArray):
        if id(value) not in finished:
            finished[id(value)] = value.finish()
        return finished[id(value)]
    if isinstance(value, dict):
        for key, part in value.items():
            new = finish_arrays(part, finished)
            if new is not part:
                value[key] = new
    elif isinstance(value, (list, collections.deque)):
        for place, part in enumerate(value):
            value[place] = finish_arrays(part, finished)
    elif isinstance(value, tuple):
        parts = [finish_arrays(part, finished) for part in value]
        if any(new is not part for new, part in zip(parts, value, strict=True)):
            return tuple.__new__(type(value), parts)
    elif is_plain_dataclass(type(value)):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name, None)
            new = finish_arrays(part, finished)
            if new is not part:
                object.__setattr__(value, field.name, new)
    return value
