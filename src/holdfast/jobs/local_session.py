"""`LocalSession`: all nodes in this process, a workspace for each, their tasks in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import UsageError
from holdfast.jobs.node_store import LocalNodeStore, NodeStoreOptions
from holdfast.jobs.session import GRACE_SECONDS, Placed, Session, run_tasks
from holdfast.jobs.task import TaskGroup
from holdfast.jobs.workspace import Workspace
from holdfast.numbers import check_seconds


class LocalSession(Session):
    """Nodes that share this process.

    A task that is alone in its group runs in the calling thread, others have one each. When one fails, the others have
    some time to end; a thread cannot be ended from without.

    Example:
        ```python
        with hf.LocalSession(["trainer_0", "trainer_1"]) as session:
            hf.JobRunner(job, hf.MultiNodeCheckpointManager("runs/job")).train(session)
        ```
    """

    def __init__(self, nodes: str | Sequence[str] | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Makes the nodes, their workspaces empty.

        Args:
            nodes: Their names, or that of the only one; None for those that the first job names, or else one, `local`.
            grace_seconds: How long the other tasks of a group may go on when one has failed.

        Raises:
            UsageError: If a name cannot be one, or is there twice.
        """
        super().__init__(nodes)
        self._grace_seconds = check_seconds("grace_seconds", grace_seconds, least=0)
        self._workspaces: dict[str, Workspace] = {}

    def workspace(self, node: str | None = None) -> Workspace:
        """The workspace of a node; None for the first.

        Raises:
            UsageError: If there is no such node.
        """
        self.check_open()
        name = self.nodes[0] if node is None else node
        if name not in self.nodes:
            raise UsageError(f"the session has no node {name!r}", hint=f"Its nodes are {', '.join(self.nodes)}.")
        if name not in self._workspaces:
            self._workspaces[name] = Workspace(name)
        return self._workspaces[name]

    def _run_making(self, group: TaskGroup) -> None:
        """**Blocks.** Runs a task that makes an object, on one node after the other, so that chance is the same."""
        for node in self.nodes:
            self.run(group, only=[node])

    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Blocks.** Runs tasks at the same time; see `Session`."""
        for node in self.nodes:
            workspace = self.workspace(node)
            workspace.begin_epoch(workspace.epoch if epoch is None else epoch)
        return run_tasks(group, placed, self._workspaces, self._grace_seconds)

    def _make_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> LocalNodeStore:
        """What saves and restores the workspaces of some nodes, all in one file."""
        return LocalNodeStore([self.workspace(node) for node in nodes], options)

    def close(self) -> None:
        """Ends the session, and lets go of the workspaces."""
        super().close()
        self._workspaces = {}
