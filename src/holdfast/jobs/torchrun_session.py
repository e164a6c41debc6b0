"""`TorchrunSession`: each worker of a job is a node, and all run the same program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

import msgspec

from holdfast.cluster import Cluster, open_cluster
from holdfast.cluster.opening import Choice
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import (
    HoldfastError,
    MismatchError,
    NoCheckpointError,
    SaveFailedError,
    TaskFailedError,
    UsageError,
)
from holdfast.format.decoding import Decoder
from holdfast.format.encoding import Encoder
from holdfast.jobs.keeper import Keeper, KeeperOptions
from holdfast.jobs.meetings import Meetings, PeerFailedError
from holdfast.jobs.node_keeper import NodeKeeper
from holdfast.jobs.session import Placed, Session, telling_behind
from holdfast.jobs.threads import GRACE_SECONDS, run_here
from holdfast.jobs.worker_keeper import WorkerKeeper
from holdfast.jobs.workspace import Workspace
from holdfast.numbers import check_seconds
from holdfast.save.arguments import check_liveness

_MOST_BYTES: Final = 1 << 16
"""An output that is longer stays where it is."""

_ALIKE: Final = (TaskFailedError, SaveFailedError, NoCheckpointError, MismatchError)
"""What ends a run on all workers: they have told each other of it, or see the same checkpoints."""


class RemoteOutput:
    """Stands for what a task returned on another node, where that is no plain value, or a long one.

    Attributes:
        node: Where it is.
    """

    def __init__(self, node: str, truth: bool) -> None:
        self.node = node
        self._truth = truth

    def __bool__(self) -> bool:
        """Whether it is true there."""
        return self._truth

    def __repr__(self) -> str:
        return f"RemoteOutput(on {self.node})"


class _Output(msgspec.Struct, omit_defaults=True):
    """What one task returned on a worker: the value, if it is plain and short, and whether it is true."""

    truth: bool
    is_plain: bool = False
    value: Any = None


class _Part(msgspec.Struct, omit_defaults=True):
    """What became of a worker's part of a group.

    Attributes:
        outputs: For each task of the group that ran on it, by its place in the group.
        task: The task that failed; empty if none did.
        text: How.
    """

    outputs: dict[int, _Output] = {}
    task: str = ""
    text: str = ""


class TorchrunSession(Session):
    """Every worker that torchrun has started is a node. All run the same program, which makes the same job and session.

    Each runs the tasks that are placed on its own node, and meets the others when its part of a group is done. When a
    task fails, all workers get the same `TaskFailedError`, within seconds; a worker that dies is named. The state of
    all nodes is one commit. What a task returns can be fetched on all workers if it is a plain value; of others only
    whether they are true.

    Example:
        ```python
        # torchrun --nproc-per-node 3 job.py
        with hf.TorchrunSession() as session:
            hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager("runs/job")).train(session)
        ```
    """

    def __init__(
        self,
        nodes: Sequence[str] | None = None,
        *,
        cluster: Choice = "auto",
        grace_seconds: float = GRACE_SECONDS,
        liveness_seconds: float = LIVENESS_SECONDS,
    ) -> None:
        """**Collective.** **Blocks.** Waits until all workers have come this far.

        Args:
            nodes: The names of the nodes in order of rank; None for `worker_0` and so on.
            cluster: The workers; as a rule found out by itself, from torchrun's environment or torch's process group.
            grace_seconds: How long the others may go on when a task has failed and they cannot be interrupted.
            liveness_seconds: After how long without a sign of life a worker is taken for dead.

        Raises:
            UsageError: If there are not as many names as workers, or an argument is wrong.
            AbsentError: If workers are missing; it names them.
            ClusterError: If the store through which they agree does not answer.
        """
        check_liveness(liveness_seconds)
        check_seconds("grace_seconds", grace_seconds, least=0)
        self._cluster: Cluster = open_cluster(cluster)
        self._owns_cluster = self._cluster is not cluster
        world_size = self._cluster.world_size
        names = tuple(f"worker_{rank}" for rank in range(world_size)) if nodes is None else nodes
        super().__init__(names)
        if len(names) != world_size:
            raise UsageError(
                f"{len(names)} names for {world_size} workers", hint="Name each worker, in order of rank, or none."
            )
        self.is_master = self._cluster.rank == 0
        self._grace_seconds = grace_seconds
        self._liveness_seconds = liveness_seconds
        self._meetings = Meetings(self._cluster, liveness_seconds)
        self._workspace = Workspace(names[self._cluster.rank])

    @property
    def node(self) -> str:
        """This worker's node."""
        return self._workspace.node

    def workspace(self, node: str | None = None) -> Workspace:
        """This worker's own workspace; that of another node is in another process.

        Raises:
            UsageError: If another one was asked for.
        """
        super().check_open()
        if node not in (None, self.node):
            raise UsageError(f"{node} is another worker's node; this one is {self.node}")
        return self._workspace

    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Collective.** **Blocks.** Runs this node's tasks, and meets the others; see `Session`."""
        if epoch is not None:
            self._workspace.begin_epoch(epoch)
        with self._meetings.together():
            parts, results, failure = self._run_own(group, placed)
        self._raise_failure(group, parts, failure)
        return {one: self._output(place, one, parts, results) for place, one in enumerate(placed)}

    def share(self, what: str, value: Any) -> list[Any]:
        """**Collective.** **Blocks.** What each worker gives for `value`, by rank; plain JSON."""
        with self._meetings.together():
            self._meetings.begin()
            return [msgspec.json.decode(one) for one in self._meetings.meet(what, msgspec.json.encode(value))]

    def note_end(self, error: BaseException) -> None:
        """Called when an error has ended a run: unless all workers have met with it, they are no longer together."""
        if not isinstance(error, _ALIKE):
            self._meetings.leave(error)

    def check_open(self) -> None:
        """Makes sure that the session can be used.

        Raises:
            ClosedError: If it is closed, or one of the workers has met with an error of its own.
        """
        super().check_open()
        self._meetings.check()

    def make_keeper(self, nodes: Sequence[str], options: KeeperOptions) -> Keeper:
        """**Collective.** What saves and restores the workspaces: each worker its own, in one commit."""
        with self._meetings.together():
            keeper = NodeKeeper(
                self._workspace,
                is_kept=self.node in nodes,
                cluster=self._cluster,
                options=options,
                liveness_seconds=self._liveness_seconds,
            )
        return WorkerKeeper(keeper, self.node, self.nodes, self._meetings)

    def close(self) -> None:
        """**Blocks** for moments. Ends the session; its workspaces are gone. Harmless twice."""
        self._end("")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with telling_behind(error):
            self._end("" if error is None else f"{type(error).__name__}: {getattr(error, 'message', error)}")

    def _end(self, trouble: str) -> None:
        if self._closed:
            return
        try:
            super().close()
        finally:
            self._meetings.close(trouble)
            if self._owns_cluster:
                self._cluster.close()

    def _run_own(
        self, group: str, placed: Sequence[Placed]
    ) -> tuple[list[_Part], dict[Placed, Any], TaskFailedError | None]:
        """Runs this node's tasks and meets the others: gives what became of each part, and of the own one."""
        self._meetings.begin()
        own = [one for one in placed if one.node == self.node]
        results: dict[Placed, Any] = {}
        failure: TaskFailedError | None = None
        is_interrupted = False
        try:
            with self._meetings.watching():
                results = run_here(group, own, {self.node: self._workspace}, self._grace_seconds) if own else {}
        except TaskFailedError as error:
            failure = error
            self._meetings.cry(error.message)
        except PeerFailedError:
            is_interrupted = True
        part = _Part(task=failure.task, text=failure.message) if failure else _Part(_encode(placed, results))
        patience_seconds = self._grace_seconds if failure or is_interrupted else None
        try:
            records = self._meetings.meet(f"the group {group}", msgspec.json.encode(part), patience_seconds)
        except HoldfastError as error:
            if failure is None:
                raise
            failure.add_note(f"{type(error).__name__} when this was told to the others: {error.message}")
            raise failure from failure.__cause__
        return [msgspec.json.decode(record, type=_Part) for record in records], results, failure

    def _raise_failure(self, group: str, parts: Sequence[_Part], own: TaskFailedError | None) -> None:
        failed = [(rank, part) for rank, part in enumerate(parts) if part.task]
        if not failed:
            return
        rank, part = failed[0]
        if own is not None and rank == self._cluster.rank:
            error, cause = own, own.__cause__
        else:
            error, cause = TaskFailedError(part.text, group=group, task=part.task, node=self.nodes[rank]), own
        for other, also in failed[1:]:
            error.add_note(f"{also.task} on {self.nodes[other]} failed too: {also.text}")
        raise error from cause

    def _output(self, place: int, placed: Placed, parts: Sequence[_Part], results: Mapping[Placed, Any]) -> Any:
        if placed in results:
            return results[placed]
        output = parts[self.nodes.index(placed.node)].outputs.get(place, _Output(False))
        return Decoder().decode(output.value) if output.is_plain else RemoteOutput(placed.node, output.truth)


def _encode(placed: Sequence[Placed], results: Mapping[Placed, Any]) -> dict[int, _Output]:
    outputs = {}
    for place, one in enumerate(placed):
        if one in results:
            truth = False
            # An array of several elements, say, is neither true nor false.
            with suppress(Exception):
                truth = bool(results[one])
            outputs[place] = _Output(truth)
            with suppress(HoldfastError):
                value = Encoder().encode(results[one], one.task.name)
                if len(msgspec.json.encode(value)) <= _MOST_BYTES:
                    outputs[place] = _Output(truth, True, value)
    return outputs
