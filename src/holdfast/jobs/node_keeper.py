"""One node's hold on the checkpoints of a job whose nodes have a process each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.cluster import Cluster
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import FencedError, HoldfastError, SaveFailedError
from holdfast.events import Event, Fanout, Staged, Written
from holdfast.events.sinks import LoggingSink
from holdfast.jobs.keeper import KeeperOptions, LoadOrder, load_workspace, open_manager, warn_of_unmakeable
from holdfast.jobs.outcome import Outcome, failed
from holdfast.jobs.workspace import Workspace
from holdfast.save.handle import SaveHandle


class NodeKeeper:
    """Saves and loads one workspace, together with those of the other nodes. All of them do the same at the same time.

    A node whose state is not kept takes part with nothing, since a step is committed when all workers have written.

    Attributes:
        handle: The save that was begun last; None before the first.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        is_kept: bool,
        cluster: Cluster,
        options: KeeperOptions,
        liveness_seconds: float = LIVENESS_SECONDS,
    ) -> None:
        """**Collective.** Makes the manager.

        Args:
            workspace: The node.
            is_kept: Whether its state is kept.
            cluster: The workers, each of which is a node.
            options: How to save and restore.
            liveness_seconds: After how long without a sign of life a worker is taken for dead.
        """
        self._workspace = workspace
        self._is_kept = is_kept
        self._options = options
        self._emit = Fanout([LoggingSink(), *options.sinks])
        self._checkpoint = Checkpoint()
        workspace.note_given()
        self.handle: SaveHandle | None = None
        self._seconds: dict[int, float] = {}
        self._manager = open_manager(
            self._checkpoint, options, self._note, cluster=cluster, liveness_seconds=liveness_seconds
        )

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> None:
        """**Collective.** Copies the workspace and returns; `wait` tells how it ended."""
        if self._is_kept:
            self._checkpoint[self._workspace.node] = self._workspace
            warn_of_unmakeable(self._workspace, self._emit)
        self.handle = self._manager.save(epoch, metadata=metadata)

    def wait(self) -> Outcome:
        """**Blocks.** Waits until the save that was begun last is committed for all nodes, or has failed."""
        handle = self.handle
        assert handle is not None, "a save was begun before"
        try:
            handle.wait_committed()
            handle.wait_ended()
        except SaveFailedError as error:
            return failed(error, is_fenced=isinstance(error.__cause__, FencedError))
        except HoldfastError as error:
            return failed(error)
        seconds = self._seconds.pop(handle.step, 0.0)
        return Outcome(seconds if self._is_kept else None)

    def load(self, order: LoadOrder) -> Outcome:
        """**Blocks.** Gives the workspace its state, if it is to have one."""
        if self._workspace.node not in order.nodes:
            return Outcome()
        try:
            return Outcome(load_workspace(self._workspace, order, self._options, self._emit))
        except HoldfastError as error:
            return failed(error)

    def go_on_from(self, epoch: int) -> None:
        """**Collective.** Has what is saved next follow this epoch; all prove that they see the same one."""
        for name in list(self._checkpoint):
            del self._checkpoint[name]
        self._manager.restore(epoch, strict=False)

    def close(self) -> None:
        """**Blocks.** Waits for the save in flight, and ends all threads; harmless twice."""
        self._manager.close()

    def _note(self, event: Event) -> None:
        """Adds up what this node's own part of a save takes."""
        if isinstance(event, Staged):
            self._seconds[event.step] = event.blocked_seconds
        elif isinstance(event, Written):
            self._seconds[event.step] = self._seconds.get(event.step, 0.0) + event.background_seconds
