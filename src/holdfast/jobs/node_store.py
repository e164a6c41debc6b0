"""Saving and restoring the workspaces of a session's nodes: the interface for managers, and the store of one process.

A process is a writer, and each of its nodes is an object of the checkpoint. `LocalNodeStore` is for nodes that share
this process; `WorkerNodeStore` for nodes with a process each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from holdfast.catalog import StoredRun
from holdfast.checkpoint import Checkpoint
from holdfast.cluster import Cluster
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import (
    DamageError,
    HoldfastError,
    MismatchError,
    NotFoundError,
    NoWholeCheckpointError,
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
