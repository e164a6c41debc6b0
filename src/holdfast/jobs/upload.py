"""Uploads the last saved epoch of a job."""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from typing import TYPE_CHECKING

from holdfast.catalog import StoredRun
from holdfast.errors import StorageError, UsageError
from holdfast.format.index import MAX_INDEX_BYTES
from holdfast.format.names import MANIFEST_NAME, StepName, index_name
from holdfast.format.records import MAX_MANIFEST_BYTES
from holdfast.jobs.job import TaskGroup
from holdfast.jobs.workspace import Workspace
from holdfast.restore.records import OpenedStep
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import Storage, open_storage
from holdfast.storage.checks import choose_piece_bytes

if TYPE_CHECKING:
    from holdfast.jobs.checkpoints import MultiNodeCheckpointManager


class UploadTaskGroupBuilder:
    """Makes the tasks that upload an epoch. Derive from it, or use `UploadTo`."""

    def build(self, epoch: int, checkpoint_manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Returns the tasks; called once, after the last epoch.

        Args:
            epoch: The last epoch that is saved for all nodes.
            checkpoint_manager: The manager that saved it, which knows its directory.
        """
        # A subclass has to define it.
        raise NotImplementedError("an UploadTaskGroupBuilder must override build()")


class UploadTo(UploadTaskGroupBuilder):
    """Copies the last saved epoch to another directory or URL, and reads the copy to check that it is whole.

    The copy is a checkpoint like any other: a manager with that directory restores it.
    """

    def __init__(self, destination: str | os.PathLike[str] | Storage, *, node: str | None = None) -> None:
        """Stores the settings; copies nothing yet.

        Args:
            destination: The directory or URL to copy to.
            node: The node that copies; None for the first saved one.

        Raises:
            UsageError: If the destination has tiers.
        """
        self._destination = open_storage(destination)
        if self._destination.traits.has_tiers:
            raise UsageError("an epoch job has no tiers", hint="Pass one directory, or the URL of a bucket.")
        self._node = node

    def build(self, epoch: int, checkpoint_manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Returns one task, which copies."""
        group = TaskGroup("upload")
        source, destination = checkpoint_manager.storage, self._destination

        def upload(workspace: Workspace) -> str:
            name = StoredRun(source).look().find(epoch)
            copy_step(source, destination, name)
            return f"{destination.url}/{name.directory}"

        group.add(upload, on=self._node or checkpoint_manager.nodes[0])
        return group


def copy_step(source: Storage, destination: Storage, name: StepName) -> None:
    """**Blocks.** Copies a checkpoint, and those that it refers to, and checks every byte of the copy.

    The manifest is copied last, after the check: a crash before that leaves a directory that no reader takes for a
    checkpoint, and that the next copy removes. An existing copy is only checked.

    Raises:
        DamageError: If the checkpoint is damaged, here or there.
        StorageError: If the storage fails, or contains another checkpoint of that name.
    """
    opened = open_step(source, name.directory, name)
    for reference in opened.manifest.references:
        copy_step(source, destination, reference.name)
    manifest = source.read(name.manifest_path, MAX_MANIFEST_BYTES)
    there = {entry.name for entry in destination.list(name.directory)}
    if MANIFEST_NAME not in there:
        if there:
            StoredRun(destination).step(name).discard()
        for rank, index in enumerate(opened.indexes):
            _copy_data(source, destination, opened.data_path(rank), index.data_bytes)
            path = f"{name.directory}/{index_name(rank, len(opened.indexes))}"
            destination.write(path, source.read(path, MAX_INDEX_BYTES))
        destination.sync_directory(name.directory)
        _check(destination, opened)
        destination.publish(name.manifest_path, manifest)
        destination.write(name.committed_path, manifest)
    if destination.read(name.manifest_path, MAX_MANIFEST_BYTES) != manifest:
        raise StorageError(
            f"{destination.url} already contains a different checkpoint named {name.directory}",
            path=name.manifest_path,
            hint="It is not a copy of this one. Upload to a directory of its own.",
        )
    _check(destination, open_step(destination, name.directory, name))


def _check(storage: Storage, opened: OpenedStep) -> None:
    for damage in verify_data(storage, opened):
        raise damage


def _copy_data(source: Storage, destination: Storage, path: str, size_bytes: int) -> None:
    writer = destination.create(path, size_bytes)
    piece_bytes = choose_piece_bytes(destination.traits, size_bytes)
    try:
        with closing(source.open_reader(path)) as reader:
            # Of whole pages, as files are read and written fastest; the end of the last one is padding.
            piece = mmap.mmap(-1, piece_bytes)
            for begin in range(0, size_bytes, piece_bytes):
                part_bytes = min(piece_bytes, size_bytes - begin)
                reader.read_into(begin, memoryview(piece)[:part_bytes])
                writer.write_at(begin, memoryview(piece)[:part_bytes])
        writer.finish()
    finally:
        writer.abandon()
