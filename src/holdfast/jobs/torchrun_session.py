"""`TorchrunSession`: each worker of a job is a node, and all run the same program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Final

import msgspec

from holdfast.cluster import Cluster, open_cluster
from holdfast.cluster.barrier import make_absent_error
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
    SaveFailedError,
    TaskFailedError,
    UsageError,
)
from holdfast.format.decoding import Decoder
from holdfast.format.encoding import Encoder
from holdfast.jobs.node_store import NodeStoreOptions
from holdfast.jobs.session import GRACE_SECONDS, Placed, Session, noting_on, run_tasks
from holdfast.jobs.worker_store import NodeOutcome, NodePart, WorkerNodeStore
from holdfast.jobs.workspace import Workspace
from holdfast.numbers import check_seconds
from holdfast.save.arguments import check_liveness

_MOST_BYTES: Final = 1 << 16
"""An output that is longer stays where it is."""

_FOR_EVER_SECONDS: Final = 1e9
"""An epoch lasts as long as it does. Those who wait look whether the others live."""

_FAREWELL_SECONDS: Final = 5.0
"""How long the leader waits for the others at the end, as it may host the store."""

_INTERRUPT: Final = signal.SIGURG
"""No other library uses it, a process that does not know it ignores it, and no shell has it ignored from the start."""

_GONE: Final = "died or left while the job was running"

_ALIKE: Final = (TaskFailedError, SaveFailedError, NoCheckpointError, MismatchError)
"""What ends a run on all workers: they have all learned of it, or see the same checkpoints."""


class PeerFailedError(HoldfastError):
    """Another worker's task has failed while this one was at work; the session tells of it."""


class _Trouble(msgspec.Struct, frozen=True):
    """Why the workers are no longer together: the first that was met with, for all alike."""

    ranks: tuple[int, ...]
    what: str


class _Failed(msgspec.Struct, frozen=True):
    """A worker's part of a group has failed."""

    text: str


