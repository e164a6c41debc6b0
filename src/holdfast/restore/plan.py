"""Which bytes to read for the arrays that are wanted. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from holdfast.format.index import Index
from holdfast.restore.handoffs import Piece, Slice

PIECE_BYTES: Final = 8 << 20
"""One read. Small arrays are read together up to this many bytes, large ones in parts of it."""


def plan_pieces(index: Index, wanted: Collection[str]) -> list[Piece]:
    """**Pure.** Cuts what is wanted into reads, in the order of the file.

    Each slice begins on a span of its array, so that each piece can be checked by itself.

    Args:
        index: What lies in the file.
        wanted: The names of the arrays to read.
    """
    pieces: list[Piece] = []
    run: list[Slice] = []

    def end_run() -> None:
        if run:
            pieces.append(Piece(run[0].begin, run[-1].end, tuple(run)))
            run.clear()

    part_bytes = max(PIECE_BYTES // index.span_bytes, 1) * index.span_bytes
    for number, leaf in enumerate(index.leaves):
        size_bytes = leaf.end - leaf.begin
        if leaf.name not in wanted or size_bytes == 0:
            continue
        if size_bytes > PIECE_BYTES:
            end_run()
            for offset in range(0, size_bytes, part_bytes):
                begin = leaf.begin + offset
                end = min(begin + part_bytes, leaf.end)
                pieces.append(Piece(begin, end, (Slice(number, offset, begin, end),)))
            continue
        if run and (run[-1].end != leaf.begin or leaf.end - run[0].begin > PIECE_BYTES):
            end_run()
        run.append(Slice(number, 0, leaf.begin, leaf.end))
    end_run()
    return pieces
