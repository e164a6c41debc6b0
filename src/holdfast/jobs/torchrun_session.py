"""`TorchrunSession`: each worker of a job is a node, and all run the same program."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec

from holdfast.cluster import Cluster, open_cluster
from holdfast.cluster.discover import Choice
from holdfast.cluster.mailbox import Watch
from holdfast.cluster.peers import Peers, make_brief
from holdfast.cluster.polling import TASKS
from holdfast.deadlines import LIVENESS_SECONDS
from holdfast.errors import (
    AbsentError,
    ClosedError,
    ClusterError,
    HoldfastError,
    MismatchError,
    NoCheckpointError,
    PeerError,
    SaveFailedError,
    TaskFailedError,
    UsageError,
)
from holdfast.format.decoding import Decoder
from holdfast.format.encoding import Encoder
from holdfast.jobs.node_store import NodeOutcome, NodePart, NodeStoreOptions, WorkerNodeStore
from holdfast.jobs.session import GRACE_SECONDS, Placed, Session, run_tasks
from holdfast.jobs.workspace import Workspace
from holdfast.numbers import check_seconds
from holdfast.options import check_liveness
from holdfast.process.interrupt import Interrupter

_T = TypeVar("_T")

_MOST_BYTES: Final = 1 << 16
"""A longer output is not sent to other workers."""

_FOR_EVER_SECONDS: Final = 1e9
"""Epochs have no time limit. Waiting workers check whether the others are alive."""

_FAREWELL_SECONDS: Final = 5.0
"""How long the leader waits for the others at the end, because it may host the store."""

_ALIKE: Final = (TaskFailedError, SaveFailedError, NoCheckpointError, MismatchError)
"""Errors that end a run on all workers: all of them know the error, or see the same checkpoints."""


class PeerFailedError(HoldfastError):
    """Another worker's task failed while this one was working; the session raises the error."""


class _Failed(msgspec.Struct, frozen=True):
    """A worker's part of a group has failed."""

    text: str


