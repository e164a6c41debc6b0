"""What a restore asks of the other workers of the job, and of a worker that has none."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.catalog import is_committed
from holdfast.errors import DamageError
from holdfast.format.names import StepName
from holdfast.storage.protocol import Storage


class Agreement:
    """One worker's part in a restore of all. This one has no others, and agrees with itself."""

    def choose(self, step: int | None, find: Callable[[], tuple[StepName, ...]]) -> tuple[StepName, ...]:
        """**Blocks.** The checkpoints to try, the best first; `find` finds them here, for the step that was wanted."""
        return find()

    def see(self, storage: Storage, name: StepName) -> None:
        """**Blocks.** Makes sure that all see the same checkpoint under a name."""

    def is_gone(self, storage: Storage, name: StepName) -> bool:
        """**Blocks.** Whether a checkpoint in which there was damage has been removed, so that it was none."""
        return not is_committed(storage, name)

    def run(self, stage: Callable[[], None]) -> DamageError | None:
        """**Blocks.** Goes through a stage; gives damage found here or elsewhere. All raise any other error."""
        try:
            stage()
        except DamageError as damage:
            return damage
        return None
