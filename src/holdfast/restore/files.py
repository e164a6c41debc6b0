"""The files that contain a step's arrays: its own, and those of earlier steps that it refers to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import groupby
from typing import TypeAlias

import msgspec

from holdfast.errors import DamageError, NotFoundError
from holdfast.format.index import Index
from holdfast.format.names import StepName, join
from holdfast.restore.read import read_targets
from holdfast.restore.records import OpenedStep
from holdfast.state.leaves import Target
from holdfast.storage.protocol import FileReader, Storage


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


OpenPart: TypeAlias = tuple[Part, FileReader]


def list_parts(opened: OpenedStep) -> list[Part]:
    """**Pure.** Returns the files of a step: its own in order of rank, each followed by those of earlier steps."""
    parts: list[Part] = []
    for index in opened.indexes:
        own = msgspec.structs.replace(index, sources=(), referred=())
        parts.append(Part(opened.data_path(index.rank), own, index.data_bytes, None, opened.directory))
        for number, leaves in groupby(index.referred, key=lambda leaf: leaf.source):
            source = index.sources[number]
            parts.append(
                Part(
                    # Sources are beside the step, under the format's names: stored paths are not trusted.
                    path=join(source.name.directory, source.file_name),
                    index=msgspec.structs.replace(own, leaves=tuple(leaves), data_bytes=source.data_bytes),
                    size_bytes=source.data_bytes,
                    referrer=opened.name,
                    holder=source.name.directory,
                )
            )
    return parts


def open_part(storage: Storage, part: Part, beside: Storage | None) -> FileReader:
    """**Blocks.** Opens a file of a step; raises `DamageError` if it is missing, or its size is wrong.

    `beside` is where the steps are that the step refers to.
    """
    place = storage if part.referrer is None else beside
    step = part.index.step
    try:
        if place is None:
            raise NotFoundError(f"{part.path} does not exist", path=part.path)
        reader = place.open_reader(part.path)
    except NotFoundError as error:
        text = f"{part.path} is missing"
        if part.referrer is not None:
            text += f"; the directory {part.holder} must be next to that of step {step}, which refers to it"
        raise DamageError(text, step=step, path=part.path) from error
    except DamageError as damage:
        raise part.explain(damage) from damage
    if reader.size_bytes != part.size_bytes:
        reader.close()
        text = f"{part.path} has {reader.size_bytes} bytes, but {part.size_bytes} were written"
        raise part.explain(DamageError(text, step=step, path=part.path))
    return reader


@contextmanager
def open_parts(storage: Storage, opened: OpenedStep) -> Iterator[list[OpenPart]]:
    """**Blocks.** Opens all files of a step for the block, each of its expected size; raises as `open_part` does."""
    with ExitStack() as stack:
        yield [(part, stack.enter_context(closing(open_part(storage, part, storage)))) for part in list_parts(opened)]


def read_parts(
    parts: Sequence[OpenPart],
    targets: Mapping[str, Target],
    *,
    threads: int,
    overlapping: list[Target] | None = None,
) -> int:
    """**Blocks.** Fills each target from the file with its bytes; like `read_targets`."""
    size_bytes = 0
    for part, reader in parts:
        wanted = targets
        if len(parts) > 1:
            wanted = {leaf.name: targets[leaf.name] for leaf in part.index.leaves if leaf.name in targets}
        try:
            size_bytes += read_targets(reader, part.index, part.path, wanted, threads=threads, overlapping=overlapping)
        except DamageError as damage:
            raise part.explain(damage) from damage
    return size_bytes