class _Gathering:
    """The workers of a session: met after each group, and watched meanwhile.

    Epochs last as long as they do, so a meeting has no deadline; who is dead or has left is noticed instead.
    """

    def __init__(self, cluster: Cluster, liveness_seconds: float) -> None:
        """Begins to give signs of life. Each worker makes as many of these, in the same order."""
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
        """Around what all workers do. An error in there is one worker's own, after which it cannot meet the others.

        They hear of it at once, and none of them takes part in anything any more. What all have met with alike is
        raised after the block.

        Raises:
            ClosedError: If there was such an error before.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def check(self) -> None:
        """Makes sure that the workers are still together.

        Raises:
            ClosedError: If they are not; it says why.
        """
        if self._left:
            raise ClosedError(
                f"the session is unusable because the workers are no longer together: {self._left}",
                hint="Create a new TorchrunSession on all workers.",
            )

    def leave(self, error: BaseException) -> None:
        """Takes part in nothing any more, and tells the others why; harmless twice."""
        if self._left:
            return
        self._left = _describe(error)
        # Where it is the store that does not answer, the others notice that by themselves.
        if isinstance(error, AbsentError):
            self._report(error.ranks, self._describe_loss(error.ranks))
        elif not isinstance(error, ClusterError):
            self.report_end(error)
        self._peers.leave()

    def report_end(self, error: BaseException) -> None:
        """Tells the others why this worker is about to leave: they find it gone soon."""
        is_exit = isinstance(error, SystemExit)
        why = f" with exit code {error}" if is_exit else f": {_describe(error)}"
        self._report((self._cluster.rank,), f"left the job{why}")

    def begin(self) -> None:
        """Called by all workers at the same place: what they meet for from now on is something new."""
        self._number += 1

    def report_failure(self, text: str) -> None:
        """Tells the others at once that this worker's part has failed."""
        # Where the store does not answer, the others notice that by themselves.
        with suppress(HoldfastError):
            self._records.post(_Failed(make_brief(text)), "failed", self._number)

    def meet(self, what: str, record: bytes, patience_seconds: float | None = None) -> list[bytes]:
        """**Collective.** **Blocks.** The records of all workers, by rank, once all have come.

        Args:
            what: What they meet for: the same for all, if all make the same calls.
            record: What this worker brings.
            patience_seconds: How long to wait for those that live and do not come; None for ever.

        Raises:
            AbsentError: If a worker is lost or has left, or has not come in that time.
            ClusterError: If the store does not answer any more, or workers have come for something else.
        """
        try:
            brought = msgspec.msgpack.encode((what, record))
            answer = self._peers.gather_decide_broadcast(brought, msgspec.msgpack.encode, what, patience_seconds)
        except AbsentError as error:
            raise self._explain(error) from error
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
        return [own for _, own in records]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Interrupts what runs in the main thread when another worker's part has failed, or a worker is gone.

        Elsewhere than in the main thread nothing can be interrupted: then that is noticed at the meeting. The interrupt
        is like that of Ctrl-C, which a task may catch to tidy up, but comes also where Ctrl-C is ignored.

        Raises:
            PeerFailedError: If another worker's part has failed.
            AbsentError: If a worker is gone.
        """
        in_main = threading.current_thread() is threading.main_thread()
        if self._cluster.world_size == 1 or not in_main:
            yield
            return
        interrupter = _Interrupter()
        before = signal.signal(_INTERRUPT, interrupter.interrupt)
        watch = self._peers.mailbox.watch(Watch(lambda: interrupter.note(self._find_trouble()), TASKS))
        try:
            try:
                yield
            finally:
                self._peers.mailbox.unwatch(watch)
                interrupter.disarm()
        except KeyboardInterrupt:
            if interrupter.trouble is None:
                raise  # That was a person.
            raise interrupter.trouble from None
        finally:
            signal.signal(_INTERRUPT, signal.SIG_DFL if before is None else before)

    def close(self, trouble: str = "") -> None:
        """**Blocks** for moments. Says goodbye. The leader may host the store, and so leaves last, if all went well.

        Workers that still wait for this one learn of the trouble.
        """
        if trouble:
            self._report((self._cluster.rank,), f"left the job: {trouble}")
        self._peers.close(after_others_seconds=0.0 if trouble or self._left else _FAREWELL_SECONDS)

    def _find_trouble(self) -> HoldfastError | None:
        """What ends the work of this worker, if anything does; in the mailbox's thread."""
        try:
            self._peers.failures.check()
            failed = self._records.read(_Failed, "failed", self._number)
            return None if failed is None else PeerFailedError(failed.text)
        except AbsentError as error:
            return self._explain(error)
        except HoldfastError as error:
            return error

    def _explain(self, error: AbsentError) -> AbsentError:
        """The same in words that say why, where that is known: one who leaves has others leave as well."""
        trouble = self._report(error.ranks, self._describe_loss(error.ranks))
        return make_absent_error(self._cluster, trouble.ranks, trouble.what)

    def _describe_loss(self, ranks: tuple[int, ...]) -> str:
        """What is known of workers that are not there, as the end of a sentence."""
        failures = self._peers.failures
        if len(ranks) == 1 and ranks[0] in failures.dead:
            return failures.describe_loss(ranks[0]).text
        return _GONE

    def _report(self, ranks: tuple[int, ...], what: str) -> _Trouble:
        """Notes the trouble, unless there is some already; gives what stands."""
        trouble = _Trouble(ranks, make_brief(what))
        with suppress(HoldfastError):
            return self._records.post_once(trouble, "trouble")
        return trouble


