"""The agreement of a restore between the workers of a job, for a worker without others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.catalog import StoredRun
from holdfast.errors import DamageError
from holdfast.format.names import StepName
from holdfast.storage.protocol import Storage

if TYPE_CHECKING:
    from holdfast.restore.passing import Passing


class Agreement:
    """One worker's part in a restore of all. This one has no others, and agrees with itself."""

    def choose(self, step: int | None, find: Callable[[], tuple[StepName, ...]]) -> tuple[StepName, ...]:
        """**Blocks.** Returns the checkpoints to try, the best first; `find` finds them here."""
        return find()

    def see(self, storage: Storage, name: StepName) -> None:
        """**Blocks.** Checks that all see the same checkpoint under a name."""

    def is_gone(self, storage: Storage, name: StepName) -> bool:
        """**Blocks.** Returns True if a checkpoint with damage has been removed, so that it was not damage."""
        return not StoredRun(storage).step(name).is_committed()

    def any(self, flag: bool) -> bool:
        """**Blocks.** Returns True if it is true of any worker."""
        return flag

    def run(self, stage: Callable[[], None]) -> DamageError | None:
        """**Blocks.** Runs a stage; returns damage that was found here or elsewhere. All raise any other error."""
        try:
            stage()
        except DamageError as damage:
            return damage
        return None

    def open_passing(self, storage: Storage) -> Passing | None:
        """Returns how the workers pass on to each other what several of them need; None if each reads by itself."""
        return None
