"""Gives one node the state that it had at an epoch, whichever process had written it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.catalog import read_manifest
from holdfast.errors import DamageError, MismatchError, NotFoundError, NoWholeCheckpointError, UsageError
from holdfast.events import Sink
from holdfast.format.encoding import escape
from holdfast.format.index import Index
from holdfast.format.manifest import Manifest
from holdfast.format.names import StepName, data_name
from holdfast.format.workers import Worker
from holdfast.jobs.workspace import KIND, Workspace, explain_missing
from holdfast.restore.candidates import make_selection
from holdfast.restore.engine import restore_objects
from holdfast.restore.records import Restoration
from holdfast.restore.verify import read_rank
from holdfast.storage import Storage

NODES_NOTE: Final = "nodes"
"""Where a manifest's metadata names the nodes."""


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where the state of a node lies in a checkpoint.

    Attributes:
        node: The node.
        writer: Which worker of which world wrote it.
        names: Its values.
    """

    node: str
    writer: Worker
    names: tuple[str, ...]


def read_places(storage: Storage, name: StepName) -> list[NodePlace]:
    """**Blocks.** All nodes of a checkpoint; reads the records of all who wrote it.

    Raises:
        DamageError: If they are damaged.
        UsageError: If it is no checkpoint of a job.
        StorageError: If the place fails.
    """
    manifest = _read(storage, name)
    return [place for index in _indexes(storage, name, manifest) for place in _places_in(storage, name, index)]


def find_place(storage: Storage, name: StepName, node: str, stored: Sequence[str]) -> NodePlace:
    """**Blocks.** Where one node's state lies; as a rule it takes one record to know.

    Args:
        storage: Where the checkpoint lies.
        name: Which it is.
        node: The node.
        stored: The nodes of the checkpoint, in order, which says where to look first.

    Raises:
        NoWholeCheckpointError: If the records are damaged, or no worker has written it.
        UsageError: If it is no checkpoint of a job.
        StorageError: If the place fails.
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
    """**Blocks.** The nodes of a checkpoint, as its manifest names them.

    Raises:
        DamageError: If the manifest is damaged.
        UsageError: If it is no checkpoint of a job.
        StorageError: If the place fails.
    """
    nodes = _read(storage, name).metadata.get(NODES_NOTE)
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, str) for node in nodes):
        raise _no_job(storage, name)
    return tuple(nodes)


def data_path(name: StepName, place: NodePlace) -> str:
    """**Pure.** The path of the data file that a node's state lies in."""
    return f"{name.directory}/{data_name(place.writer.rank, place.writer.world_size)}"


def load_node(
    storage: Storage,
    name: StepName,
    place: NodePlace,
    workspace: Workspace,
    *,
    only: Sequence[str] | None = None,
    keep_added: bool = False,
    strict: bool = True,
    threads: int = 3,
    emit: Sink = lambda event: None,
) -> Restoration:
    """**Blocks.** Gives a workspace its state; every byte that is read is checked.

    Args:
        storage: Where the checkpoint lies.
        name: Which it is.
        place: Where in it the node's state lies.
        workspace: The node.
        only: The names of the values to load, all else stays; None for all.
        keep_added: Whether values stay of which nothing is stored; otherwise plain ones go.
        strict: Whether any difference is an error.
        threads: How many threads read.
        emit: Told of what happens.

    Raises:
        NoWholeCheckpointError: If it is damaged.
        MismatchError: If it does not fit; the workspace has not been changed.
        StorageError: If the place fails.
    """
    added = {key: value for key, value in workspace.items() if key not in place.names} if keep_added else {}
    for key in added:
        del workspace[key]
    wanted = [escape(workspace.node)] if only is None else [f"{escape(workspace.node)}/{escape(key)}" for key in only]
    try:
        restoration = restore_objects(
            storage,
            {workspace.node: workspace},
            step=name.step,
            select=make_selection(wanted),
            strict=strict,
            threads=threads,
            emit=emit,
            # Each reads what is its own, so whoever takes the writer's place has what the writer had.
            worker=place.writer,
        )
    except MismatchError as mismatch:
        if mismatch.differences.extra:
            # Values are made anew, so these are objects, or stand in one.
            mismatch.hint = explain_missing(workspace, mismatch.differences.extra)
        raise
    finally:
        workspace.update(added)
    assert restoration is not None, "a step that was asked for is there, or an error"
    return restoration


def _read(storage: Storage, name: StepName) -> Manifest:
    try:
        return read_manifest(storage, name)
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
        f"step {name.step} of {storage.url} is a checkpoint, but not one of a job's nodes",
        hint="Give each job a directory of its own.",
    )
