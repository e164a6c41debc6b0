"""Who keeps a record of a job's checkpoints, and says with which epoch the job goes on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from holdfast.catalog import read_catalog
from holdfast.errors import DamageError, NoCheckpointError, StorageError, UsageError
from holdfast.jobs.node_store import NodeDurations
from holdfast.restore.verify import open_step
from holdfast.storage import Storage, open_storage


@runtime_checkable
class MetadataHandler(Protocol):
    """Keeps a record of checkpoints outside of them: in a database, say, for all jobs of a team.

    It is called by one process of a job, from the thread that drives it.
    """

    def set_params(self, directory: str, node_names: Sequence[str]) -> None:
        """Told at the beginning of a run where the checkpoints lie, and of which nodes they are."""
        ...

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The epoch with which the job goes on.

        Args:
            user_epoch: What the user asked for, or None.

        Returns:
            That epoch, or another one. None to begin from nothing: epochs that are there are left behind, with a
            warning. If the user asked for one, None is an error.
        """
        ...

    def write(self, epoch: int) -> None:
        """Told of each epoch that is saved, as soon as it is committed for all nodes."""
        ...

    def report(self, action: str, stats: NodeDurations) -> None:
        """Told how long each node took.

        Args:
            action: `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.
            stats: The times.
        """
        ...

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether checkpoints can be written and read now, or the one of an epoch can be read."""
        ...


class ManifestMetadataHandler:
    """The record that the checkpoints are themselves: their manifests. It is what a manager uses if it is given none.

    Attributes:
        reports: For each action, the times of each that was reported, in order.
    """

    def __init__(self, directory: str | os.PathLike[str] | Storage | None = None) -> None:
        """Reads nothing yet.

        Args:
            directory: Where the checkpoints lie; None to learn it from `set_params`.
        """
        self.reports: dict[str, list[NodeDurations]] = {}
        self._storage = open_storage(directory) if directory is not None else None

    def set_params(self, directory: str, node_names: Sequence[str]) -> None:
        """Notes where the checkpoints lie, unless that is known already."""
        if self._storage is None:
            self._storage = open_storage(directory)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """**Blocks.** The epoch that the user asked for; else the newest that is committed."""
        if user_epoch is not None:
            return user_epoch
        newest = read_catalog(self._place()).newest
        return newest.step if newest is not None else None

    def write(self, epoch: int) -> None:
        """**Blocks.** Makes sure that the epoch is committed: its manifest is the record.

        Raises:
            NoCheckpointError: If it is not.
        """
        read_catalog(self._place()).find(epoch)

    def report(self, action: str, stats: NodeDurations) -> None:
        """Notes the times."""
        self.reports.setdefault(action, []).append(stats)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """**Blocks.** Whether the place can be looked at, and the records of an epoch are whole."""
        try:
            catalog = read_catalog(self._place())
            if epoch is not None:
                name = catalog.find(epoch)
                open_step(self._place(), name.directory, name)
        except (NoCheckpointError, DamageError, StorageError):
            return False
        return True

    def _place(self) -> Storage:
        if self._storage is None:
            raise UsageError("the handler does not know where the checkpoints lie", hint="Call set_params first.")
        return self._storage
