"""Saves and restores the workspaces of one process: one writer, one data file, one commit for all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError
from holdfast.events import Committed, Event, Fanout
from holdfast.events.sinks import LoggingSink
from holdfast.format.names import parse_step_directory
from holdfast.jobs.keeper import (
    KeeperOptions,
    LoadOrder,
    NodeDurations,
    load_workspace,
    open_manager,
    share_by_bytes,
    warn_of_unmakeable,
)
from holdfast.jobs.workspace import Workspace
from holdfast.save.handle import SaveHandle


class LocalKeeper:
    """A `Keeper` for workspaces of this process. Each node is an object of the checkpoint, under its own name."""

    def __init__(self, workspaces: Sequence[Workspace], options: KeeperOptions) -> None:
        self._workspaces = {workspace.node: workspace for workspace in workspaces}
        self._options = options
        self._emit = Fanout([LoggingSink(), *options.sinks])
        self._seconds: dict[int, float] = {}
        self._checkpoint = Checkpoint()
        for workspace in workspaces:
            workspace.note_given()
        self._manager = open_manager(self._checkpoint, options, self._note, cluster="alone")

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> LocalSaving:
        """Copies all workspaces and returns; see `Keeper`."""
        self._name(self._workspaces)
        for workspace in self._workspaces.values():
            warn_of_unmakeable(workspace, self._emit)
        return LocalSaving(self, self._manager.save(epoch, metadata=metadata))

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Blocks.** Restores workspaces, one after the other; see `Keeper`."""
        return NodeDurations(
            {node: load_workspace(self._workspaces[node], order, self._options, self._emit) for node in order.nodes}
        )

    def go_on_from(self, epoch: int) -> None:
        """**Blocks.** Has what is saved next follow this epoch; see `Keeper`."""
        self._name(())
        self._manager.restore(epoch, strict=False)

    def time(self, handle: SaveHandle) -> NodeDurations:
        """**Blocks.** How long a save that is committed took each node."""
        seconds = self._seconds.pop(handle.step, 0.0)
        nodes = tuple(self._workspaces)
        name = parse_step_directory(handle.path.rpartition("/")[2])
        try:
            assert name is not None, "a save that is committed has a place"
            return share_by_bytes(seconds, self._options.storage, name, nodes)
        except HoldfastError:
            # The checkpoint stands; how its bytes are shared out cannot be looked up now.
            return NodeDurations(dict.fromkeys(nodes, seconds / len(nodes)))

    def close(self) -> None:
        """**Blocks.** Waits for the save in flight, and ends all threads; harmless twice."""
        self._manager.close()

    def _name(self, nodes: Sequence[str] | Mapping[str, Workspace]) -> None:
        """Makes the checkpoint one of just these nodes."""
        for node in list(self._checkpoint):
            del self._checkpoint[node]
        for node in nodes:
            self._checkpoint[node] = self._workspaces[node]

    def _note(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._seconds[event.step] = event.blocked_seconds + event.background_seconds


@dataclass(frozen=True, slots=True)
class LocalSaving:
    """A save of all workspaces of a process."""

    keeper: LocalKeeper
    handle: SaveHandle

    def wait(self) -> NodeDurations:
        """**Blocks.** Waits until it is committed, and what it replaces is gone."""
        self.handle.wait_committed()
        self.handle.wait_ended()
        return self.keeper.time(self.handle)