class _Interrupter:
    """Interrupts the main thread once if there is trouble while it is armed."""

    def __init__(self) -> None:
        # Guards that no interrupt comes once the work has ended.
        self._lock = threading.Lock()
        self._armed = True
        self.trouble: HoldfastError | None = None

    def note(self, trouble: HoldfastError | None) -> None:
        """Called in another thread."""
        with self._lock:
            if trouble is not None and self.trouble is None and self._armed:
                self.trouble = trouble
                # A real signal: only that ends a sleep, or a wait for the network.
                signal.pthread_kill(threading.main_thread().ident or 0, _INTERRUPT)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Called in the main thread, by the signal."""
        if self._armed and self.trouble is not None:
            raise KeyboardInterrupt

    def disarm(self) -> None:
        """From now on nothing is interrupted."""
        with self._lock:
            self._armed = False


class _TorchrunNodeStore(WorkerNodeStore):
    """Each part is in a process that makes the same calls as this one."""

    def __init__(self, own: NodePart, nodes: Sequence[str], gathering: _Gathering) -> None:
        self._own = own
        self._nodes = nodes
        self._gathering = gathering

    def call(self, method: str, what: str, *arguments: Any) -> Mapping[str, NodeOutcome]:
        """**Collective.** **Blocks.** Calls a method of this worker's part, and hears how it ended on the others."""
        if method == "close":
            self._own.close()
            return {}
        with self._gathering.together():
            outcome: NodeOutcome | None = getattr(self._own, method)(*arguments)
            self.handle = self._own.handle
            if outcome is None:
                return {}  # The managers of all workers have agreed on it among themselves.
            self._gathering.begin()
            records = self._gathering.meet(what, msgspec.json.encode(outcome))
            outcomes = [msgspec.json.decode(record, type=NodeOutcome) for record in records]
        return dict(zip(self._nodes, outcomes, strict=True))


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
    """What became of a worker's part of a group."""

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
        """This worker's own workspace; that of another node is in another process.

        Raises:
            UsageError: If another one was asked for.
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
        """**Collective.** **Blocks.** What each worker gives for `value`, by rank; plain JSON."""
        with self._gathering.together():
            self._gathering.begin()
            return [msgspec.json.decode(one) for one in self._gathering.meet(what, msgspec.json.encode(value))]

    def note_end(self, error: BaseException) -> None:
        """Called when an error has ended a run: unless all workers have met with it, they are no longer together."""
        if not isinstance(error, _ALIKE):
            self._gathering.leave(error)

    def note_exit(self, leaving: SystemExit) -> None:
        """Called when the job was asked to leave, before the process ends."""
        self._gathering.report_end(leaving)

    def check_open(self) -> None:
        """Makes sure that the session can be used.

        Raises:
            ClosedError: If it is closed, or one of the workers has met with an error of its own.
        """
        super().check_open()
        self._gathering.check()

    def _make_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> WorkerNodeStore:
        """**Collective.** What saves and restores the workspaces: each worker its own, in one commit."""
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
        """**Blocks** for moments. Ends the session; its workspaces are gone. Harmless twice."""
        self._end("")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with noting_on(error):
            self._end("" if error is None else _describe(error))

    def _end(self, trouble: str) -> None:
        if self._closed:
            return
        try:
            super().close()
        finally:
            self._gathering.close(trouble)
            if self._owns_cluster:
                self._cluster.close()

    def _run_own(
        self, group: str, placed: Sequence[Placed]
    ) -> tuple[list[_Part], dict[Placed, Any], TaskFailedError | None]:
        """Runs this node's tasks and meets the others: gives what became of each part, and of the own one."""
        self._gathering.begin()
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
            records = self._gathering.meet(f"the group {group}", msgspec.json.encode(part), patience_seconds)
        except HoldfastError as error:
            if failure is None:
                raise
            failure.add_note(f"{type(error).__name__} while reporting this to the other workers: {error.message}")
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


def _describe(error: BaseException) -> str:
    """**Pure.** The type of an error, and what it says."""
    return f"{type(error).__name__}: {getattr(error, 'message', error)}"
