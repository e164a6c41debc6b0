"""Saving and restoring the workspaces of a session's nodes: the interface for managers, and the store of one process.

A process is a writer, and each of its nodes is an object of the checkpoint. `LocalNodeStore` is for nodes that share
this process; `WorkerNodeStore` for nodes with a process each.
"""

from __future__ import annotations

import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec

from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
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
    MissingPackageError,
    NotFoundError,
    NoWholeCheckpointError,
    SaveFailedError,
    StorageError,
    UsageError,
)
from holdfast.events import Event, Fanout, Sink, Staged, Warned, Written
from holdfast.events.sinks import LoggingSink
from holdfast.format.encoding import escape
from holdfast.format.index import Index
from holdfast.format.names import StepName, data_name, parse_step_directory
from holdfast.format.records import Manifest, Worker
from holdfast.jobs.workspace import KIND, Workspace, explain_missing
from holdfast.manager import CheckpointManager
from holdfast.policies import RetentionPolicy
from holdfast.restore.candidates import make_selection
from holdfast.restore.engine import restore_objects
from holdfast.restore.verify import read_rank
from holdfast.save.handle import SaveHandle
from holdfast.state import Differences
from holdfast.storage import Storage

NODES_NOTE: Final = "nodes"
"""The entry of a manifest's metadata with the names of the nodes."""


@dataclass(frozen=True, slots=True)
class NodeStoreOptions:
    """The options of saves and restores."""

    storage: Storage
    keep: RetentionPolicy
    begin_anew: bool
    timeout_seconds: float
    threads: int
    sinks: tuple[Sink, ...]


@dataclass(frozen=True, slots=True)
class NodeDurations:
    """How long an action took on each node.

    Attributes:
        node_seconds: The time of each node. Nodes of one process are saved together; each gets a share by its bytes.
    """

    node_seconds: Mapping[str, float]

    @property
    def slowest(self) -> str:
        """The node that took longest."""
        return max(self.node_seconds, key=lambda node: self.node_seconds[node], default="")


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A request to load a checkpoint.

    Attributes:
        name: The checkpoint.
        nodes: The nodes, each with the names of the values to load; None for all of them.
        stored: All nodes of the checkpoint, in order.
        keep_added: True to keep values that are not stored. Otherwise plain values are removed: everything was stored.
        strict: True to raise an error for any difference.
    """

    name: StepName
    nodes: Mapping[str, tuple[str, ...] | None]
    stored: tuple[str, ...]
    keep_added: bool = False
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Saving:
    """A save of all nodes in progress.

    Attributes:
        wait: **Blocks** until it is committed for all nodes. It raises `SaveFailedError` if that failed: then no node
            has it; and `DeadlineError` if it takes longer than the store's deadline: it continues.
        handle: This process's part of it; None if it has none.
    """

    wait: Callable[[], NodeDurations]
    handle: SaveHandle | None = None


class NodeStore(Protocol):
    """Saves and restores the workspaces of a session's nodes: all of them in one commit."""

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> Saving:
        """Copies the state of all nodes and returns; the rest continues in the background."""
        ...

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Blocks.** Restores nodes from a checkpoint; every byte is checked.

        Raises:
            NoWholeCheckpointError: If it is damaged for one of them.
            MismatchError: If it does not fit one of them.
            StorageError: If the storage fails.
        """
        ...

    def go_on_from(self, epoch: int) -> None:
        """**Blocks.** Makes the next save follow this epoch; later epochs leave the current lineage."""
        ...

    def close(self) -> None:
        """**Blocks.** Waits for the save in progress, and ends all threads; a second call does nothing."""
        ...


class LocalNodeStore:
    """A `NodeStore` for workspaces of this process: one writer, one data file, one commit for all of them."""

    def __init__(
        self,
        workspaces: Sequence[Workspace],
        options: NodeStoreOptions,
        *,
        cluster: Cluster | Literal["alone"] = "alone",
        liveness_seconds: float = LIVENESS_SECONDS,
    ) -> None:
        """**Collective.** Creates the manager; `cluster` is "alone" if the session is this process alone."""
        self._workspaces = {workspace.node: workspace for workspace in workspaces}
        self._options = options
        self._emit = Fanout([LoggingSink(), *options.sinks])
        self._seconds: dict[int, float] = {}
        self._checkpoint = Checkpoint()
        for workspace in workspaces:
            workspace.note_given()
        self._manager = CheckpointManager(
            options.storage,
            self._checkpoint,
            keep=options.keep,
            begin_anew=options.begin_anew,
            # The manager raises failures of saves where it waits for them, and counts them.
            failures_allowed=sys.maxsize,
            sinks=[self._note, *options.sinks],
            timeout_seconds=options.timeout_seconds,
            threads=options.threads,
            cluster=cluster,
            liveness_seconds=liveness_seconds,
        )

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> Saving:
        """Copies all workspaces and returns; see `NodeStore`."""
        self._name(self._workspaces)
        for workspace in self._workspaces.values():
            for text in workspace.find_unmakeable():
                self._emit(Warned(text=text))
        handle = self._manager.save(epoch, metadata=metadata)
        return Saving(lambda: self._wait(handle), handle)

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Blocks.** Restores workspaces of this process, one after the other; see `NodeStore`."""
        here = [self._workspaces[node] for node in order.nodes if node in self._workspaces]
        return NodeDurations(
            {workspace.node: load_workspace(workspace, order, self._options, self._emit) for workspace in here}
        )

    def go_on_from(self, epoch: int) -> None:
        """**Blocks.** Makes the next save follow this epoch; see `NodeStore`."""
        self._name(())
        self._manager.restore(epoch, strict=False)

    def close(self) -> None:
        """**Blocks.** Waits for the save in progress, and ends all threads; a second call does nothing."""
        self._manager.close()

    def _wait(self, handle: SaveHandle) -> NodeDurations:
        """Waits until a save is committed and what it replaces is removed; returns the time of each node."""
        handle.wait_committed()
        handle.wait_ended()
        seconds = self._seconds.pop(handle.step, 0.0)
        nodes = tuple(self._workspaces)
        if len(nodes) < 2:
            return NodeDurations(dict.fromkeys(nodes, seconds))
        name = parse_step_directory(handle.path.rpartition("/")[2])
        try:
            assert name is not None, "a save that is committed has a place"
            return _share_by_bytes(seconds, self._options.storage, name, nodes)
        except HoldfastError:
            # The checkpoint is committed; how its bytes are distributed cannot be read now.
            return NodeDurations(dict.fromkeys(nodes, seconds / len(nodes)))

    def _name(self, nodes: Sequence[str] | Mapping[str, Workspace]) -> None:
        """Records these nodes as the checkpoint's."""
        for node in list(self._checkpoint):
            del self._checkpoint[node]
        for node in nodes:
            self._checkpoint[node] = self._workspaces[node]

    def _note(self, event: Event) -> None:
        if isinstance(event, Staged):
            self._seconds[event.step] = event.blocked_seconds
        elif isinstance(event, Written):
            self._seconds[event.step] = self._seconds.get(event.step, 0.0) + event.background_seconds