class _Gathering:
    """The workers of a session: they meet after each group, and are watched meanwhile.

    Epochs have no time limit, so a meeting has no deadline; dead or missing workers are detected instead.
    """

    def __init__(self, cluster: Cluster, liveness_seconds: float) -> None:
        """Begins to give signs of life. Each worker creates as many of these, in the same order."""
        self._cluster = cluster
        self._peers = Peers(
            cluster, liveness_seconds=liveness_seconds, timeout_seconds=_FOR_EVER_SECONDS, name="job-session"
        )
        self._records = self._peers.open_namespace("groups")
        # Counts what all meet for.
        self._number = 0
        self._left = ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wraps what all workers do. An error in the block is one worker's own, which cannot meet the others any more.

        The others learn of it at once, and take part in nothing any more. An error that all have met is raised after
        the block.

        Raises:
            ClosedError: If there was such an error before.
        """
        self.check()
        self._number += 1
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def check(self) -> None:
        """Checks that the workers are still together.

        Raises:
            ClosedError: If they are not; the error says why.
        """
        if self._left:
            raise ClosedError(
                f"the session is unusable because the workers are no longer together: {self._left}",
                hint="Create a new TorchrunSession on all workers.",
            )

    def leave(self, error: BaseException) -> None:
        """Leaves the session, and reports the reason to the others; a second call does nothing."""
        if self._left:
            return
        self._left = f"{type(error).__name__}: {getattr(error, 'message', error)}"
        # Who leaves because of a third worker passes on why that one did.
        reason = error.__cause__ if isinstance(error.__cause__, PeerError) else error
        # Where it is the store that does not answer, the others notice that by themselves.
        if isinstance(reason, PeerError) or not isinstance(reason, ClusterError):
            self.report_end(reason)
        self._peers.leave()

    def report_end(self, error: BaseException) -> None:
        """Reports to the others why this worker is about to leave, before they find it gone."""
        self._peers.failures.explain(error)

    def report_failure(self, text: str) -> None:
        """Reports to the others at once that this worker's part has failed."""
        # Where the store does not answer, the others notice that by themselves.
        with suppress(HoldfastError):
            self._records.post(_Failed(make_brief(text)), "failed", self._number)

    def meet(self, what: str, record: Any, kind: type[_T], patience_seconds: float | None = None) -> list[_T]:
        """**Collective.** **Blocks.** Returns the records of all workers, by rank, once all have come.

        Args:
            what: The purpose: the same for all, if all make the same calls.
            record: This worker's record.
            kind: The type of the records.
            patience_seconds: How long to wait for live workers that do not come; None for ever.

        Raises:
            AbsentError: If a worker is lost or has left, or has not come in that time.
            ClusterError: If the store no longer responds, or workers have come for something else.
        """
        try:
            brought = msgspec.msgpack.encode((what, msgspec.json.encode(record)))
            answer = self._peers.gather_decide_broadcast(brought, msgspec.msgpack.encode, what, patience_seconds)
        except (AbsentError, PeerError) as error:
            raise self._name_lost(error) from error
        if self._peers.is_leader:
            self._records.delete(self._records.key("failed", self._number))
        records = [
            msgspec.msgpack.decode(one, type=tuple[str, bytes])
            for one in msgspec.msgpack.decode(answer, type=list[bytes])
        ]
        if any(other != what for other, _ in records):
            came = "; ".join(f"rank {rank} for {other}" for rank, (other, _) in enumerate(records))
            raise ClusterError(
                f"the workers made different calls at the same time: {came}",
                hint="All workers must make the same calls of a session, in the same order.",
            )
        return [msgspec.json.decode(own, type=kind) for _, own in records]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupts the main thread when another worker's part has failed, or a worker is gone.

        Only the main thread can be interrupted: in another one the failure is noticed at the meeting. The interrupt is
        like that of Ctrl-C, which a task may catch to clean up, but also comes if Ctrl-C is ignored.

        Raises:
            PeerFailedError: If another worker's part has failed.
            AbsentError: If a worker is gone.
        """
        if self._cluster.world_size == 1 or threading.current_thread() is not threading.main_thread():
            yield
            return
        found: list[HoldfastError] = []
        is_over = False

        def look() -> None:
            if not found and (trouble := self._find_trouble()) is not None:
                found.append(trouble)
                interrupter.interrupt()

        # Both the interrupt and the end of the work happen in the main thread.
        interrupter = Interrupter(lambda: None if is_over else KeyboardInterrupt())
        interrupter.open()
        watch = self._peers.mailbox.watch(Watch(look, TASKS))
        try:
            try:
                yield
            finally:
                is_over = True
        except KeyboardInterrupt:
            if not found:
                raise  # That was a person.
            raise found[0] from None
        finally:
            self._peers.mailbox.unwatch(watch)
            interrupter.close()

    def close(self) -> None:
        """**Blocks** for moments. Signs off. The leader may host the store, and so leaves last, if all went well."""
        self._peers.close(after_others_seconds=0.0 if self._left else _FAREWELL_SECONDS)

    def _find_trouble(self) -> HoldfastError | None:
        """Returns the reason to end this worker's work, if there is one; called in the mailbox's thread."""
        try:
            self._peers.failures.check_all()
            failed = self._records.read(_Failed, "failed", self._number)
            return None if failed is None else PeerFailedError(failed.text)
        except PeerError as error:
            return self._name_lost(error)
        except HoldfastError as error:
            return error

    def _name_lost(self, error: AbsentError | PeerError) -> AbsentError:
        """Returns the error for a worker that is missing, with the reason if that is known."""
        if isinstance(error, AbsentError):
            missed = self._peers.failures.find_missed(error.ranks)
            if missed is None:
                return error
            error = self._peers.failures.make_error(missed[1])
        node = self._cluster.node_of(error.rank)
        lost = AbsentError(error.message, ranks=(error.rank,), nodes=(node,), hint=error.hint)
        lost.__cause__ = error
        return lost


class _TorchrunNodeStore(WorkerNodeStore):
    """A store whose parts are in processes that make the same calls as this one."""

    def __init__(self, own: NodePart, nodes: Sequence[str], gathering: _Gathering) -> None:
        self._own = own
        self._nodes = nodes
        self._gathering = gathering

    def call(self, method: str, what: str, *arguments: Any) -> Mapping[str, NodeOutcome]:
        """**Collective.** **Blocks.** Calls a method of this worker's part, and learns how it ended on the others."""
        if method == "close":
            self._own.close()
            return {}
        with self._gathering.together():
            outcome: NodeOutcome | None = getattr(self._own, method)(*arguments)
            self.handle = self._own.handle
            if outcome is None:
                return {}  # The managers of all workers have agreed on it among themselves.
            outcomes = self._gathering.meet(what, outcome, NodeOutcome)
        return dict(zip(self._nodes, outcomes, strict=True))


class RemoteOutput:
    """Represents the output of a task on another node, if that is not a plain value, or a long one.

    Attributes:
        node: The node that has it.
    """

    def __init__(self, node: str, truth: bool) -> None:
        self.node = node
        self._truth = truth

    def __bool__(self) -> bool:
        """True if the output is true there."""
        return self._truth

    def __repr__(self) -> str:
        return f"RemoteOutput(on {self.node})"


class _Output(msgspec.Struct, omit_defaults=True):
    """The output of one task on a worker: the value, if it is plain and short, and whether it is true."""

    truth: bool
    is_plain: bool = False
    value: Any = None


class _Part(msgspec.Struct, omit_defaults=True):
    """The result of a worker's part of a group."""

    outputs: dict[int, _Output] = {}
    task: str = ""
    text: str = ""


