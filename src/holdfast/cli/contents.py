"""What one checkpoint holds, read from its records alone; no array is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.catalog import exists, is_committed, read_catalog
from holdfast.cli.survey import State, checkpoint_bytes, manifest_fields, name_fields
from holdfast.cli.target import MOST_LOOKS, RunTarget, choose_step
from holdfast.cli.values import count_values, find_nodes
from holdfast.errors import DamageError, NoCheckpointError, NotFoundError, NoWholeCheckpointError
from holdfast.format.dtypes import array_bytes
from holdfast.format.index import LeafRecord, StoredBox
from holdfast.format.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME, StepName, data_name, index_name, join
from holdfast.format.scalars import Node
from holdfast.restore.records import OpenedStep
from holdfast.restore.verify import open_step


@dataclass(frozen=True, slots=True)
class Heading:
    """Which checkpoint it is.

    Attributes:
        location: The run, or the directory of the step, as it was written on the command line.
        url: The same in full.
        directory: The name of the step's directory in the run; empty where the step's directory itself was named.
        expected: What the directory's name promises; None where it may have any name.
        state: Where it stands in its run; None outside of one.
        is_newest: Whether it is the newest of the living line.
        manifest: Its manifest.
    """

    location: str
    url: str
    directory: str
    expected: StepName | None
    state: State | None
    is_newest: bool
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        """What its data files and indexes take."""
        return checkpoint_bytes(self.manifest)


@dataclass(frozen=True, slots=True)
class Array:
    """One array: a leaf, or a box of one.

    Attributes:
        stored: What it is and where it lies.
        file: The data file.
        source: The directory of the step in which the file lies, if that is another one; else empty.
    """

    stored: StoredBox
    file: str
    source: str = ""

    @property
    def record(self) -> LeafRecord:
        """Its record."""
        return self.stored.record

    @property
    def is_box(self) -> bool:
        """Whether it is only a part of its leaf."""
        return not self.stored.box.is_whole(self.stored.global_shape)

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self.record.end - self.record.begin


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf, whoever has its boxes.

    Attributes:
        name: Its name.
        dtype: Its element type.
        shape: Its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """What it takes, once."""
        return array_bytes(self.dtype, self.shape)


def _read_heading(target: RunTarget) -> Heading | None:
    """**Blocks.** Finds the checkpoint that is meant and reads its manifest; None if it has been removed meanwhile.

    Raises:
        NoCheckpointError: If there is none.
        NoWholeCheckpointError: If it was committed, and its manifest is gone.
        DamageError: If the manifest is damaged.
        StorageError: If the place fails.
    """
    name, state, is_newest = None, None, False
    if not target.is_step:
        catalog = read_catalog(target.storage)
        name = choose_step(catalog, target)
        state = State.LIVING if name in catalog.living else State.OFF_LINE
        is_newest = name == catalog.newest
    directory = name.directory if name else ""
    path = join(directory, MANIFEST_NAME)
    try:
        data = target.storage.read(path, MAX_MANIFEST_BYTES)
    except NotFoundError:
        if name is not None:
            return None
        if exists(target.storage, COMMITTED_NAME):
            raise NoWholeCheckpointError(
                f"{target.location} was committed, and its manifest is gone; the data files are still there",
                damages=(DamageError("the manifest is gone", path=MANIFEST_NAME),),
                hint=f"Bring it back: `{COMMITTED_NAME}` in that directory is a copy of `{MANIFEST_NAME}`, "
                "unless it is empty.",
            ) from None
        raise NoCheckpointError(
            f"{target.location} is not a checkpoint: it has no {MANIFEST_NAME}",
            hint="Its save or its removal was cut off or is going on, or the manifest is lost: "
            "`holdfast list --all` of the run says which.",
        ) from None
    manifest = decode_manifest(data, path=path, expected=name)
    return Heading(target.location, target.storage.url, directory, name, state, is_newest, manifest)


@dataclass(frozen=True, slots=True)
class Contents:
    """The records of one checkpoint.

    Attributes:
        heading: Which one.
        opened: Its manifest and indexes.
    """

    heading: Heading
    opened: OpenedStep

    @property
    def objects(self) -> dict[str, Node]:
        """For each named object its state, with references in place of arrays."""
        objects: dict[str, Node] = {}
        for index in self.opened.indexes:
            for name, node in index.objects.items():
                objects.setdefault(name, node)
        return objects

    def arrays(self, select: Callable[[str], bool] | None = None) -> list[Array]:
        """The arrays that are asked for, in the order of the files; all of them by default."""
        arrays: list[Array] = []
        for index in self.opened.indexes:
            own = data_name(index.rank, index.world_size)
            sources = [(source.file_name, source.name.directory) for source in index.sources]
            places = [(own, "")] * len(index.leaves) + [sources[record.source] for record in index.referred]
            arrays += (Array(stored, *place) for stored, place in zip(index.stored_boxes(), places, strict=True))
        return [array for array in arrays if select is None or select(array.stored.leaf)]

    def leaves(self) -> list[Leaf]:
        """The leaves, in the order of the files in which each is first met."""
        leaves: dict[str, Leaf] = {}
        for array in self.arrays():
            stored = array.stored
            leaves.setdefault(stored.leaf, Leaf(stored.leaf, stored.dtype, stored.global_shape))
        return list(leaves.values())

    def values(self, select: Callable[[str], bool] | None = None) -> dict[str, Node]:
        """The nodes that are asked for, by their path; all objects by default."""
        return dict(find_nodes(self.objects, select))

    def sizes(self) -> dict[str, dict[str, int]]:
        """For each object the size of each of its leaves."""
        sizes: dict[str, dict[str, int]] = {name: {} for name in self.objects}
        for leaf in self.leaves():
            sizes.setdefault(leaf.name.partition("/")[0], {})[leaf.name] = leaf.size_bytes
        return sizes

    def document(self, select: Callable[[str], bool] | None) -> dict[str, Any]:
        """The JSON document of the checkpoint, with the leaves and values that are asked for."""
        heading = self.heading
        manifest = heading.manifest
        objects = self.objects
        return {
            "place": heading.url,
            "directory": heading.directory or None,
            "state": heading.state.value if heading.state else None,
            "is_newest": heading.is_newest if heading.state else None,
            **name_fields(manifest.name),
            "size_bytes": heading.size_bytes,
            **manifest_fields(manifest),
            "files": [
                {
                    "rank": rank,
                    "data": data_name(rank, manifest.world_size),
                    "data_bytes": worker.data_bytes,
                    "index": index_name(rank, manifest.world_size),
                    "index_bytes": worker.index_bytes,
                }
                for rank, worker in enumerate(manifest.workers)
            ],
            "objects": [
                {
                    "name": name,
                    "leaves": len(leaves),
                    "size_bytes": sum(leaves.values()),
                    "values": count_values(objects[name]) if name in objects else 0,
                }
                for name, leaves in self.sizes().items()
            ],
            "leaves": [
                {
                    "name": array.stored.leaf,
                    "dtype": array.record.dtype,
                    "shape": list(array.record.shape),
                    "global_shape": list(array.stored.global_shape),
                    "offsets": list(array.stored.box.offsets),
                    "size_bytes": array.size_bytes,
                    "rank": array.stored.rank,
                    "file": array.file,
                    "source": array.source or None,
                    "offset_bytes": array.record.begin,
                }
                for array in self.arrays(select)
            ],
            "values": self.values(select),
        }


def read_checkpoint(target: RunTarget) -> tuple[Heading, Contents | DamageError]:
    """**Blocks.** Finds the checkpoint that is meant and reads its manifest and its indexes.

    Where a job goes on, it may be removed meanwhile: then what is meant is looked for again.

    Returns:
        Which one it is, and its records, or what is wrong with its indexes.

    Raises:
        NoCheckpointError: If there is none.
        NoWholeCheckpointError: If it was committed, and its manifest is gone.
        DamageError: If the manifest is damaged.
        StorageError: If the place fails.
    """
    for _ in range(MOST_LOOKS):
        heading = _read_heading(target)
        if heading is None:
            continue
        try:
            return heading, Contents(heading, open_step(target.storage, heading.directory, heading.expected))
        except DamageError as damage:
            if heading.expected is None or is_committed(target.storage, heading.expected):
                return heading, damage
    raise NoCheckpointError(
        f"{target.location}: each checkpoint was removed before it could be read",
        hint="A job that goes on removes them as fast; try again, or let it keep more.",
    )