def load_workspace(workspace: Workspace, order: LoadOrder, options: NodeStoreOptions, emit: Sink) -> float:
    """**Blocks.** Restores a node of this process, whichever process wrote it; every byte is checked.

    Returns the seconds that it took.

    Raises:
        NoWholeCheckpointError: If it is damaged.
        MismatchError: If it does not fit; the workspace has not been changed.
        StorageError: If the storage fails.
    """
    place = find_place(options.storage, order.name, workspace.node, order.stored)
    only = order.nodes[workspace.node]
    added = {key: value for key, value in workspace.items() if key not in place.names} if order.keep_added else {}
    for key in added:
        del workspace[key]
    wanted = [escape(workspace.node)] if only is None else [f"{escape(workspace.node)}/{escape(key)}" for key in only]
    try:
        restoration = restore_objects(
            options.storage,
            {workspace.node: workspace},
            step=order.name.step,
            select=make_selection(wanted),
            strict=order.strict,
            threads=options.threads,
            emit=emit,
            # Each reads what is its own, so the process that takes the writer's place has what the writer had.
            worker=place.writer,
        )
    except MismatchError as mismatch:
        if mismatch.differences.extra:
            # Plain values are replaced by a restore, so these are objects, or within one.
            mismatch.hint = explain_missing(workspace, mismatch.differences.extra)
        raise
    finally:
        workspace.update(added)
    assert restoration is not None, "a step that was asked for is there, or an error"
    return restoration.seconds


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The position of a node's state in a checkpoint."""

    node: str
    writer: Worker
    names: tuple[str, ...]


def read_places(storage: Storage, name: StepName) -> list[NodePlace]:
    """**Blocks.** Returns all nodes of a checkpoint; reads the records of all its writers.

    Raises:
        DamageError: If they are damaged.
        UsageError: If it was not written by a job.
        StorageError: If the storage fails.
    """
    manifest = _read(storage, name)
    return [place for index in _indexes(storage, name, manifest) for place in _places_in(storage, name, index)]


def find_place(storage: Storage, name: StepName, node: str, stored: Sequence[str]) -> NodePlace:
    """**Blocks.** Returns the position of one node's state; usually this reads a single record.

    The order of the stored nodes determines where to look first.

    Raises:
        NoWholeCheckpointError: If the records are damaged, or no worker has written it.
        UsageError: If it was not written by a job.
        StorageError: If the storage fails.
    """
    first = stored.index(node) if node in stored else 0
    try:
        for index in _indexes(storage, name, _read(storage, name), first):
            for place in _places_in(storage, name, index):
                if place.node == node:
                    return place
        raise DamageError(f"no worker has written the state of {node}", step=name.step, path=name.directory)
    except DamageError as damage:
        raise NoWholeCheckpointError(f"step {name.step} is damaged: {damage.message}", damages=(damage,)) from damage


