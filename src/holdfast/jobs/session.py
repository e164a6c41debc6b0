"""`Session`, where the tasks of a job run, and `LocalSession`, whose nodes share a process."""

from __future__ import annotations

import _thread
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from holdfast.errors import ClosedError, HoldfastError, NodeLostError, TaskFailedError, UsageError
from holdfast.jobs.job import ObjectMaker, Task, TaskGroup, check_place
from holdfast.jobs.node_store import LocalNodeStore, NodeStore, NodeStoreOptions
from holdfast.jobs.workspace import Workspace
from holdfast.numbers import check_seconds

GRACE_SECONDS: Final = 30.0
"""How long the other tasks of a group may continue after one has failed."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A task on one of its nodes."""

    task: Task
    node: str


class Session(ABC):
    """Named nodes, each with a workspace that lasts as long as the session, and a way to run tasks on them.

    Attributes:
        is_master: True if this process decides for all nodes; it is the only process if one drives them all.
        makes_in_turn: True to create objects on one node after the other, for reproducible draws.
    """

    is_master: bool = True
    makes_in_turn: bool = False

    def __init__(self, nodes: str | Sequence[str] | None) -> None:
        self._nodes = _check_nodes(nodes)
        self._closed = False
        self._stores: list[NodeStore] = []
        # Held while a job is run in it.
        self.run_lock = threading.Lock()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, in order."""
        return self._nodes or ("local",)

    def bind(self, named: Sequence[str]) -> None:
        """Checks that the nodes that a job names exist; a session without given nodes takes over these.

        Raises:
            UsageError: If one does not.
        """
        if self._nodes is None:
            self._nodes = _check_nodes(named) if named else None
        absent = [node for node in named if node not in self.nodes]
        if absent:
            raise UsageError(
                f"the session has no node {', '.join(absent)}", hint=f"Its nodes are {', '.join(self.nodes)}."
            )

    def run(self, work: TaskGroup | Task, *, epoch: int | None = None, only: Sequence[str] | None = None) -> None:
        """**Blocks.** Runs a task, or all tasks of a group at the same time; then their outputs can be fetched.

        Args:
            work: The task or the group; nothing can be added to it afterwards.
            epoch: The value of `workspace.epoch` meanwhile, and afterwards; None to leave it.
            only: The nodes on which to run; None for all.

        Raises:
            TaskFailedError: If a task raised an error.
            NodeLostError: If a node is gone.
            UsageError: If a task names a node that the session does not have.
            ClosedError: If the session is closed.
        """
        self.check_open()
        group = work
        if isinstance(group, Task):
            group = TaskGroup(group.name)
            group.include(work)  # type: ignore[arg-type]
        group.freeze()
        placed = [
            Placed(task, node)
            for task in group.tasks
            for node in task.nodes_in(self.nodes)
            if only is None or node in only
        ]
        outputs = self.run_placed(group.name, placed, epoch) if placed else {}
        for task in group.tasks:
            task.note_results({one.node: outputs[one] for one in placed if one.task is task})

    def make_objects(self, makers: Sequence[ObjectMaker], *, anew: bool = False) -> None:
        """**Blocks.** Creates the objects that nodes need and do not have yet, one after the other.

        With `anew`, objects that were created like this before are created again.

        Raises:
            TaskFailedError: If one cannot be created.
            NodeLostError: If a node is gone.
        """
        for maker in makers:
            group = TaskGroup("objects")

            def make(workspace: Workspace, maker: ObjectMaker = maker) -> None:
                if maker.name not in workspace or (anew and workspace.was_made(maker.name)):
                    workspace.note_made(maker.name, maker.make())

            group.add(make, on=maker.on, name=f"make {maker.name}")
            for only in ([node] for node in self.nodes) if self.makes_in_turn else (None,):
                self.run(group, only=only)

    def share(self, what: str, value: Any) -> list[Any]:
        """Returns what each process of the session passed as `value`, the master first; plain JSON.

        Args:
            what: The purpose, in words: the same in each process.
            value: This process's value.
        """
        return [value]

    def note_end(self, error: BaseException) -> None:  # noqa: B027  Most kinds of session need not know.
        """Called when an error has ended a run."""

    def note_exit(self, leaving: SystemExit) -> None:  # noqa: B027  As above.
        """Called when the job was asked to stop, before the process ends."""

    def try_replace(self, lost: NodeLostError) -> bool:
        """**Blocks.** Replaces nodes that are gone, so that the job can resume from a checkpoint.

        Returns:
            False if that cannot be done, or was done as often as allowed.
        """
        return False

    def check_open(self) -> None:
        """Checks that the session can be used.

        Raises:
            ClosedError: If it is closed.
        """
        if self._closed:
            raise ClosedError("the session is closed", hint="Create a new session.")

    @abstractmethod
    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Blocks.** Runs tasks, all at the same time, and returns their results.

        Raises:
            TaskFailedError: If one raised an error.
        """

    def open_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> NodeStore:
        """Returns what saves and restores the workspaces of some nodes. It is closed with the session, if not before.

        Raises:
            StorageError: If the storage cannot be read.
        """
        store = self._make_store(nodes, options)
        self._stores.append(store)
        return store

    @abstractmethod
    def _make_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> NodeStore:
        """Creates what saves and restores the workspaces of some nodes."""

    def close(self) -> None:
        """**Blocks.** Waits for saves in progress, and ends the session with its workspaces; may be repeated.

        Raises:
            SaveFailedError: If a save failed and the failure was not reported yet.
        """
        self._closed = True
        while self._stores:
            self._stores.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with noting_on(error):
            self.close()


