"""What a restore asks of the other workers of the job, and of a worker that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from holdfast.catalog import is_committed
from holdfast.errors import DamageError
from holdfast.format.names import StepName
from holdfast.storage.protocol import Storage

if TYPE_CHECKING:
    from holdfast.cluster.peers import Peers


class Agreement(Protocol):
    """One worker's part in a restore of all."""

    def choose(self, step: int | None, find: Callable[[], tuple[StepName, ...]]) -> tuple[StepName, ...]:
        """**Blocks.** The checkpoints to try, the best first.

        Args:
            step: What was asked for.
            find: Finds them here.
        """
        ...

    def see(self, storage: Storage, name: StepName) -> None:
        """**Blocks.** Makes sure that all see the same checkpoint under a name."""
        ...

    def is_gone(self, storage: Storage, name: StepName) -> bool:
        """**Blocks.** Whether a checkpoint in which there was damage has been removed, so that it was none."""
        ...

    def run(self, stage: Callable[[], None]) -> DamageError | None:
        """**Blocks.** Goes through a stage.

        Returns:
            Damage that was found, here or elsewhere. Any other error is raised, on all workers.
        """
        ...


class AloneAgreement:
    """A worker without others agrees with itself."""

    def choose(self, step: int | None, find: Callable[[], tuple[StepName, ...]]) -> tuple[StepName, ...]:
        """See `Agreement`."""
        return find()

    def see(self, storage: Storage, name: StepName) -> None:
        """See `Agreement`."""

    def is_gone(self, storage: Storage, name: StepName) -> bool:
        """See `Agreement`."""
        return not is_committed(storage, name)

    def run(self, stage: Callable[[], None]) -> DamageError | None:
        """See `Agreement`."""
        try:
            stage()
        except DamageError as damage:
            return damage
        return None


def make_agreement(peers: Peers | None, url: str) -> Agreement:
    """How this worker keeps together with the others, if there are any.

    Args:
        peers: The others; None if there are none.
        url: Where the run lies for this worker.
    """
    if peers is None:
        return AloneAgreement()
    # Most programs have one worker, and do without what several need.
    from holdfast.restore.joint_agreement import JointAgreement

    return JointAgreement(peers, url)