def stored_nodes(storage: Storage, name: StepName) -> tuple[str, ...]:
    """**Blocks.** Returns the nodes of a checkpoint, from its manifest.

    Raises:
        DamageError: If the manifest is damaged.
        UsageError: If it was not written by a job.
        StorageError: If the storage fails.
    """
    nodes = _read(storage, name).metadata.get(NODES_NOTE)
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, str) for node in nodes):
        raise _no_job(storage, name)
    return tuple(nodes)


def data_path(name: StepName, place: NodePlace) -> str:
    """**Pure.** Returns the path of the data file with a node's state."""
    return f"{name.directory}/{data_name(place.writer.rank, place.writer.world_size)}"


def _share_by_bytes(seconds: float, storage: Storage, name: StepName, nodes: Sequence[str]) -> NodeDurations:
    """**Blocks.** Splits a time that nodes spent together by the bytes that each has in a checkpoint."""
    manifest = StoredRun(storage).step(name).manifest()
    begins = {f"{escape(node)}/": node for node in nodes}
    # Values other than arrays count too, or a node without any would seem to have taken no time.
    node_bytes = dict.fromkeys(nodes, 1)
    for rank in range(manifest.world_size):
        for leaf in StoredRun(storage).step(name).index(manifest, rank).all_leaves():
            node = begins.get(leaf.name.partition("/")[0] + "/")
            if node is not None:
                node_bytes[node] += leaf.end - leaf.begin
    total_bytes = sum(node_bytes.values())
    return NodeDurations({node: seconds * share / total_bytes for node, share in node_bytes.items()})


def _read(storage: Storage, name: StepName) -> Manifest:
    try:
        return StoredRun(storage).step(name).manifest()
    except NotFoundError as error:
        raise DamageError(f"{error.path} is missing", step=name.step, path=error.path) from error


def _indexes(storage: Storage, name: StepName, manifest: Manifest, first: int = 0) -> Iterator[Index]:
    ranks = range(manifest.world_size)
    for rank in (*ranks[first : first + 1], *ranks[:first], *ranks[first + 1 :]):
        yield read_rank(storage, name.directory, manifest, rank)


def _places_in(storage: Storage, name: StepName, index: Index) -> Iterator[NodePlace]:
    for node, skeleton in index.objects.items():
        values = skeleton.get("v") if isinstance(skeleton, dict) and skeleton.get("k") == KIND else None
        if not isinstance(values, dict):
            raise _no_job(storage, name)
        yield NodePlace(node, Worker(index.rank, index.world_size), tuple(values))


def _no_job(storage: Storage, name: StepName) -> UsageError:
    return UsageError(
        f"step {name.step} of {storage.url} is a checkpoint, but was not written by a job",
        hint="Give each job a directory of its own.",
    )


_KINDS: Final[Mapping[str, Callable[[str, str], HoldfastError]]] = {
    "NoWholeCheckpointError": lambda text, hint: NoWholeCheckpointError(text, damages=(DamageError(text),), hint=hint),
    "MismatchError": lambda text, hint: MismatchError(text, differences=Differences(), hint=hint),
    "StorageError": lambda text, hint: StorageError(text, hint=hint),
    "StorageFullError": lambda text, hint: StorageError(text, hint=hint),
    "ApplyError": lambda text, hint: ApplyError(text, hint=hint),
    "UsageError": lambda text, hint: UsageError(text, hint=hint),
    "MissingPackageError": lambda text, hint: MissingPackageError(text, hint=hint),
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
        """Waits until a save is committed for all nodes. The first node is the leader: its result counts for all."""
        outcomes = self.call("wait", f"the save of epoch {epoch}")
        leader = next(iter(outcomes.values()))
        if leader.kind:
            failure = SaveFailedError(leader.text, step=epoch, hint=leader.hint)
            if leader.is_fenced:
                failure.__cause__ = FencedError(leader.text, hint=leader.hint)
            raise failure
        return NodeDurations({node: one.seconds for node, one in outcomes.items() if one.seconds is not None})


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


def _make_error(outcome: NodeOutcome, text: str) -> HoldfastError:
    make = _KINDS.get(outcome.kind)
    if make is not None:
        return make(text, outcome.hint)
    if not outcome.trace:
        return ClusterError(text, hint=outcome.hint)
    error = UsageError(text, hint="An object of the program raised this; the traceback below shows where.")
    error.add_note(outcome.trace.rstrip())
    return error
