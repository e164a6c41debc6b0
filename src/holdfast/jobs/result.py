"""What came of a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobResult:
    """How far a job has come, and what was lost on the way.

    Attributes:
        last_epoch: The last epoch that is over.
        resumed_from: The epoch that was loaded last, at the beginning as a rule; None if the job began from nothing.
        replacements: How often nodes were lost and replaced.
        last_saved_epoch: The newest epoch that is saved for all nodes, by this run or before it; None if none is.
        saves_committed: How many epochs this run has saved.
        saves_failed: How many it could not save.
        failed_epochs: Which these were.
        upload_error: Why the last saved epoch was not uploaded; None if it was, or was not to be.
    """

    last_epoch: int = 0
    resumed_from: int | None = None
    replacements: int = 0
    last_saved_epoch: int | None = None
    saves_committed: int = 0
    saves_failed: int = 0
    failed_epochs: tuple[int, ...] = ()
    upload_error: Exception | None = None
