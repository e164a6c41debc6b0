"""How a session's workspaces are saved and restored: what the managers of checkpoints ask of each kind of session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.catalog import read_index, read_manifest
from holdfast.errors import UsageError
from holdfast.events import Sink
from holdfast.format.encoding import escape
from holdfast.format.names import StepName
from holdfast.jobs.workspace import KIND
from holdfast.policies import RetentionPolicy
from holdfast.restore.driver import Restoration
from holdfast.restore.verify import open_step
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
        node_seconds: For each node. Nodes that share a process are saved and loaded together; the time counts for each
            by its share of the bytes.
    """

    node_seconds: Mapping[str, float]

    @property
    def slowest(self) -> str:
        """The node that it took longest."""
        return max(self.node_seconds, key=lambda node: self.node_seconds[node], default="")


class Saving(Protocol):
    """A save of all nodes that has begun."""

    def wait(self) -> NodeDurations:
        """**Blocks.** Waits until it is committed for all nodes.

        Raises:
            SaveFailedError: If it failed: then no node has it.
            DeadlineError: If it takes longer than the keeper's deadline; it goes on.
        """
        ...


class Keeper(Protocol):
    """Saves and restores the workspaces of a session's nodes: all of them in one commit."""

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> Saving:
        """Copies the state of all nodes and returns; the rest goes on behind it."""
        ...

    def restore(
        self,
        epoch: int | None,
        *,
        nodes: Sequence[str],
        only: Sequence[str] | None = None,
        keep_added: bool = False,
        strict: bool = True,
    ) -> tuple[Restoration, NodeDurations] | None:
        """**Blocks.** Gives nodes the state of a checkpoint.

        Args:
            epoch: The epoch; None for the newest whole one.
            nodes: The nodes that take part.
            only: What to restore (`node/name`), all else stays; None for everything.
            keep_added: Whether values stay of which nothing is stored. Otherwise plain ones go, as what is stored is
                all there was.
            strict: Whether any difference is an error.

        Returns:
            What was done; None if there is no checkpoint.
        """
        ...

    def close(self) -> None:
        """**Blocks.** Waits for the save in flight, and ends all threads; harmless twice."""
        ...


def read_names(storage: Storage, name: StepName) -> dict[str, tuple[str, ...]]:
    """**Blocks.** The nodes of a checkpoint, each with the names of its values.

    Raises:
        DamageError: If its records are damaged.
        StorageError: If the place fails.
    """
    names: dict[str, tuple[str, ...]] = {}
    for index in open_step(storage, name.directory, name).indexes:
        for node, skeleton in index.objects.items():
            values = skeleton.get("v") if isinstance(skeleton, dict) and skeleton.get("k") == KIND else None
            if not isinstance(values, dict):
                raise UsageError(
                    f"step {name.step} of {storage.url} is a checkpoint, but not one of a job's nodes",
                    hint="Give each job a directory of its own.",
                )
            names[node] = tuple(values)
    return names


def find_writer(storage: Storage, name: StepName, node: str) -> str | None:
    """**Blocks.** The path of the data file that holds the state of a node; None if there is no such node."""
    opened = open_step(storage, name.directory, name)
    for rank, index in enumerate(opened.indexes):
        if node in index.objects:
            return opened.data_path(rank)
    return None


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
