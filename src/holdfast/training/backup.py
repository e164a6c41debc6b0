"""The progress of a training at a backup, as it is recorded in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.catalog import StoredRun
from holdfast.errors import DamageError, NotFoundError, SaveFailedError, UsageError
from holdfast.format.records import Manifest
from holdfast.restore.records import Restoration
from holdfast.save.handle import SaveHandle, name_state
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


class Backups:
    """The backups of a training that this process has restored or made.

    Attributes:
        began_from: The one that was restored, for as long as nothing was backed up since.
        are_unseen: True if there are others that were not restored, also if they have lost their manifests: the next
            backup would replace them.
        kept_for: Why what was restored is not to be deleted; empty if it may be.
        generation: The newest generation of the directory that was seen.
        trains: True if the program has asked where training begins.
        total: How many epochs training has in total; None if the program has not said.
        reached: The position within an epoch, if it is not backed up yet; it may be, if the job is asked to leave.
    """

    def __init__(self, generation: int, *, are_unseen: bool = False) -> None:
        self.generation, self.are_unseen = generation, are_unseen
        self.began_from: Backup | None = None
        self.kept_for = ""
        self.trains = False
        self.total: int | None = None
        self.reached: Backup | None = None
        self._saved: Backup | None = None
        self._in_flight: tuple[SaveHandle, Backup] | None = None
        # The newest ones by the numbers under which they are saved.
        self._named: dict[int, Backup] = {}

    @property
    def newest(self) -> Backup | None:
        """The newest one that was restored, or made and committed; None if there is none."""
        is_committed = self._in_flight is not None and self._in_flight[0].committed
        return self._in_flight[1] if self._in_flight is not None and is_committed else self._saved

    def name_next(self, step: int, backup: Backup) -> None:
        """Records the number under which a backup is saved, or was."""
        self._named = {**dict(list(self._named.items())[-_REMEMBERED:]), step: backup}

    def begin_from(self, step: int, backup: Backup) -> None:
        """Records that a backup was restored."""
        self._saved = self.began_from = backup
        self.name_next(step, backup)

    def begin(self, handle: SaveHandle, backup: Backup) -> None:
        """Records that a backup is in progress; the one before has ended by now, and counts if it was committed."""
        self._saved, self._in_flight = self.newest, (handle, backup)
        self.began_from, self.kept_for = None, ""

    def wait_ended(self) -> None:
        """**Blocks** until no backup is in progress."""
        if self._in_flight is not None:
            self._in_flight[0].wait_ended()

    def name(self, step: int) -> str:
        """Returns the description of the backup with that number."""
        backup = self._named.get(step)
        return "the backup" if backup is None else f"the backup of {backup}"

    def explain(self, failure: SaveFailedError) -> None:
        """Adds the epoch of the backup to an error, where the manager knows only its number."""
        failure.message = failure.message.replace(f"step {failure.step} was", f"{self.name(failure.step)} was")
        failure.args = (failure.message,)

    def __str__(self) -> str:
        if self._in_flight is not None:
            return f"newest backup of {self._in_flight[1]}, {name_state(self._in_flight[0])}"
        return "nothing backed up yet" if self._saved is None else f"newest backup of {self._saved}"
