"""Digests of bytes, and the spans that they are taken over. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

SPAN_BYTES: Final = 1 << 20
"""An array's bytes are cut into spans of this many, from its first byte on; the last may be shorter.

Small enough that a partial read checks little more than it wants, large enough that the digests weigh nothing.
"""

DIGEST_CHARACTERS: Final = 32


def digest(data: bytes | bytearray | memoryview) -> str:
    """**Pure.** The 128-bit XXH3 digest of some bytes, as 32 lower-case hexadecimal characters.

    It finds damage; it is no proof against somebody who forges a checkpoint on purpose.
    """
    return xxhash.xxh3_128_hexdigest(data)


def digest_each(parts: Iterable[memoryview]) -> list[str]:
    """**Pure.** The digest of each of many pieces of memory."""
    return list(map(xxhash.xxh3_128_hexdigest, parts))


def is_digest(text: str) -> bool:
    """**Pure.** True if the text has the form of a digest."""
    return len(text) == DIGEST_CHARACTERS and all(character in "0123456789abcdef" for character in text)


def span_count(size_bytes: int, span_bytes: int) -> int:
    """**Pure.** How many spans an array of this size has; none if it is empty."""
    return -(-size_bytes // span_bytes)


_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
MIX_FIRST: Final = 0xBF58476D1CE4E5B9
MIX_SECOND: Final = 0x94D049BB133111EB
"""The factors of `mix`."""


def mix(word: int) -> int:
    """**Pure.** A bijection of the 64-bit numbers that leaves no pattern."""
    word = ((word ^ (word >> 30)) * MIX_FIRST) & _MASK
    word = ((word ^ (word >> 27)) * MIX_SECOND) & _MASK
    return word ^ (word >> 31)


def derive(*words: int) -> int:
    """**Pure.** One 64-bit number from several, all of whose bits depend on all of theirs."""
    derived = 0
    for word in words:
        derived = mix((derived + word + _STEP) & _MASK)
    return derived
