"""`RaySession`: nodes are Ray actors, and this process drives them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from holdfast.errors import HoldfastError, NodeLostError, TaskFailedError, UsageError
from holdfast.events import Fanout
from holdfast.events.sinks import LoggingSink, decode_event
from holdfast.integrations.ray.node import NodeActor, NodeAnswer, NodeCall, StoreActor
from holdfast.jobs.node_store import NodeOutcome, NodeStoreOptions, WorkerNodeStore, check_outcomes
from holdfast.jobs.session import GRACE_SECONDS, Placed, Session
from holdfast.numbers import check_seconds, check_whole

_LOOK_SECONDS: Final = 1.0
_STORE_SECONDS: Final = 10.0

_numbers: Final = itertools.count()


class RaySession(Session):
    """Runs every node as an actor, in its own process, wherever Ray has room for it. This process is the master.

    Functions and objects of tasks are sent to the nodes by Ray, so they must not hold anything that cannot be sent;
    outputs are sent back. The state of all nodes is one commit, and each node writes its own part: all of them must see
    the directory of the checkpoints.

    If a node dies, all nodes are replaced, and the job resumes from the last epoch that all nodes have.

    Attributes:
        start: How often the nodes have been started.

    Example:
        ```python
        with holdfast.RaySession(["trainer_0", "trainer_1"], actor_options={"num_gpus": 1}) as session:
            holdfast.JobRunner(job, holdfast.MultiNodeCheckpointManager("/shared/runs/job")).train(session)
        ```
    """

    def __init__(
        self,
        nodes: str | Sequence[str],
        *,
        actor_options: Mapping[str, Any] | Mapping[str, Mapping[str, Any]] | None = None,
        address: str | None = None,
        replacements_allowed: int = 3,
        grace_seconds: float = GRACE_SECONDS,
        start_seconds: float = 300.0,
    ) -> None:
        """**Blocks.** Starts the actors, and Ray itself if this process has not joined it yet.

        Args:
            nodes: The names of the nodes.
            actor_options: Ray's options for each actor (`num_cpus`, `num_gpus`, `resources`), or such options by node.
            address: The Ray cluster to join, if this process has joined none; None for one on this machine, or the one
                that the environment names.
            replacements_allowed: How often the nodes may be replaced, over the life of the session.
            grace_seconds: How long the other tasks of a group may continue after one has failed.
            start_seconds: How long Ray may take to place all nodes.

        Raises:
            UsageError: If an argument is wrong.
            NodeLostError: If nodes could not be started in that time.
        """
        super().__init__(() if nodes is None else nodes)
        names = self.nodes
        if not isinstance(actor_options, Mapping | None):
            raise UsageError(
                f"actor_options must be a mapping, got {actor_options!r}", hint='For example, {"num_cpus": 2}.'
            )
        check_whole("replacements_allowed", replacements_allowed)
        check_seconds("grace_seconds", grace_seconds, least=0)
        check_seconds("start_seconds", start_seconds)
        options = dict(actor_options or {})
        by_node = bool(options) and set(options) <= set(names)
        self._options = {node: dict(options.get(node, {}) if by_node else options) for node in names}
        self._replacements_left = replacements_allowed
        self._grace_seconds = grace_seconds
        self._start_seconds = start_seconds
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(address=address, include_dashboard=False, log_to_driver=True)
        self._actors: dict[str, Any] = {}
        self._store: Any = None
        self.start = 0
        try:
            self._start()
        except BaseException:
            self._shut_down()
            raise

    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Blocks.** Runs tasks on their nodes; see `Session`.

        Raises:
            TaskFailedError: If a task raised an error.
            NodeLostError: If a node is gone.
            UsageError: If a task cannot be sent to its node, or its result cannot be sent back.
        """
        calls: dict[str, list[NodeCall]] = {node: [] for node in self.nodes}
        for place, one in enumerate(placed):
            calls[one.node].append(NodeCall(place, one.task.name, one.task.function))
        try:
            sent = {node: ray.put(calls[node]) for node in self.nodes}
        except TypeError as error:
            raise UsageError(
                f"a task of the group {group} cannot be sent to its node: {str(error).strip().splitlines()[0]}",
                hint="The functions and objects of a task must not hold locks, open files or devices.",
            ) from error
        # Those without tasks hear of the epoch too.
        refs = {
            node: actor.run.remote(group, sent[node], epoch, self._grace_seconds)
            for node, actor in self._actors.items()
        }
        answers: dict[str, Any] = {}
        try:
            self._collect(refs, answers)
        finally:
            # Who is still at work when the others have failed, or at Ctrl-C, would answer to nothing else.
            self._end([node for node in self.nodes if node not in answers])
        self._raise_failure(group, answers)
        return {one: answers[one.node].outputs[place] for place, one in enumerate(placed)}

    def _make_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> WorkerNodeStore:
        """Creates what saves and restores the workspaces: each node its own, in one commit."""
        return _RayNodeStore(self, nodes, options)

    def try_replace(self, lost: NodeLostError) -> bool:
        """**Blocks.** Starts all nodes again with empty workspaces, unless the allowed replacements are used up."""
        if self._replacements_left <= 0:
            return False
        self._replacements_left -= 1
        self._stop()
        self._start()
        return True

    def call_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """**Blocks.** Calls a method of the nodes, all at the same time, and returns their results.

        Raises:
            NodeLostError: If a node is gone.
        """
        refs = {node: getattr(self._actors[node], method).remote(*arguments) for node in self.nodes}
        answers: dict[str, Any] = {}
        self._collect(refs, answers)
        return answers

    def check_store(self) -> None:
        """**Blocks** for moments. Checks that the actor that the nodes share is alive.

        Raises:
            NodeLostError: If it is gone; then the nodes are of no use either.
        """
        try:
            ray.get(self._store.try_get.remote(""), timeout=_STORE_SECONDS)
        except RayActorError as error:
            raise NodeLostError(
                "the actor that coordinates the nodes is gone: its process has ended",
                nodes=self.nodes,
                hint="Ray's log has the cause, such as lack of memory or a lost machine.",
            ) from error
        except GetTimeoutError:
            return  # One that is slow lives.

    def close(self) -> None:
        """**Blocks.** Ends the nodes, and Ray if this session started it; a second call does nothing."""
        if self._closed:
            return
        try:
            super().close()
        finally:
            self._shut_down()

    def _start(self) -> None:
        self.start += 1
        # Ray must not recreate a node by itself: it would have lost its workspace.
        actor_class = ray.remote(NodeActor)
        defaults = {"max_restarts": 0, "max_task_retries": 0}
        # One for each start: nodes that are gone have left nothing in it.
        self._store = ray.remote(StoreActor).options(num_cpus=0, max_restarts=0).remote()
        scope = os.urandom(8).hex()
        self._actors = {
            node: actor_class.options(**{**self._options[node], **defaults}).remote(
                self.nodes, rank, self._store, scope
            )
            for rank, node in enumerate(self.nodes)
        }
        refs = {node: actor.__ray_ready__.remote() for node, actor in self._actors.items()}
        _, waiting = ray.wait(list(refs.values()), num_returns=len(refs), timeout=self._start_seconds)
        late = tuple(node for node, ref in refs.items() if ref in waiting)
        if late:
            self._stop()
            raise NodeLostError(
                f"Ray did not place {', '.join(late)} within {self._start_seconds:g} s",
                nodes=late,
                hint=("Ask for fewer resources in actor_options, or enlarge the Ray cluster; see `ray status`."),
            )

    def _stop(self) -> None:
        self._end(self._actors)
        if self._store is not None:
            with suppress(RayError):
                ray.kill(self._store)
        self._actors, self._store = {}, None

    def _shut_down(self) -> None:
        self._stop()
        if self._owns_ray:
            ray.shutdown()

    def _end(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            with suppress(RayError):
                ray.kill(self._actors[node])

    def _collect(self, refs: Mapping[str, Any], answers: dict[str, Any]) -> None:
        """Adds the results of each node. After one has failed, the others have some time to end."""
        nodes = {ref: node for node, ref in refs.items()}
        lost: list[str] = []
        unsent: list[tuple[str, RayTaskError]] = []
        waiting = list(nodes)
        deadline: float | None = None
        while waiting and (deadline is None or time.monotonic() < deadline):
            done, waiting = ray.wait(waiting, num_returns=1, timeout=_LOOK_SECONDS)
            for ref in done:
                node = nodes[ref]
                try:
                    answers[node] = ray.get(ref)
                except RayActorError:
                    lost.append(node)
                except RayTaskError as failure:
                    answers[node] = None
                    unsent.append((node, failure))
                if lost or unsent or (isinstance(answers.get(node), NodeAnswer) and answers[node].task):
                    deadline = deadline or time.monotonic() + (0.0 if lost else self._grace_seconds)
        if lost:
            raise NodeLostError(
                f"{', '.join(lost)} {'is' if len(lost) == 1 else 'are'} gone: the process has ended",
                nodes=tuple(lost),
                hint="Ray's log has the cause, such as lack of memory or a lost machine.",
            )
        for node, error in unsent:
            text = str(error.cause).strip().splitlines()
            raise UsageError(
                f"{node} cannot send a task's result: {text[0] if text else repr(error.cause)}",
                hint="Task results are sent to this process: return plain values or arrays.",
            ) from error

    def _raise_failure(self, group: str, answers: Mapping[str, NodeAnswer]) -> None:
        failed = {node: answer for node, answer in answers.items() if answer.task}
        if not failed:
            return
        (node, answer), *others = failed.items()
        error = TaskFailedError(answer.text, group=group, task=answer.task, node=node)
        error.add_note(answer.trace.rstrip())
        for other, also in others:
            error.add_note(f"{also.task} on {other} failed too: {also.text}")
        for silent in self.nodes:
            if silent not in answers:
                error.add_note(f"{silent} was still running after {self._grace_seconds:g} s and is terminated")
        raise error


class _RayNodeStore(WorkerNodeStore):
    """The parts are in the nodes' actors; this process has none of its own."""

    def __init__(self, session: RaySession, nodes: Sequence[str], options: NodeStoreOptions) -> None:
        """**Blocks.** Lets the actors join each other, and create their managers.

        Raises:
            UsageError: If the checkpoints are to be in a place that not all actors see or can open.
        """
        url = options.storage.url
        if not options.storage.traits.is_shared:
            raise UsageError(
                f"other processes cannot see {url}", hint="Pass the path of a directory that all nodes can see."
            )
        try:
            # Opened by the node and not by Ray, which would hide the error of a node that lacks obstore, say.
            storage = cloudpickle.dumps(options.storage)
        except Exception as error:
            raise UsageError(
                f"{url} cannot be opened by the nodes: {error}",
                hint="Pass its URL, or what holdfast.open_storage(URL, ...) returns.",
            ) from error
        self._session = session
        self._start = session.start
        self._closed = False
        # Tells the actors which parts are meant: a session may serve one manager after the other.
        self._number = next(_numbers)
        self._emit = Fanout([LoggingSink(), *options.sinks])
        # Functions of this process stay here; the events of the first node come back and are emitted here.
        rest = (options.keep, options.begin_anew, options.timeout_seconds, options.threads)
        check_outcomes(self._call("open_part", self._number, tuple(nodes), storage, *rest))

    def call(self, method: str, what: str, *arguments: Any) -> Mapping[str, NodeOutcome]:
        """**Blocks.** Calls a method of the parts of all nodes, at the same time."""
        if method != "close":
            return self._call("call_part", self._number, method, *arguments)
        if self._closed or self._session.start != self._start:
            return {}  # There, the nodes that had the parts are gone, all of them.
        self._closed = True
        with suppress(NodeLostError):
            return self._call("call_part", self._number, method)
        return {}

    def _call(self, method: str, *arguments: Any) -> dict[str, NodeOutcome]:
        outcomes: dict[str, NodeOutcome] = {}
        for node, (outcome, events) in self._session.call_all(method, *arguments).items():
            outcomes[node] = outcome
            for event in events:
                with suppress(HoldfastError):
                    self._emit(decode_event(event))
        if any(outcome.kind for outcome in outcomes.values()):
            # What the nodes say of it is long, and not that they would have to be replaced.
            self._session.check_store()
        return outcomes
