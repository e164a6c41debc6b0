"""Which bytes to read for the arrays that are wanted. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final

from holdfast.format.digests import DIGEST_CHARACTERS
from holdfast.format.index import Index
from holdfast.restore.records import Piece

PIECE_BYTES: Final = 8 << 20
"""What one thread reads before it asks for more, if no span is longer: large enough that threads seldom wait for each
other, small enough that they end together."""

_MOST_SPANS: Final = 1 << 12
"""In one piece, so that an index with spans of a few bytes takes no memory to speak of."""


def plan_pieces(index: Index, wanted: Container[str] | None) -> Iterator[Piece]:
    """**Pure.** Cuts what is wanted into reads, in the order of the file.

    Each consists of whole spans, so that each can be checked by itself.

    Args:
        index: What lies in the file.
        wanted: The names of the arrays to read; None for all.
    """
    span_bytes = index.span_bytes
    leaves: list[int] = []
    begins: list[int] = []
    digests: list[str] = []
    piece_end = -1
    room_end = 0
    for number, leaf in enumerate(index.leaves):
        begin, end = leaf.begin, leaf.end
        if wanted is not None and leaf.name not in wanted:
            continue
        place = 0
        while begin < end:
            span_end = min(begin + span_bytes, end)
            if begin != piece_end or span_end > room_end or len(leaves) == _MOST_SPANS:
                if leaves:
                    yield Piece(leaves, begins, digests, piece_end)
                    leaves, begins, digests = [], [], []
                room_end = begin + PIECE_BYTES
            leaves.append(number)
            begins.append(begin)
            digests.append(leaf.spans[place : place + DIGEST_CHARACTERS])
            place += DIGEST_CHARACTERS
            begin = piece_end = span_end
    if leaves:
        yield Piece(leaves, begins, digests, piece_end)