class LocalSession(Session):
    """Runs nodes that share this process.

    A task that is alone in its group runs in the calling thread; otherwise each has its own thread. If one fails, the
    others have some time to end; a thread cannot be ended from outside.

    Example:
        ```python
        with holdfast.LocalSession(["trainer_0", "trainer_1"]) as session:
            holdfast.JobRunner(job, holdfast.MultiNodeCheckpointManager("runs/job")).train(session)
        ```
    """

    makes_in_turn = True

    def __init__(self, nodes: str | Sequence[str] | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Creates the nodes, with empty workspaces.

        Args:
            nodes: Their names, or that of the only one; None for those that the first job names, or else one, `local`.
            grace_seconds: How long the other tasks of a group may continue after one has failed.

        Raises:
            UsageError: If a name is not allowed, or appears twice.
        """
        super().__init__(nodes)
        self._grace_seconds = check_seconds("grace_seconds", grace_seconds, least=0)
        self._workspaces: dict[str, Workspace] = {}

    def workspace(self, node: str | None = None) -> Workspace:
        """Returns the workspace of a node; None for the first.

        Raises:
            UsageError: If there is no such node.
        """
        self.check_open()
        name = self.nodes[0] if node is None else node
        if name not in self.nodes:
            raise UsageError(f"the session has no node {name!r}", hint=f"Its nodes are {', '.join(self.nodes)}.")
        if name not in self._workspaces:
            self._workspaces[name] = Workspace(name)
        return self._workspaces[name]

    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Blocks.** Runs tasks at the same time; see `Session`."""
        for node in self.nodes:
            workspace = self.workspace(node)
            workspace.begin_epoch(workspace.epoch if epoch is None else epoch)
        return run_tasks(group, placed, self._workspaces, self._grace_seconds)

    def _make_store(self, nodes: Sequence[str], options: NodeStoreOptions) -> LocalNodeStore:
        """Creates what saves and restores the workspaces of some nodes, all in one file."""
        return LocalNodeStore([self.workspace(node) for node in nodes], options)

    def close(self) -> None:
        """Ends the session, and drops the workspaces."""
        super().close()
        self._workspaces = {}


def _check_nodes(nodes: str | Sequence[str] | None) -> tuple[str, ...] | None:
    names = check_place(nodes, "nodes")
    if names is not None and not isinstance(nodes, str) and len(names) != len(nodes or ()):
        raise UsageError(f"nodes={nodes!r} contains a name twice", hint="Give each node its own name.")
    return names


@contextmanager
def noting_on(error: BaseException | None) -> Iterator[None]:
    """Adds failures at the end of a block as notes to the error that ended the block, which takes precedence."""
    try:
        yield
    except HoldfastError as failure:
        if error is None:
            raise
        error.add_note(f"holdfast: while closing: {type(failure).__name__}: {failure}")


def run_tasks(
    group: str, placed: Sequence[Placed], workspaces: Mapping[str, Workspace], grace_seconds: float
) -> dict[Placed, Any]:
    """**Blocks.** Runs the tasks of this process at the same time, and returns their results.

    A single task runs in the calling thread, others have a thread each. An executor is not used: Python waits for all
    threads of an executor before it exits, so a task that hangs would keep a failed job alive.

    Raises:
        TaskFailedError: If one raised an error.
    """
    if len(placed) == 1:
        (only,) = placed
        try:
            return {only: only.task(workspaces[only.node])}
        except Exception as error:
            raise _make_failure(group, only, error) from error
    futures: dict[Placed, Future[Any]] = {one: Future() for one in placed}
    for one, future in futures.items():
        # `Thread.start` waits in Python code, and an interrupt there would leave its lock taken.
        _thread.start_new_thread(_perform, (one, workspaces[one.node], future))
    wait(futures.values(), return_when=FIRST_EXCEPTION)
    failed = _find_failed(futures)
    if not failed:
        return {one: future.result() for one, future in futures.items()}
    first, cause = next(iter(failed.items()))
    if not isinstance(cause, Exception):
        raise cause
    wait(futures.values(), timeout=grace_seconds)
    failure = _make_failure(group, first, cause)
    for other, also in _find_failed(futures).items():
        if other is not first:
            failure.add_note(f"{other.task.name} on {other.node} failed too: {_describe(also)}")
    for one, future in futures.items():
        if not future.done():
            failure.add_note(f"{one.task.name} on {one.node} was still running after {grace_seconds:g} s")
    raise failure from cause


def _perform(placed: Placed, workspace: Workspace, future: Future[Any]) -> None:
    try:
        value = placed.task(workspace)
    except BaseException as error:  # noqa: BLE001  The session's caller gets any error that ended the task.
        future.set_exception(error)
    else:
        future.set_result(value)


def _find_failed(futures: Mapping[Placed, Future[Any]]) -> dict[Placed, BaseException]:
    ended = {one: future.exception() for one, future in futures.items() if future.done()}
    return {one: error for one, error in ended.items() if error is not None}


def _make_failure(group: str, placed: Placed, error: BaseException) -> TaskFailedError:
    return TaskFailedError(
        f"{placed.task.name} on {placed.node} failed, in the group {group}: {_describe(error)}",
        group=group,
        task=placed.task.name,
        node=placed.node,
    )


def _describe(error: BaseException) -> str:
    return error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
