"""Saves and restores nodes that have a process each: the part of one node, and the store that drives all parts."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from holdfast.cluster import Cluster
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import (
    ApplyError,
    ClusterError,
    DamageError,
    DeadlineError,
    FencedError,
    HoldfastError,
    MismatchError,
    NoWholeCheckpointError,
    SaveFailedError,
    StorageError,
    UsageError,
)
from holdfast.jobs.node_store import LoadOrder, LocalNodeStore, NodeDurations, NodeStoreOptions, Saving
from holdfast.jobs.workspace import Workspace
from holdfast.save.handle import SaveHandle
from holdfast.state import Differences

_KINDS: Final[Mapping[str, Callable[[str, str], HoldfastError]]] = {
    "NoWholeCheckpointError": lambda text, hint: NoWholeCheckpointError(text, damages=(DamageError(text),), hint=hint),
    "MismatchError": lambda text, hint: MismatchError(text, differences=Differences(), hint=hint),
    "StorageError": lambda text, hint: StorageError(text, hint=hint),
    "StorageFullError": lambda text, hint: StorageError(text, hint=hint),
    "ApplyError": lambda text, hint: ApplyError(text, hint=hint),
    "UsageError": lambda text, hint: UsageError(text, hint=hint),
    "UnsupportedValueError": lambda text, hint: UsageError(text, hint=hint),
    "DeadlineError": lambda text, hint: DeadlineError(text, hint=hint),
    "AbsentError": lambda text, hint: DeadlineError(text, hint=hint),
}
"""Errors that are created again in another process; their additional attributes are in the text."""


class NodeOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of an action on one node, as the others read it.

    Attributes:
        seconds: How long it took; None if the node had no part in it.
        kind: The name of the error's type; empty if there was none.
        text: The error's message.
        hint: What to do about it.
        is_fenced: True if another job has taken over.
        trace: The traceback of an error that is not holdfast's; else empty.
    """

    seconds: float | None = None
    kind: str = ""
    text: str = ""
    hint: str = ""
    is_fenced: bool = False
    trace: str = ""


def failed(error: Exception, *, is_fenced: bool = False) -> NodeOutcome:
    """**Pure.** Returns the outcome of an action that raised."""
    kind = type(error).__name__
    if isinstance(error, HoldfastError):
        return NodeOutcome(None, kind, error.message, error.hint, is_fenced)
    # Out of the state of a user's object, say.
    return NodeOutcome(None, kind, f"{kind}: {error}", trace="".join(traceback.format_exception(error)))


class NodePart:
    """Saves and loads one workspace, together with those of the other nodes. All of them do the same at the same time.

    A node whose state is not saved takes part with nothing, because a step is committed when all workers have written.

    Attributes:
        handle: The save that was begun last; None before the first.
    """

    def __init__(
        self,
        workspace: Workspace,
        *,
        is_kept: bool,
        cluster: Cluster,
        options: NodeStoreOptions,
        liveness_seconds: float = LIVENESS_SECONDS,
    ) -> None:
        """**Collective.** Creates the store."""
        self._node = workspace.node
        self._store = LocalNodeStore(
            [workspace] if is_kept else [], options, cluster=cluster, liveness_seconds=liveness_seconds
        )
        self._saving: Saving | None = None
        self.handle: SaveHandle | None = None

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> None:
        """**Collective.** Copies the workspace and returns; `wait` returns the result."""
        self._saving = self._store.save(epoch, metadata)
        self.handle = self._saving.handle

    def wait(self) -> NodeOutcome:
        """**Blocks.** Waits until the save that was begun last is committed for all nodes, or has failed."""
        assert self._saving is not None, "a save was begun before"
        return self._try(self._saving.wait)

    def load(self, order: LoadOrder) -> NodeOutcome:
        """**Blocks.** Restores the workspace, if it is to be restored."""
        return self._try(lambda: self._store.load(order))

    def go_on_from(self, epoch: int) -> None:
        """**Collective.** Makes the next save follow this epoch; all prove that they see the same one."""
        self._store.go_on_from(epoch)

    def close(self) -> None:
        """**Blocks.** Waits for the save in progress, and ends all threads; a second call does nothing."""
        self._store.close()

    def _try(self, act: Callable[[], NodeDurations]) -> NodeOutcome:
        try:
            return NodeOutcome(act().node_seconds.get(self._node))
        except HoldfastError as error:
            return failed(error, is_fenced=isinstance(error.__cause__, FencedError))


