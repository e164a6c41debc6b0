"""Digests of batches, taken without waiting for a device."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Number
from typing import Any, Final, NamedTuple

import xxhash

from holdfast.state.registry import backend_of, backend_of_type, parts_of

_MASK: Final = (1 << 64) - 1
_WHOLE_BYTES: Final = 128 << 10
"""An array up to this size is digested whole; of a larger one, some elements of each sample."""
_SAMPLED: Final = 1024
"""About how many elements that are, in all samples together."""

_MOST_LEAVES: Final = 4096
_MOST_VALUES: Final = 64
_MOST_PLANS: Final = 1024
_PLAIN: Final = frozenset({int, float, bool, complex, str, bytes, type(None)})
_INTEGER: Final = struct.Struct("<Q")
_hash: Final = xxhash.xxh3_64_intdigest


class _DigestPlan(NamedTuple):
    """The way in which arrays of one type and shape are digested.

    Attributes:
        about: A digest of both.
        is_direct: True if all of their bytes are, in place.
        places: Otherwise the index of the elements that are.
    """

    about: int
    is_direct: bool
    places: Any


_plans: Final[dict[Any, _DigestPlan]] = {}


def digest_batch(batch: Any) -> int:
    """Returns 63 bits that differ for batches that differ, and a lowest bit that is set if not all of it was seen.

    A part is not seen if it is on a device, not computed yet, or beyond the number of parts that are looked at.
    """
    state = unseen = count = 0
    ahead = [batch]
    while ahead and not (unseen := unseen or count >= _MOST_LEAVES):
        value = ahead.pop()
        count += 1
        cls = type(value)
        if cls is dict:
            state = _hash_text("\0".join(map(str, value)), state)
            ahead += value.values()
        elif cls in _PLAIN:
            state = _hash_text(value if cls is str else repr(value), state)
        elif cls is list or cls is tuple:
            state = _hash_text(f"{cls is list}{len(value)}", state)
            some = value if len(value) <= _MOST_VALUES else [*value[:: len(value) // _MOST_VALUES], value[-1]]
            if _PLAIN.issuperset(map(type, some)):
                state = _hash_text(repr(some), state)
            else:
                ahead += value
        elif (library := backend_of_type(cls)) is None:
            parts = _take_apart(value)
            about = repr(value) if isinstance(value, Number | str | bytes) else cls.__qualname__
            state = _hash_text("\0".join([about, *map(str, parts)]), state)
            ahead += parts.values()
        elif (array := library.sight.peek(value)) is None:
            state, unseen = _hash_text(repr(tuple(value.shape)), state), 1
        else:
            key = array.dtype.num, array.itemsize, array.shape
            plan = _plans.get(key) or _plan(key, array)
            if plan.is_direct and array.flags.c_contiguous:
                state = _hash(array, (state + plan.about) & _MASK)
            elif array.dtype.hasobject:
                ahead.append(array.ravel()[:_MOST_VALUES].tolist())
            else:
                state = _hash(array[plan.places].tobytes(), (state + plan.about) & _MASK)
    return state & ~1 | unseen


def _hash_text(text: str, state: int = 0) -> int:
    return _hash(text.encode(errors="surrogatepass"), state)


def _plan(key: Any, array: Any) -> _DigestPlan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    elements = math.prod(array.shape[1:])
    number = max(4, min(64, _SAMPLED // max(array.shape[0], 1))) if array.ndim > 1 else elements
    places: Any = ...
    if array.nbytes > _WHOLE_BYTES and elements > number:
        import numpy as np

        flat = np.linspace(0, elements - 1, number).astype(np.intp)
        places = slice(None), *np.unravel_index(flat, array.shape[1:])
    plan = _plans[key] = _DigestPlan(_hash_text(repr(key)), places is ... and array.dtype.kind in "iufb", places)
    return plan


def _take_apart(value: Any) -> Mapping[Any, Any]:
    """Returns the parts of an object that may be a batch, such as a `Data` of PyG; what is none has none."""
    with suppress(Exception):
        if isinstance(value, Mapping):
            return value
        if callable(getattr(value, "to_dict", None)):
            return dict(value.to_dict())
        own = getattr(value, "__dict__", {}).items()
        return dict(parts_of(value)) or {name: part for name, part in own if type(part) in _PLAIN or backend_of(part)}
    return {}


class BatchLog:
    """The batches that training took from a loader since the last counted step.

    Attributes:
        name: The loader, for people.
        facts: Returns what decides which batches come, as far as the program announces it: the batch size, say.
    """

    def __init__(self, name: str, facts: Callable[[], object]) -> None:
        self.name, self.facts = name, facts
        self._taken = (0, 0)

    def add(self, batch: Any) -> None:
        """Called with each batch, when training takes it."""
        (number, state), found = self._taken, digest_batch(batch)
        self._taken = number + 1, _hash(_INTEGER.pack(found), state) & ~1 | (state | found) & 1

    def take(self) -> tuple[int, int]:
        """Returns how many batches the step took that is counted now, and a digest of them like that of a batch."""
        taken, self._taken = self._taken, (0, 0)
        return taken


def combine(taken: list[tuple[int, int]]) -> tuple[int, int]:
    """**Pure.** Returns how many batches all loaders gave together, and one digest like that of a batch."""
    if len(taken) == 1:
        return taken[0]
    unseen = any(found & 1 for _, found in taken)
    return sum(number for number, _ in taken), _hash_text(repr(taken)) & ~1 | unseen
