"""The progress of a training at a backup, as it is recorded in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.catalog import StoredRun
from holdfast.errors import DamageError, NotFoundError, SaveFailedError, UsageError
from holdfast.format.records import Manifest
from holdfast.restore.records import Restoration
from holdfast.storage import Storage

_NOTE: Final = "backup"
_REMEMBERED: Final = 8


@dataclass(frozen=True, slots=True)
class Backup:
    """The progress of a training when it was backed up.

    Attributes:
        epoch: The epoch, counted from 0.
        batch: The last complete batch of it, counted from 0; None if the whole epoch was complete.
        restoration: The restore, or None for a backup that this process has made.
    """

    epoch: int
    batch: int | None = None
    restoration: Restoration | None = None

    @property
    def next_epoch(self) -> int:
        """The epoch in which training continues."""
        return self.epoch + (self.batch is None)

    def __str__(self) -> str:
        return f"epoch {self.epoch}" + ("" if self.batch is None else f", batch {self.batch}")


def make_note(backup: Backup) -> Mapping[str, Any]:
    """**Pure.** Returns the record to store with the checkpoint."""
    return {_NOTE: {"epoch": backup.epoch, "batch": backup.batch}}


def read_note(manifest: Manifest, url: str) -> tuple[int, int | None]:
    """**Pure.** Returns the epoch and the batch of a checkpoint; raises `UsageError` if it is not a backup."""
    note = manifest.metadata.get(_NOTE)
    epoch = note.get("epoch") if isinstance(note, dict) else None
    batch = note.get("batch") if isinstance(note, dict) else None
    if type(epoch) is not int or epoch < 0 or (batch is not None and (type(batch) is not int or batch < 0)):
        raise UsageError(
            f"step {manifest.step} of {url} is a checkpoint, but not a backup of WorkerTrainingState",
            hint="Use a separate directory for backups.",
        )
    return epoch, batch


def check_newest(storage: Storage) -> None:
    """**Blocks.** Raises `UsageError` if the newest checkpoint is not a backup, before anything is restored from it."""
    newest = StoredRun(storage).look().newest
    if newest is not None:
        try:
            manifest = StoredRun(storage).step(newest).manifest()
        except (DamageError, NotFoundError):
            return  # Restoring passes it over, or fails with more to say.
        read_note(manifest, storage.url)


class RecentBackups:
    """The epochs and batches of the newest backups, by the numbers under which they are saved."""

    def __init__(self) -> None:
        self._backups: dict[int, Backup] = {}

    def note(self, step: int, backup: Backup) -> None:
        """Records that another backup begins, or was restored."""
        self._backups = {**dict(list(self._backups.items())[-_REMEMBERED:]), step: backup}

    def name(self, step: int) -> str:
        """Returns the description of the backup with that number."""
        backup = self._backups.get(step)
        return "the backup" if backup is None else f"the backup of {backup}"

    def explain(self, failure: SaveFailedError) -> None:
        """Adds the epoch of the backup to an error, where the manager knows only its number."""
        failure.message = failure.message.replace(f"step {failure.step} was", f"{self.name(failure.step)} was")
        failure.args = (failure.message,)

    def clear(self) -> None:
        """Forgets them all."""
        self._backups.clear()
