"""Digests of batches, taken without waiting for a device."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Number
from typing import Any, Final

import xxhash

from holdfast.state.leaves import Sight
from holdfast.state.registry import backend_of, backend_of_type, parts_of

_MASK: Final = (1 << 64) - 1
_WHOLE_BYTES: Final = 64 << 10
"""An array up to this size is digested whole; of a larger one, some elements of each sample."""
_SAMPLED: Final = 256
"""About how many elements that are, in all samples together, with at least 4 of each."""
_MOST_SAMPLED: Final = 16384
"""The most that are, of an array with very many samples."""

_MOST_LEAVES: Final = 4096
_MOST_VALUES: Final = 64
_MOST_PLANS: Final = 1024
_PLAIN: Final = frozenset({int, float, bool, complex, str, bytes, type(None)})
_INTEGER: Final = struct.Struct("<Q")
_hash: Final = xxhash.xxh3_64_intdigest


_sights: Final[dict[type, Sight]] = {}
_plans: Final[dict[Any, tuple[int, Callable[[Any], bytes] | None]]] = {}
"""For each type and shape of arrays a digest of both, and what takes the bytes to digest from an array's memory, if not
all."""


def digest_batch(batch: Any) -> int:
    """Returns 63 bits that differ for batches that differ, and a lowest bit that is set if not all of it was seen.

    A part is not seen if it is on a device, not computed yet, or beyond the number of parts that are looked at.
    """
    state = unseen = count = 0
    ahead = [batch]
    while ahead:
        value = ahead.pop()
        cls = type(value)
        if (count := count + 1) > _MOST_LEAVES:
            return state | 1
        if (sight := _sights.get(cls)) is not None:
            key, memory = sight.locate(value)
            if (plan := _plans.get(key)) is not None:
                state = _hash(memory if plan[1] is None else plan[1](memory), (state + plan[0]) & _MASK)
            elif (array := sight.peek(value)) is None:
                state, unseen = _hash_text(repr(tuple(value.shape)), state), 1
            elif array.dtype.hasobject:
                ahead.append(array.ravel()[:_MOST_VALUES].tolist())
            else:
                about, some = _take_some(array, key, memory)
                state = _hash(some, (state + about) & _MASK)
        elif cls is dict:
            state = _hash_text("\0".join(map(str, value)), state)
            ahead += value.values()
        elif cls in _PLAIN:
            state = _hash_text(value if cls is str else repr(value), state)
        elif cls is list or cls is tuple:
            state = (state * 31 + len(value) * 2 + (cls is list) + 1) & _MASK
            some = value if len(value) <= _MOST_VALUES else [*value[:: len(value) // _MOST_VALUES], value[-1]]
            if value and type(value[0]) in _PLAIN and _PLAIN.issuperset(map(type, some)):
                state = _hash_text(repr(some), state)
            else:
                ahead += value
        elif (library := backend_of_type(cls)) is not None:
            _sights[cls] = library.sight
            ahead.append(value)
            count -= 1
        else:
            parts = _take_apart(value)
            text = repr(value) if isinstance(value, Number | str | bytes) else cls.__qualname__
            state = _hash_text("\0".join([text, *map(str, parts)]), state)
            ahead += parts.values()
    return state & ~1 | unseen


def _hash_text(text: str, state: int = 0) -> int:
    return _hash(text.encode(errors="surrogatepass"), state)


def _take_some(array: Any, key: Any, memory: Any) -> tuple[int, Any]:
    """Returns a digest of type and shape, and the bytes to digest; the next array of this key is read in place."""
    about, step = _hash_text(repr((array.dtype.num, array.itemsize, array.shape))), 1
    if array.nbytes > _WHOLE_BYTES:
        number = max(4, min(64, _SAMPLED // array.shape[0]))
        # Odd, so that it does not meet the same column again and again.
        step = max(math.prod(array.shape[1:]) // number, array.size // _MOST_SAMPLED, 1) - 1 | 1
    take, begin, count = None, step // 2, len(range(step // 2, array.size, step))
    if key is None or array.dtype.kind not in "iufbc":
        return about, array.tobytes() if step == 1 else array.flat[begin::step].tobytes()
    if step > 1:
        from numpy import dtype, ndarray

        size = array.itemsize
        kind = dtype(f"V{size}")
        take = lambda memory: ndarray((count,), kind, memory, begin * size, (step * size,)).tobytes()  # noqa: E731
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[key] = about, take
    return about, memory if take is None else take(memory)


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
