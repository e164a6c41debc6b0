"""The records that pass from one stage of a restore to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from holdfast.format.index import Index
from holdfast.format.manifest import Manifest
from holdfast.format.names import StepName, data_name, join


class OpenedStep(msgspec.Struct, frozen=True):
    """A committed step whose records have been read and checked; its arrays have not.

    Attributes:
        directory: The path of its directory below the storage's root; empty for the root itself.
        manifest: Its manifest.
        indexes: The indexes of its workers that have been read: all in order of rank, or those that are needed.
    """

    directory: str
    manifest: Manifest
    indexes: tuple[Index, ...]

    @property
    def name(self) -> StepName:
        """Which checkpoint it is."""
        return self.manifest.name

    def data_path(self, rank: int) -> str:
        """The path of a worker's data file."""
        return join(self.directory, data_name(rank, self.manifest.world_size))


class Piece(msgspec.Struct, frozen=True):
    """One read: spans of arrays that lie one behind the other in a data file, without gaps.

    The spans stand in columns, with an entry for each, since there may be very many.

    Attributes:
        leaves: The number of the array in the index.
        begins: Where the span begins in the file.
        digests: The digest that it must have.
        end: Where the last of them ends in the file, exclusive.
    """

    leaves: list[int]
    begins: list[int]
    digests: list[str]
    end: int

    @property
    def begin(self) -> int:
        """Where the first of them begins in the file."""
        return self.begins[0]

    @property
    def size_bytes(self) -> int:
        """How many bytes are read."""
        return self.end - self.begins[0]

    @property
    def ends(self) -> list[int]:
        """Where each span ends in the file, exclusive."""
        return [*self.begins[1:], self.end]


Parts: TypeAlias = Sequence[memoryview]
"""The memory of each span of a piece."""
