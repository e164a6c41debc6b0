"""Puts a new tree of values in the place of a live one, keeping the live containers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from holdfast.format.codecs import is_plain_dataclass


def settle(live: Any, value: Any) -> Any:
    """Changes what can be changed of a live value where it is, so that it equals the new one.

    Args:
        live: What stands there now.
        value: What is to stand there.

    Returns:
        What stands there now: `live` itself if it could be changed, otherwise the new value, within which live
        containers have been kept.
    """
    if live is value or type(live) is not type(value):
        return value
    if isinstance(value, dict):
        if isinstance(value, collections.defaultdict):
            live.default_factory = value.default_factory
        items = [(key, settle(live.get(key), part)) for key, part in value.items()]
        live.clear()
        for key, part in items:
            live[key] = part
        return live
    if isinstance(value, list):
        live[:] = _settled_parts(live, value)
        return live
    if isinstance(value, tuple):
        parts = _settled_parts(live, value)
        if len(parts) == len(live) and all(part is own for part, own in zip(parts, live, strict=True)):
            return live
        return tuple.__new__(type(value), parts)
    if isinstance(value, collections.deque):
        if live.maxlen != value.maxlen:
            return value
        parts = _settled_parts(live, value)
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
        return _settle_dataclass(live, value)
    return value


def _settled_parts(live: Any, value: Any) -> list[Any]:
    own = list(live)
    return [settle(own[index], part) if index < len(own) else part for index, part in enumerate(value)]


def _settle_dataclass(live: Any, value: Any) -> Any:
    frozen = type(value).__dataclass_params__.frozen
    for field in dataclasses.fields(value):
        part = settle(getattr(live, field.name, None), getattr(value, field.name))
        object.__setattr__(value if frozen else live, field.name, part)
    return value if frozen else live
