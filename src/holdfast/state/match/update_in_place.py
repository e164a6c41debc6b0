"""Replaces a live tree of values by a new one, keeping the live containers."""

from __future__ import annotations

import collections
import dataclasses
import json
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

from holdfast.errors import ApplyError
from holdfast.format.codecs import is_plain_dataclass
from holdfast.format.scalars import ENCODERS
from holdfast.state.leaves import PendingArray

Updated: TypeAlias = dict[int, tuple[Any, Any]]
"""The live containers that have been changed, by their ids, each with its new value."""


def update_in_place(live: Any, value: Any, updated: Updated) -> Any:
    """Changes a live value in place as far as possible, so that it equals the new one.

    A live container that appears in several places gets the value of the first of them. It stays in the others if their
    values are the same; otherwise they get containers of their own.

    Args:
        live: The current value.
        value: The new value.
        updated: The containers that have been changed before; those changed now are added.

    Returns:
        `live` itself if it could be changed, otherwise the new value, in which live containers have been kept.
    """
    if live is value or type(live) is not type(value):
        return value
    if _is_changeable(value):
        if id(live) in updated:
            return live if _same(updated[id(live)][1], value) else value
        # Noted before it is changed, for it may contain itself.
        updated[id(live)] = (live, value)
    if isinstance(value, dict):
        if isinstance(value, collections.defaultdict):
            live.default_factory = value.default_factory
        if hasattr(value, "_metadata"):  # As in the result of a torch module's state_dict().
            live._metadata = value._metadata
        if _holds_the_same(live, value):
            return live
        items = [(key, update_in_place(live.get(key), part, updated)) for key, part in value.items()]
        live.clear()
        for key, part in items:
            live[key] = part
        return live
    if isinstance(value, list):
        live[:] = _updated_parts(live, value, updated)
        return live
    if isinstance(value, tuple):
        parts = _updated_parts(live, value, updated)
        if len(parts) == len(live) and all(part is own for part, own in zip(parts, live, strict=True)):
            return live
        return tuple.__new__(type(value), parts)
    if isinstance(value, collections.deque):
        if live.maxlen != value.maxlen:
            return value
        parts = _updated_parts(live, value, updated)
        live.clear()
        live.extend(parts)
        return live
    if isinstance(value, set):
        live.clear()
        live.update(value)
        return live
    if isinstance(value, bytearray):
        live[:] = value
        return live
    if is_plain_dataclass(type(value)):
        return _settle_dataclass(live, value, updated)
    return value


def _holds_the_same(live: dict[Any, Any], value: dict[Any, Any]) -> bool:
    """Returns True if two dicts have identical parts under equal keys of the same types, in the same order."""
    return (
        len(live) == len(value)
        and all(map(operator.is_, live.values(), value.values()))
        and list(live) == list(value)
        and list(map(type, live)) == list(map(type, value))
    )


def _updated_parts(live: Any, value: Any, updated: Updated) -> list[Any]:
    own = list(live)
    return [
        update_in_place(own[index], part, updated) if index < len(own) else part for index, part in enumerate(value)
    ]


def _settle_dataclass(live: Any, value: Any, updated: Updated) -> Any:
    frozen = type(value).__dataclass_params__.frozen
    for field in dataclasses.fields(value):
        part = update_in_place(getattr(live, field.name, None), getattr(value, field.name), updated)
        object.__setattr__(value if frozen else live, field.name, part)
    return value if frozen else live


def _is_changeable(value: Any) -> bool:
    if is_plain_dataclass(type(value)):
        return not type(value).__dataclass_params__.frozen
    return isinstance(value, (dict, list, collections.deque, set, bytearray))


def _same(left: Any, right: Any) -> bool:
    """Returns True if two decoded values are the same to the bit; arrays and objects if they are identical."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        factories_agree = getattr(left, "default_factory", None) is getattr(right, "default_factory", None)
        return factories_agree and _same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple, collections.deque)):
        if isinstance(left, collections.deque) and left.maxlen != right.maxlen:
            return False
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, (set, frozenset)):
        # 1 and True are equal, but not the same.
        others = {element: element for element in right}
        return left == right and all(_same(element, others[element]) for element in left)
    if is_plain_dataclass(type(left)):
        names = [field.name for field in dataclasses.fields(left)]
        return all(_same(getattr(left, name, None), getattr(right, name, None)) for name in names)
    # What is written tells -0.0 from 0.0, and finds NaN the same as NaN.
    encode = ENCODERS.get(type(left))
    return encode is not None and json.dumps(encode(left)) == json.dumps(encode(right))


Finished: TypeAlias = dict[int, Any]
"""By the identity of its replacement, each array that has been created."""


class PendingValue(PendingArray):
    """A placeholder of a value that is made from its parts after the arrays in these have been read."""

    def __init__(self, parts: Any, make: Callable[[Any], Any], problem: str, finished: Finished) -> None:
        """Takes what makes the value, and what to say if that fails."""
        self._parts, self._make, self._problem, self._finished = parts, make, problem, finished

    def finish(self) -> Any:
        """Makes the value.

        Raises:
            ApplyError: If the stored parts are rejected.
        """
        parts = finish_arrays(self._parts, self._finished)
        try:
            return self._make(parts)
        except Exception as error:
            raise ApplyError(
                f"{self._problem}: {error!r}",
                hint="See the cause above; objects before it have already been changed.",
            ) from error


def finish_arrays(value: Any, finished: Finished) -> Any:
    """Puts arrays in the places of their replacements.

    Dicts, lists and objects are changed in place; immutable containers with replacements in them are created again.

    Args:
        value: A tree of values, which does not contain itself.
        finished: The arrays that have been created before; those created now are added.

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
