"""The code that runs in Ray's actors: a node of a session, and the key-value store that the nodes share."""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
from ray import cloudpickle

from holdfast.cluster import AloneCluster, Cluster
from holdfast.cluster.store import JoinedCluster
from holdfast.errors import TaskFailedError
from holdfast.events import Event
from holdfast.events.sinks import encode_event
from holdfast.jobs.job import Task, TaskFunction
from holdfast.jobs.node_store import NodeOutcome, NodePart, NodeStoreOptions, failed
from holdfast.jobs.session import Placed, run_tasks
from holdfast.jobs.workspace import Workspace
from holdfast.policies import RetentionPolicy


class StoreActor:
    """Values and counters in the memory of one process. An actor executes one call at a time, so each is atomic."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counters: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """See `EngineStore`."""
        self._values[key] = value

    def set_once(self, key: str, value: bytes) -> bytes:
        """See `EngineStore`."""
        return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        """See `EngineStore`."""
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """See `EngineStore`."""
        self._counters[key] = self._counters.get(key, 0) + amount
        return self._counters[key]

    def delete(self, key: str) -> None:
        """See `EngineStore`."""
        self._values.pop(key, None)
        self._counters.pop(key, None)


class _StoreOf:
    """A connection to a `StoreActor`: an `EngineStore` whose methods are the actor's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments: ray.get(getattr(self._actor, method).remote(*arguments))


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A task, as it is sent to its node.

    Attributes:
        place: Its position in the group.
        name: Its name.
        function: Its function.
    """

    place: int
    name: str
    function: TaskFunction


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """The results of a node's tasks.

    Attributes:
        outputs: By the position in the group, what each returned.
        task: The one that failed; empty if none did.
        text: The error.
        trace: Its traceback.
    """

    outputs: dict[int, Any]
    task: str = ""
    text: str = ""
    trace: str = ""


Reply: TypeAlias = tuple[NodeOutcome, list[bytes]]
"""The result of a call, and the events that happened, as lines of JSON."""


class NodeActor:
    """One node. An actor executes one call at a time."""

    def __init__(self, nodes: Sequence[str], rank: int, store: Any, scope: str) -> None:
        """Creates the node.

        Args:
            nodes: All nodes of the session.
            rank: The index of this one.
            store: The actor that the nodes share.
            scope: Identifies this start of the nodes.
        """
        self._nodes = tuple(nodes)
        self._rank = rank
        self._store = store
        self._scope = scope
        self._workspace = Workspace(nodes[rank])
        self._cluster: Cluster | None = None
        self._parts: dict[int, NodePart] = {}
        self._events: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def run(self, group: str, calls: Sequence[NodeCall], epoch: int | None, grace_seconds: float) -> NodeAnswer:
        """Runs tasks at the same time."""
        workspace = self._workspace
        if epoch is not None:
            workspace.begin_epoch(epoch)
        if not calls:
            return NodeAnswer({})
        placed = {call.place: Placed(Task(call.function, name=call.name), workspace.node) for call in calls}
        try:
            results = run_tasks(group, list(placed.values()), {workspace.node: workspace}, grace_seconds)
        except TaskFailedError as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            trace = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
            return NodeAnswer({}, error.task, error.message + notes, trace)
        return NodeAnswer({place: results[one] for place, one in placed.items()})

    def open_part(
        self,
        number: int,
        kept: Sequence[str],
        storage: bytes,
        keep: RetentionPolicy,
        begin_anew: bool,
        timeout_seconds: float,
        threads: int,
    ) -> Reply:
        """Joins the other nodes, if that was not done yet, and creates this node's part of saving and restoring.

        Args:
            number: The number by which the other calls refer to it.
            kept: The nodes whose state is saved.
            storage: Where the checkpoints are: a pickled `Storage`.
            keep: Which to keep.
            begin_anew: True to start from the beginning even if there are checkpoints.
            timeout_seconds: The deadline of each wait.
            threads: The number of threads that write, and read.
        """

        def open_it() -> None:
            if self._cluster is None:
                self._cluster = self._join()
            sinks = (self._note,) if self._rank == 0 else ()
            options = NodeStoreOptions(cloudpickle.loads(storage), keep, begin_anew, timeout_seconds, threads, sinks)
            is_kept = self._workspace.node in kept
            self._parts[number] = NodePart(self._workspace, is_kept=is_kept, cluster=self._cluster, options=options)

        return self._try(open_it)

    def call_part(self, number: int, method: str, *arguments: Any) -> Reply:
        """Calls a method of this node's part; `close` is the last."""

        def call() -> NodeOutcome | None:
            part = self._parts.pop(number) if method == "close" else self._parts[number]
            outcome: NodeOutcome | None = getattr(part, method)(*arguments)
            return outcome

        return self._try(call)

    def _try(self, call: Callable[[], NodeOutcome | None]) -> Reply:
        try:
            outcome = call() or NodeOutcome()
        except Exception as error:  # noqa: BLE001  The state of a user's object may raise anything.
            outcome = failed(error)
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return outcome, events

    def _note(self, event: Event) -> None:
        self._events.put(encode_event(event))

    def _join(self) -> Cluster:
        if len(self._nodes) == 1:
            return AloneCluster()
        return JoinedCluster(
            lambda timeout_seconds: _StoreOf(self._store),
            self._rank,
            len(self._nodes),
            host="the session's store, an actor",
            prefix=self._scope,
            node=self._workspace.node,
        )
