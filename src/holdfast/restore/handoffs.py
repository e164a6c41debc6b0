"""The records that pass from one stage of a restore to the next."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.format.index import Index
from holdfast.format.manifest import Manifest
from holdfast.format.names import StepName, data_name, join


@dataclass(frozen=True, slots=True)
class OpenedStep:
    """A committed step whose records have been read and checked; its arrays have not.

    Attributes:
        directory: The path of its directory below the storage's root; empty for the root itself.
        manifest: Its manifest.
        indexes: The index of each worker, in order of rank.
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
        return join(self.directory, data_name(rank, len(self.indexes)))


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one array, or all of it, within a piece.

    Attributes:
        leaf: The number of the array in the index.
        offset: Where the part begins in the array, in bytes; a multiple of the span.
        begin: Where it begins in the file.
        end: Where it ends in the file, exclusive.
    """

    leaf: int
    offset: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One read: adjacent slices of a data file.

    Attributes:
        begin: Where it begins in the file.
        end: Where it ends, exclusive.
        slices: What lies in it, in order, without gaps.
    """

    begin: int
    end: int
    slices: tuple[Slice, ...]
