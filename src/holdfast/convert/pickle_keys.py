"""What may be a key of a dict, or stand in a set, in a pickle from elsewhere. Pure.

Python hashes and compares keys in code that bounds neither how deep it goes nor how often it comes by the same part:
what a few bytes of a pickle describe can take it beyond the end of its stack, or for ever. So a key is looked at
before it is hashed.
"""

from __future__ import annotations

from collections.abc import Collection
from types import NoneType
from typing import Any, Final

MAX_DEPTH: Final = 8
"""How deep tuples and frozen sets may be nested in a key."""

MAX_PARTS: Final = 100
"""How many values a key may be made of; what stands in it twice counts twice."""

MAX_LENGTH: Final = 1 << 16
"""How long a text in a key may be, in characters, or a row of bytes."""

MAX_BITS: Final = 1024
"""How large a number in a key may be."""

MAX_ALIKE: Final = 128
"""How many different keys may have the same hash. Each new one is compared with all of them."""

_PLAIN: Final = frozenset({NoneType, bool, float})
_LISTED: Final = frozenset({tuple, frozenset})
_SMALL_BITS: Final = 63


class Keys:
    """The keys that one pickle has."""

    def __init__(self, also: Collection[type]) -> None:
        """Makes the means to look at them.

        Args:
            also: What else may be a key: types whose objects are hashed and compared at once, whatever they hold.
        """
        self._plain = _PLAIN | frozenset(also)
        # By hash: the different keys that have it, among those whose hashes a writer can choose.
        self._alike: dict[int, list[Any]] = {}

    def check(self, key: Any) -> Any:
        """The key, which can be hashed from now on.

        Raises:
            ValueError: If it is none that a file of this kind may have.
        """
        kind = type(key)
        self._measure(key, MAX_PARTS, 0)
        if kind in _LISTED or (kind is int and key.bit_length() > _SMALL_BITS):
            alike = self._alike.setdefault(hash(key), [])
            if key not in alike:
                alike.append(key)
            if len(alike) > MAX_ALIKE:
                raise ValueError("too many keys have the same hash")
        return key

    def _measure(self, part: Any, left: int, depth: int) -> int:
        """How many values may still come after this one and what is in it."""
        kind = type(part)
        if kind in _LISTED:
            if depth >= MAX_DEPTH:
                raise ValueError(f"a key is nested more than {MAX_DEPTH} deep")
            for inner in part:
                left = self._measure(inner, left, depth + 1)
        elif kind is str or kind is bytes:
            if len(part) > MAX_LENGTH:
                raise ValueError(f"a key has {len(part)} characters or bytes, and at most {MAX_LENGTH} may be")
        elif kind is int:
            if part.bit_length() > MAX_BITS:
                raise ValueError(f"a key is a number of {part.bit_length()} bits, and at most {MAX_BITS} may be")
        elif kind not in self._plain:
            raise ValueError(f"a {kind.__name__} cannot be a key, or stand in a set")
        if left <= 0:
            raise ValueError(f"a key is made of more than {MAX_PARTS} values")
        return left - 1
