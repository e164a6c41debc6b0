"""The records that pass from one stage of a restore to the next: an open step, its files, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

from holdfast.advice.hyperparameters import HyperparameterChange
from holdfast.errors import DamageError, NotFoundError
from holdfast.format.index import Index
from holdfast.format.names import StepName, data_name, join
from holdfast.format.records import Manifest
from holdfast.state import Differences
from holdfast.storage.protocol import FileReader, Storage


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

    def list_parts(self) -> list[Part]:
        """**Pure.** Returns the files of the indexes: each one's own file, followed by those of earlier steps."""
        parts: list[Part] = []
        for index in self.indexes:
            own = msgspec.structs.replace(index, sources=(), referred=())
            parts.append(Part(self.data_path(index.rank), own, index.data_bytes, None, self.directory))
            for number, leaves in groupby(index.referred, key=lambda leaf: leaf.source):
                source = index.sources[number]
                parts.append(
                    Part(
                        # Sources are beside the step, under the format's names: stored paths are not trusted.
                        path=join(source.name.directory, source.file_name),
                        index=msgspec.structs.replace(own, leaves=tuple(leaves), data_bytes=source.data_bytes),
                        size_bytes=source.data_bytes,
                        referrer=self.name,
                        holder=source.name.directory,
                    )
                )
        return parts


class Part(msgspec.Struct, frozen=True):
    """The part of a step in one file.

    Attributes:
        path: The file.
        index: The step's index, with only the arrays of this file, each with its place there.
        size_bytes: The size that the file must have.
        referrer: The step itself, if the file is another step's; None for its own file.
        holder: The directory of the step whose file it is.
    """

    path: str
    index: Index
    size_bytes: int
    referrer: StepName | None
    holder: str

    def open(self, storage: Storage, beside: Storage | None) -> FileReader:
        """**Blocks.** Opens the file; raises `DamageError` if it is missing, or its size is wrong.

        `beside` is where the steps are that the step refers to.
        """
        place = storage if self.referrer is None else beside
        step = self.index.step
        try:
            if place is None:
                raise NotFoundError(f"{self.path} does not exist", path=self.path)
            reader = place.open_reader(self.path)
        except NotFoundError as error:
            text = f"{self.path} is missing"
            if self.referrer is not None:
                text += f"; the directory {self.holder} must be next to that of step {step}, which refers to it"
            raise DamageError(text, step=step, path=self.path) from error
        except DamageError as damage:
            raise self.explain(damage) from damage
        if reader.size_bytes != self.size_bytes:
            reader.close()
            text = f"{self.path} has {reader.size_bytes} bytes, but {self.size_bytes} were written"
            raise self.explain(DamageError(text, step=step, path=self.path))
        return reader

    def explain(self, damage: DamageError) -> DamageError:
        """Returns the error for damage in the file, with the damaged step if that is not obvious."""
        if self.referrer is None:
            return damage
        return DamageError(
            f"{damage.message}; {self.referrer.directory} refers to it",
            step=self.referrer.step,
            path=self.path,
            offset_bytes=damage.offset_bytes,
            tensor=damage.tensor,
            hint=damage.hint,
        )


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
        tiers: Of a run in tiers, where this worker read it: their URLs, and `memory`.
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
    tiers: tuple[str, ...] = ()

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
