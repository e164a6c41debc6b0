"""How far a training had come at a backup, as it is noted in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import UsageError
from holdfast.format.manifest import Manifest
from holdfast.restore.engine import Restoration

_NOTE: Final = "backup"


@dataclass(frozen=True, slots=True)
class Backup:
    """How far training had come when it was backed up.

    Attributes:
        epoch: The epoch, counted from 0.
        batch: The last batch of it that was complete, counted from 0; None if the whole epoch was.
        restoration: What was restored, or None for a backup that this process has made.
    """

    epoch: int
    batch: int | None = None
    restoration: Restoration | None = None

    @property
    def next_epoch(self) -> int:
        """The epoch in which training goes on."""
        return self.epoch + (self.batch is None)

    def __str__(self) -> str:
        return f"epoch {self.epoch}" + ("" if self.batch is None else f", batch {self.batch}")


def make_note(backup: Backup) -> Mapping[str, Any]:
    """**Pure.** What to keep with the checkpoint."""
    return {_NOTE: {"epoch": backup.epoch, "batch": backup.batch}}


def read_note(manifest: Manifest, url: str) -> tuple[int, int | None]:
    """**Pure.** The epoch and the batch of a checkpoint.

    Raises:
        UsageError: If it is no backup.
    """
    note = manifest.metadata.get(_NOTE)
    epoch = note.get("epoch") if isinstance(note, dict) else None
    batch = note.get("batch") if isinstance(note, dict) else None
    if type(epoch) is not int or epoch < 0 or (batch is not None and (type(batch) is not int or batch < 0)):
        raise UsageError(
            f"step {manifest.step} of {url} is a checkpoint, but no backup of a training",
            hint="Give backups a directory of their own.",
        )
    return epoch, batch
