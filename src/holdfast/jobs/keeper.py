"""How a session's workspaces are saved and restored: what the managers of checkpoints ask of each kind of session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from holdfast.catalog import read_index, read_manifest
from holdfast.checkpoint import Checkpoint
from holdfast.cluster import Cluster
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.events import Sink, Warned
from holdfast.format.encoding import escape
from holdfast.format.names import StepName
from holdfast.jobs.loading import find_place, load_node
from holdfast.jobs.workspace import Workspace
from holdfast.manager import CheckpointManager
from holdfast.policies import RetentionPolicy
from holdfast.save.handle import SaveHandle
from holdfast.storage import Storage


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """How to save and restore.

    Attributes:
        storage: Where the checkpoints lie.
        keep: Which to keep.
        begin_anew: Whether to begin from nothing although there may be checkpoints.
        timeout_seconds: The deadline of each wait.
        threads: How many threads write, and read, in each process.
        sinks: Functions that are told of each event.
    """

    storage: Storage
    keep: RetentionPolicy
    begin_anew: bool
    timeout_seconds: float
    threads: int
    sinks: tuple[Sink, ...]


@dataclass(frozen=True, slots=True)
class NodeDurations:
    """How long an action took each node.

    Attributes:
        node_seconds: For each node. Nodes that share a process are saved together; the time counts for each by its
            share of the bytes.
    """

    node_seconds: Mapping[str, float]

    @property
    def slowest(self) -> str:
        """The node that it took longest."""
        return max(self.node_seconds, key=lambda node: self.node_seconds[node], default="")


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What is to be loaded.

    Attributes:
        name: The checkpoint.
        nodes: The nodes, each with the names of the values to load; None for all of them.
        stored: All nodes of the checkpoint, in order.
        keep_added: Whether values stay of which nothing is stored. Otherwise plain ones go, as what is stored is all
            there was.
        strict: Whether any difference is an error.
    """

    name: StepName
    nodes: Mapping[str, tuple[str, ...] | None]
    stored: tuple[str, ...]
    keep_added: bool = False
    strict: bool = True


class Saving(Protocol):
    """A save of all nodes that has begun."""

    @property
    def handle(self) -> SaveHandle | None:
        """This process's part of it; None if it has none."""
        ...

    def wait(self) -> NodeDurations:
        """**Blocks.** Waits until it is committed for all nodes.

        Raises:
            SaveFailedError: If it failed: then no node has it.
            DeadlineError: If it takes longer than the keeper's deadline; it goes on.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommonSaving:
    """A save whose end the nodes have to tell each other.

    Attributes:
        epoch: Which it is.
        wait_for: Has them do that.
        handle: This process's part of it; None if it has none.
    """

    epoch: int
    wait_for: Callable[[int], NodeDurations]
    handle: SaveHandle | None = None

    def wait(self) -> NodeDurations:
        """**Blocks.** Waits until it is committed for all nodes."""
        return self.wait_for(self.epoch)


class Keeper(Protocol):
    """Saves and restores the workspaces of a session's nodes: all of them in one commit."""

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> Saving:
        """Copies the state of all nodes and returns; the rest goes on behind it."""
        ...

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Blocks.** Gives nodes the state that they had in a checkpoint; every byte is checked.

        Raises:
            NoWholeCheckpointError: If it is damaged for one of them.
            MismatchError: If it does not fit one of them.
            StorageError: If the place fails.
        """
        ...

    def go_on_from(self, epoch: int) -> None:
        """**Blocks.** What is saved next follows this epoch; those beyond it are no longer on the living line."""
        ...

    def close(self) -> None:
        """**Blocks.** Waits for the save in flight, and ends all threads; harmless twice."""
        ...


def open_manager(
    checkpoint: Checkpoint,
    options: KeeperOptions,
    note: Sink,
    *,
    cluster: Cluster | Literal["alone"],
    liveness_seconds: float = LIVENESS_SECONDS,
) -> CheckpointManager:
    """What saves the workspaces of one process.

    Args:
        checkpoint: The workspaces.
        options: How to save and restore.
        note: Told of each event first.
        cluster: The processes that save together; "alone" if the session is this one, whoever else there may be.
        liveness_seconds: After how long without a sign of life a process is taken for dead.
    """
    return CheckpointManager(
        options.storage,
        checkpoint,
        keep=options.keep,
        begin_anew=options.begin_anew,
        # Whoever waits for a save hears of its failure, and counts them.
        failures_allowed=sys.maxsize,
        sinks=[note, *options.sinks],
        timeout_seconds=options.timeout_seconds,
        threads=options.threads,
        cluster=cluster,
        liveness_seconds=liveness_seconds,
    )


def load_workspace(workspace: Workspace, order: LoadOrder, options: KeeperOptions, emit: Sink) -> float:
    """**Blocks.** Gives a node of this process its state; how long that took, in seconds. See `load_node`."""
    restoration = load_node(
        options.storage,
        order.name,
        find_place(options.storage, order.name, workspace.node, order.stored),
        workspace,
        only=order.nodes[workspace.node],
        keep_added=order.keep_added,
        strict=order.strict,
        threads=options.threads,
        emit=emit,
    )
    return restoration.seconds


def warn_of_unmakeable(workspace: Workspace, emit: Sink) -> None:
    """Says, at the first save that has it, what of a node is saved and cannot be made at a restart."""
    for text in workspace.find_unmakeable():
        emit(Warned(text=text))


def share_by_bytes(seconds: float, storage: Storage, name: StepName, nodes: Sequence[str]) -> NodeDurations:
    """**Blocks.** A time that nodes have spent together, shared out by the bytes that each has in a checkpoint."""
    manifest = read_manifest(storage, name)
    begins = {f"{escape(node)}/": node for node in nodes}
    # Values other than arrays count too, or a node without any would seem to have taken no time.
    node_bytes = dict.fromkeys(nodes, 1)
    for rank in range(manifest.world_size):
        for leaf in read_index(storage, name.directory, manifest, rank).all_leaves():
            node = begins.get(leaf.name.partition("/")[0] + "/")
            if node is not None:
                node_bytes[node] += leaf.end - leaf.begin
    total_bytes = sum(node_bytes.values())
    return NodeDurations({node: seconds * share / total_bytes for node, share in node_bytes.items()})
