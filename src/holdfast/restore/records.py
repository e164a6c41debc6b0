"""The records that pass from one stage of a restore to the next, and `Restoration`, which describes the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from holdfast.advice.hyperparameters import HyperparameterChange
from holdfast.errors import DamageError
from holdfast.format.index import Index
from holdfast.format.names import StepName, data_name, join
from holdfast.format.records import Manifest
from holdfast.state import Differences


class OpenedStep(msgspec.Struct, frozen=True):
    """A committed step whose records have been read and checked, but not its arrays.

    Attributes:
        directory: The path of its directory below the storage's root; empty for the root itself.
        manifest: Its manifest.
        indexes: The indexes of its workers that have been read: all in order of rank, or only those that are needed.
    """

    directory: str
    manifest: Manifest
    indexes: tuple[Index, ...]

    @property
    def name(self) -> StepName:
        """The name of the checkpoint."""
        return self.manifest.name

    def data_path(self, rank: int) -> str:
        """Returns the path of a worker's data file."""
        return join(self.directory, data_name(rank, self.manifest.world_size))


class Piece(msgspec.Struct, frozen=True):
    """One read: spans of arrays that follow each other in a data file without gaps.

    The spans are stored in columns, because there may be very many.

    Attributes:
        leaves: The number of the array in the index.
        begins: Where the span begins in the file.
        digests: The digest that it must have.
        end: Where the last span ends in the file, exclusive.
    """

    leaves: list[int]
    begins: list[int]
    digests: list[str]
    end: int

    @property
    def begin(self) -> int:
        """Where the first span begins in the file."""
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


@dataclass(frozen=True, slots=True, repr=False)
class Restoration:
    """The result of a restore.

    Attributes:
        step: The step that the live objects now have.
        name: The name of the checkpoint.
        seen_generation: The run's newest generation when the search began: a later one is another job's.
        manifest: Its manifest, with the metrics and metadata of the save.
        differences: What did not fit and was left unchanged; empty unless `strict=False`.
        replaced: New values of named objects that could not be changed in place, such as numbers.
        passed_over: Newer checkpoints that were skipped because they are damaged.
        hyperparameters: Values that differ between the script and the checkpoint and were restored anyway; by path
            (`optimizer.lr`).
        path: The directory of the checkpoint, or its equivalent in another storage.
        size_bytes: The size of what was read and checked.
        seconds: How long it took.
    """

    step: int
    name: StepName
    seen_generation: int
    manifest: Manifest
    differences: Differences
    replaced: Mapping[str, Any] = field(default_factory=dict)
    passed_over: tuple[DamageError, ...] = ()
    hyperparameters: Mapping[str, HyperparameterChange] = field(default_factory=dict)
    path: str = ""
    size_bytes: int = 0
    seconds: float = 0.0

    @property
    def workers(self) -> int:
        """How many workers saved it."""
        return self.manifest.world_size

    def __repr__(self) -> str:
        return f"<Restoration of {self.path}: {self}>"

    def __str__(self) -> str:
        notes = [f"{len(self.passed_over)} newer damaged"] if self.passed_over else []
        notes += ["with differences"] if self.differences else []
        return f"step {self.step} of generation {self.name.generation}" + (f" ({', '.join(notes)})" if notes else "")
