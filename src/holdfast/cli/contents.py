"""Contents of one checkpoint, read from its records alone; no array is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from holdfast.catalog import add_late_metrics, exists, is_committed, read_catalog
from holdfast.catalog.survey import State, checkpoint_bytes
from holdfast.cli.target import MOST_LOOKS, RunTarget, choose_step
from holdfast.errors import DamageError, NoCheckpointError, NotFoundError, NoWholeCheckpointError
from holdfast.format.dtypes import array_bytes
from holdfast.format.index import StoredBox
from holdfast.format.names import COMMITTED_NAME, MANIFEST_NAME, StepName, data_name, join
from holdfast.format.nodes import find_nodes
from holdfast.format.records import MAX_MANIFEST_BYTES, Manifest, decode_manifest
from holdfast.format.scalars import Node
from holdfast.restore.records import OpenedStep
from holdfast.restore.verify import open_step


@dataclass(frozen=True, slots=True)
class Heading:
    """Identity of one checkpoint, and its manifest.

    Attributes:
        location: The run, or the directory of the step, as it was written on the command line.
        url: The full path of `location`.
        directory: The name of the step's directory in the run; empty where the step's directory itself was named.
        expected: The step that the directory's name gives; None if the directory may have any name.
        state: Its state in its run; None if it was named by its own directory.
        is_newest: Whether it is the newest of the current lineage.
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
        """Size of its data files and indexes."""
        return checkpoint_bytes(self.manifest)


class Array(NamedTuple):
    """One array, a leaf or a box of one, with the name of its data file.

    `source` is the directory of the step with that file, if it is another step.
    """

    stored: StoredBox
    file: str
    source: str


def _read_heading(target: RunTarget) -> Heading | None:
    """**Blocks.** Finds the checkpoint that is meant and reads its manifest; None if it has been removed meanwhile.

    Raises as `read_checkpoint`.
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
            hint="It is being saved or removed, or that was interrupted, or its manifest is lost: "
            "`holdfast list --all` on the run says which.",
        ) from None
    manifest = add_late_metrics(target.storage, directory, decode_manifest(data, path=path, expected=name))
    return Heading(target.location, target.storage.url, directory, name, state, is_newest, manifest)


@dataclass(frozen=True, slots=True)
class Contents:
    """The records of one checkpoint."""

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
        """The selected arrays, in the order of the files; all of them by default."""
        arrays: list[Array] = []
        for index in self.opened.indexes:
            own = data_name(index.rank, index.world_size)
            sources = [(source.file_name, source.name.directory) for source in index.sources]
            places = [(own, "")] * len(index.leaves) + [sources[record.source] for record in index.referred]
            arrays += (Array(stored, *place) for stored, place in zip(index.stored_boxes(), places, strict=True))
        return [array for array in arrays if select is None or select(array.stored.leaf)]

    def leaves(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Returns the type, shape and size of each leaf, in the order in which the files list them."""
        leaves: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for stored, _, _ in self.arrays():
            dtype, shape = stored.dtype, stored.global_shape
            leaves.setdefault(stored.leaf, (dtype, shape, array_bytes(dtype, shape)))
        return leaves

    def values(self, select: Callable[[str], bool] | None = None) -> dict[str, Node]:
        """The selected nodes, by their path; all objects by default."""
        return dict(find_nodes(self.objects, select))

    def sizes(self) -> dict[str, dict[str, int]]:
        """For each object the size of each of its leaves."""
        sizes: dict[str, dict[str, int]] = {name: {} for name in self.objects}
        for leaf, (_, _, size_bytes) in self.leaves().items():
            sizes.setdefault(leaf.partition("/")[0], {})[leaf] = size_bytes
        return sizes


def read_checkpoint(target: RunTarget) -> tuple[Heading, Contents | DamageError]:
    """**Blocks.** Finds the checkpoint that a target names, and reads its manifest and its indexes.

    If a running job removes the checkpoint meanwhile, it is looked for again. Returns its heading, and its contents or
    the damage of its indexes. Raises `NoCheckpointError` if there is none, and `DamageError` or
    `NoWholeCheckpointError` if its manifest is damaged or lost.
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
        f"{target.location}: every checkpoint was removed before it could be read",
        hint="A running job removes them quickly. Try again, or let it keep more.",
    )
