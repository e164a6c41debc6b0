"""A quick look at very many leaves of an index, which finds out that they are sound but not what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.format.digests import DIGEST_CHARACTERS
from holdfast.format.dtypes import array_bytes

if TYPE_CHECKING:
    from holdfast.format.index import LeafRecord

MAX_DIMENSIONS: Final = 64


def try_end(leaves: Sequence[LeafRecord], begin: int, span_bytes: int) -> int | None:
    """**Pure.** Where leaves end that lie one behind the other; None if anything about them is not as it should be.

    Args:
        leaves: The leaves, in the order of the file.
        begin: Where the first of them has to begin.
        span_bytes: The length of a span, at least 1.
    """
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    for leaf in leaves:
        kind = (leaf.dtype, leaf.shape)
        size_bytes = known.get(kind)
        if size_bytes is None:
            if len(leaf.shape) > MAX_DIMENSIONS:
                return None
            try:
                size_bytes = known[kind] = array_bytes(*kind)
            except ValueError:
                return None
        if leaf.begin != begin:
            return None
        begin += size_bytes
        if leaf.end != begin or len(leaf.spans) != DIGEST_CHARACTERS * -(-size_bytes // span_bytes):
            return None
    if len({leaf.name for leaf in leaves}) != len(leaves):
        return None
    return begin if is_hexadecimal("".join([leaf.spans for leaf in leaves])) else None


def is_hexadecimal(text: str) -> bool:
    """**Pure.** True if there are lower-case hexadecimal digits in the text alone."""
    return not text.strip("0123456789abcdef")
