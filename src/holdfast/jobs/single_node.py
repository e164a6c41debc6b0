"""The manager of a job whose only node has a state to keep."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import UsageError
from holdfast.jobs.checkpoints import MultiNodeCheckpointManager
from holdfast.jobs.session import Session


class NodeCheckpointManager(MultiNodeCheckpointManager):
    """The same for a job whose only node has a state to keep; a second node is refused."""

    def init(self, session: Session, nodes: Sequence[str], *, goes_on: bool = False) -> None:
        """**Blocks.** As `MultiNodeCheckpointManager.init`.

        Raises:
            UsageError: If there is more than one node.
        """
        if len(nodes) != 1:
            raise UsageError(
                f"this manager keeps the state of one node, not of {', '.join(nodes)}",
                hint="Use a MultiNodeCheckpointManager, or name one in nodes_to_checkpoint.",
            )
        super().init(session, nodes, goes_on=goes_on)