class TorchrunSession(Session):
    """Makes every worker that torchrun started a node. All run the same program, with the same job and session.

    Each worker runs the tasks of its own node, and meets the others when its part of a group is done. If a task fails,
    all workers get the same `TaskFailedError` within seconds; a worker that dies is named. The state of all nodes is
    one commit. A task's output can be fetched on all workers if it is a plain value; of others, only whether it is
    true.

    Example:
        ```python
        # torchrun --nproc-per-node 3 job.py
        with holdfast.TorchrunSession() as session:
            holdfast.JobRunner(make_job(), holdfast.MultiNodeCheckpointManager("runs/job")).train(session)
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
        """**Collective.** **Blocks.** Waits until all workers have created the session.

        Args:
            nodes: The names of the nodes in order of rank; None for `worker_0` and so on.
            cluster: The workers; by default found from torchrun's environment or torch's process group.
            grace_seconds: How long the others may continue when a task has failed and they cannot be interrupted.
            liveness_seconds: A worker that gives no sign of life for this long is taken for dead.

        Raises:
            UsageError: If the number of names differs from that of workers, or an argument is wrong.
            AbsentError: If workers are missing; the error names them.
            ClusterError: If the store that they share does not respond.
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
                f"got {len(names)} names for {world_size} workers", hint="Name every worker, in order of rank, or none."
            )
        self.is_master = self._cluster.rank == 0
        self._grace_seconds = grace_seconds
        self._liveness_seconds = liveness_seconds
        self._gathering = _Gathering(self._cluster, liveness_seconds)
        self._workspace = Workspace(names[self._cluster.rank])

    @property
    def node(self) -> str:
        """This worker's node."""
        return self._workspace.node

    def workspace(self, node: str | None = None) -> Workspace:
        """Returns this worker's own workspace; that of another node is in another process.

        Raises:
            UsageError: If another node was requested.
        """
        super().check_open()
        if node not in (None, self.node):
            raise UsageError(f"{node} is another worker's node; this worker's is {self.node}")
        return self._workspace

    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Collective.** **Blocks.** Runs this node's tasks, and meets the others; see `Session`."""
        if epoch is not None:
            self._workspace.begin_epoch(epoch)
        with self._gathering.together():
            parts, results, failure = self._run_own(group, placed)
        self._raise_failure(group, parts, failure)
        return {one: self._output(place, one, parts, results) for place, one in enumerate(placed)}

    def share(self, what: str, value: Any) -> list[Any]:
        """**Collective.** **Blocks.** Returns what each worker passed as `value`, by rank; plain JSON."""
        with self._gathering.together():
            return self._gathering.meet(what, value, object)

    def note_end(self, error: BaseException) -> None:
        """Called when an error has ended a run: unless all workers met it, they are no longer together."""
        if not isinstance(error, _ALIKE):
            self._gathering.leave(error)

    def note_exit(self, leaving: SystemExit) -> None:
        """Called when the job was asked to stop, before the process ends."""
        self._gathering.report_end(leaving)

    def check_open(self) -> None:
        """Checks that the session can be used.

        Raises:
            ClosedError: If it is closed, or one of the workers had an error of its own.
        """
        super().check_open()
        self._gathering.check()

    def _make_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> WorkerNodeStore:
        """**Collective.** Creates what saves and restores the workspaces: each worker its own, in one commit."""
        with self._gathering.together():
            part = NodePart(
                self._workspace,
                is_kept=self.node in nodes,
                cluster=self._cluster,
                options=options,
                liveness_seconds=self._liveness_seconds,
            )
        return _TorchrunNodeStore(part, self.nodes, self._gathering)

    def close(self) -> None:
        """**Blocks** for moments. Ends the session; its workspaces are gone. A second call does nothing."""
        if self._closed:
            return
        try:
            super().close()
        finally:
            self._gathering.close()
            if self._owns_cluster:
                self._cluster.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # Workers that still wait for this one learn the reason.
            self._gathering.leave(error)
        super().__exit__(kind, error, trace)

    def _run_own(
        self, group: str, placed: Sequence[Placed]
    ) -> tuple[list[_Part], dict[Placed, Any], TaskFailedError | None]:
        """Runs this node's tasks and meets the others: returns the results of each part, and of its own."""
        own = [one for one in placed if one.node == self.node]
        results: dict[Placed, Any] = {}
        failure: TaskFailedError | None = None
        is_interrupted = False
        try:
            with self._gathering.watching():
                results = run_tasks(group, own, {self.node: self._workspace}, self._grace_seconds) if own else {}
        except TaskFailedError as error:
            failure = error
            self._gathering.report_failure(error.message)
        except PeerFailedError:
            is_interrupted = True
        part = _Part(task=failure.task, text=failure.message) if failure else _Part(_encode(placed, results))
        patience_seconds = self._grace_seconds if failure or is_interrupted else None
        try:
            parts = self._gathering.meet(f"the group {group}", part, _Part, patience_seconds)
        except HoldfastError as error:
            if failure is None:
                raise
            failure.add_note(f"{type(error).__name__} while reporting this to the other workers: {error.message}")
            raise failure from failure.__cause__
        return parts, results, failure

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