class WorkerNodeStore(ABC):
    """A `NodeStore` of which each node has a part, a `NodePart`, in a process of its own."""

    handle: SaveHandle | None = None
    """This process's own part of the save that was begun last; None if it has none."""

    @abstractmethod
    def call(self, method: str, what: str, *arguments: Any) -> Mapping[str, NodeOutcome]:
        """**Blocks.** Calls a method of the parts of all nodes; `what` is the purpose in words, the same in each.

        Returns the result of each node, the first node first; nothing if the parts synchronize on their own.
        """

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> Saving:
        """Makes all nodes copy their state and returns; see `NodeStore`."""
        check_outcomes(self.call("save", f"the begin of the save of epoch {epoch}", epoch, dict(metadata)))
        return Saving(lambda: self._wait(epoch), self.handle)

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Blocks.** Makes nodes load their state; see `NodeStore`."""
        return check_outcomes(self.call("load", f"the load of epoch {order.name.step}", order))

    def go_on_from(self, epoch: int) -> None:
        """**Blocks.** Makes the next save follow this epoch; see `NodeStore`."""
        check_outcomes(self.call("go_on_from", f"resuming from epoch {epoch}", epoch))

    def close(self) -> None:
        """**Blocks.** Ends the parts of the live nodes; a second call does nothing."""
        check_outcomes(self.call("close", "the end of a run"))

    def _wait(self, epoch: int) -> NodeDurations:
        """Waits until a save is committed for all nodes; the first node's result counts for all."""
        return _check_save(epoch, self.call("wait", f"the save of epoch {epoch}"))


def check_outcomes(outcomes: Mapping[str, NodeOutcome]) -> NodeDurations:
    """**Pure.** Returns the times of all nodes that had a part, if all succeeded.

    Raises:
        HoldfastError: The error of the first node that failed; the text names the node.
    """
    wrong = [(node, outcome) for node, outcome in outcomes.items() if outcome.kind]
    if wrong:
        node, outcome = wrong[0]
        error = _make_error(outcome, f"{node}: {outcome.text}")
        for other, also in wrong[1:]:
            error.add_note(f"{other} too: {also.text}")
        raise error
    return NodeDurations({node: one.seconds for node, one in outcomes.items() if one.seconds is not None})


def _check_save(epoch: int, outcomes: Mapping[str, NodeOutcome]) -> NodeDurations:
    """**Pure.** Returns the times of a save, if it is committed. The first node is the leader, which publishes it.

    Raises:
        SaveFailedError: If it is not.
    """
    leader = next(iter(outcomes.values()))
    if leader.kind:
        failure = SaveFailedError(leader.text, step=epoch, hint=leader.hint)
        if leader.is_fenced:
            failure.__cause__ = FencedError(leader.text, hint=leader.hint)
        raise failure
    return NodeDurations({node: one.seconds for node, one in outcomes.items() if one.seconds is not None})


def _make_error(outcome: NodeOutcome, text: str) -> HoldfastError:
    make = _KINDS.get(outcome.kind)
    if make is not None:
        return make(text, outcome.hint)
    if not outcome.trace:
        return ClusterError(text, hint=outcome.hint)
    error = UsageError(text, hint="An object of the program raised this; the traceback below shows where.")
    error.add_note(outcome.trace.rstrip())
    return error
