"""Reads pieces of a data file, checks them, and hands them over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from holdfast.errors import DamageError
from holdfast.format.index import Index
from holdfast.restore.destinations import Destinations
from holdfast.restore.plan import PIECE_BYTES, plan_pieces
from holdfast.restore.records import Parts, Piece
from holdfast.state.leaves import Target
from holdfast.storage.crew import Crew
from holdfast.storage.protocol import FileReader
from holdfast.storage.scratch import Scratch

_PAGE_BYTES: Final = 4096


def find_damages(index: Index, path: str, piece: Piece, found: list[str]) -> Iterator[DamageError]:
    """The spans of a piece whose digests are not what they must be."""
    if found == piece.digests:
        return
    for number, begin, end, is_digest, must_be in zip(
        piece.leaves, piece.begins, piece.ends, found, piece.digests, strict=True
    ):
        if is_digest != must_be:
            name = index.leaves[number].name
            yield DamageError(
                f"{path}: bytes {begin} to {end} do not match their digest; they belong to {name!r}",
                step=index.step,
                path=path,
                offset_bytes=begin,
                tensor=name,
            )


def read_pieces(
    reader: FileReader,
    pieces: Iterable[Piece],
    parts_of: Callable[[Piece], Parts],
    receive: Callable[[Piece, Parts, list[str]], None],
    *,
    threads: int,
) -> None:
    """**Blocks.** Reads pieces with several threads, straight to where they belong, and takes their digests.

    Args:
        reader: The open data file.
        pieces: What to read.
        parts_of: Says where each span of a piece belongs. Called from any thread.
        receive: Called with each piece that has been read, what `parts_of` returned, and the digest of each span, from
            the same thread; that memory may then be used for the next.
        threads: How many threads read, the calling one among them.

    Raises:
        DamageError: If the file ends too early.
        StorageError: If the place fails.
    """

    def read(piece: Piece) -> None:
        parts = parts_of(piece)
        receive(piece, parts, reader.read_digested(piece.begin, parts))

    crew = Crew(max(1, min(threads, reader.size_bytes // PIECE_BYTES)), "holdfast-read")
    try:
        crew.start()
        crew.run(partial(read, piece) for piece in pieces)
    finally:
        crew.close()


class ScratchParts:
    """Memory for the spans of pieces that go nowhere, one piece to a thread."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def of(self, piece: Piece) -> Parts:
        """For each span a place; the arrays are aligned in memory as they are in the file."""
        first = piece.begin - piece.begin % _PAGE_BYTES
        memory = self._scratch.take(piece.end - first)
        return [memory[begin - first : end - first] for begin, end in zip(piece.begins, piece.ends, strict=True)]


def read_targets(
    reader: FileReader,
    index: Index,
    path: str,
    targets: Mapping[str, Target],
    *,
    threads: int,
    overlapping: list[Target] | None = None,
) -> int:
    """**Blocks.** Fills each target from the data file; every byte is checked.

    Args:
        reader: The open data file.
        index: What lies in it.
        path: Its path, for errors.
        targets: By leaf, where its bytes are wanted.
        threads: How many threads read.
        overlapping: Gets the targets that may have something of the same memory.

    Returns:
        How many bytes were read.

    Raises:
        DamageError: If a span does not match its digest; targets may have been filled by then, some with bad bytes.
        MemoryError: If there is no memory for arrays that cannot be read in place.
        StorageError: If the place fails.
    """
    destinations = Destinations(index, targets)
    if overlapping is not None:
        overlapping += destinations.overlapping
    size_bytes = 0

    def pieces() -> Iterator[Piece]:
        nonlocal size_bytes
        for piece in plan_pieces(index, None if len(targets) == len(index.leaves) else targets):
            size_bytes += piece.size_bytes
            yield piece

    def receive(piece: Piece, _: Parts, found: list[str]) -> None:
        for damage in find_damages(index, path, piece, found):
            raise damage
        destinations.receive(piece)

    read_pieces(reader, pieces(), destinations.parts_of, receive, threads=threads)
    return size_bytes
