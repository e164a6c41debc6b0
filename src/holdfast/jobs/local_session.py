"""`LocalSession`: all nodes in this process, a workspace for each, their tasks in threads."""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from holdfast.errors import HoldfastError, TaskFailedError, UsageError
from holdfast.jobs.job import ObjectMaker
from holdfast.jobs.keeper import KeeperOptions
from holdfast.jobs.local_keeper import LocalKeeper
from holdfast.jobs.session import Placed, Session
from holdfast.jobs.task import check_place
from holdfast.jobs.workspace import Workspace

GRACE_SECONDS: Final = 30.0
"""How long the other tasks of a group may go on when one has failed."""

_Ended: TypeAlias = tuple[Placed, Any, BaseException | None]


class LocalSession(Session):
    """Nodes that share this process.

    A task that is alone in its group runs in the calling thread, others have one each. When one fails, the others have
    some time to end; a thread cannot be ended from without.

    Example:
        ```python
        with hf.LocalSession(["trainer_0", "trainer_1"]) as session:
            hf.JobRunner(job, hf.MultiNodeCheckpointManager("runs/job")).train(session)
        ```
    """

    def __init__(self, nodes: str | Sequence[str] | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Makes the nodes, their workspaces empty.

        Args:
            nodes: Their names; None for those that the first job names, or else one, `local`.
            grace_seconds: How long the other tasks of a group may go on when one has failed.

        Raises:
            UsageError: If a name cannot be one.
        """
        super().__init__(check_place(nodes) if nodes is not None else None)
        self._grace_seconds = grace_seconds
        self._workspaces: dict[str, Workspace] = {}

    def workspace(self, node: str | None = None) -> Workspace:
        """The workspace of a node; None for the first.

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

    def make_objects(self, makers: Sequence[ObjectMaker]) -> None:
        """Makes the objects that nodes have not yet."""
        for maker in makers:
            for node in self.nodes if maker.on is None else maker.on:
                workspace = self.workspace(node)
                if maker.name not in workspace:
                    workspace[maker.name] = maker.make()

    def run_placed(self, group: str, placed: Sequence[Placed], epoch: int | None) -> Mapping[Placed, Any]:
        """**Blocks.** Runs tasks at the same time; see `Session`."""
        if epoch is not None:
            for node in self.nodes:
                self.workspace(node).begin_epoch(epoch)
        if len(placed) == 1:
            (only,) = placed
            try:
                return {only: only.task(self.workspace(only.node))}
            except Exception as error:
                raise _failure(group, only, error) from error
        ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        for one in placed:
            # `Thread.start` waits in Python code, and an interrupt there would leave its lock taken.
            _thread.start_new_thread(_perform, (one, self.workspace(one.node), ended))
        return self._collect(group, placed, ended)

    def open_keeper(self, nodes: Sequence[str], options: KeeperOptions) -> LocalKeeper:
        """What saves and restores the workspaces of some nodes, all in one file."""
        return LocalKeeper([self.workspace(node) for node in nodes], options)

    def close(self) -> None:
        """Ends the session, and lets go of the workspaces."""
        super().close()
        self._workspaces = {}

    def _collect(self, group: str, placed: Sequence[Placed], ended: queue.SimpleQueue[_Ended]) -> dict[Placed, Any]:
        results: dict[Placed, Any] = {}
        failures: list[tuple[Placed, BaseException]] = []
        deadline = 0.0
        while len(results) + len(failures) < len(placed):
            try:
                one, value, error = ended.get(timeout=deadline - time.monotonic() if failures else None)
            except (queue.Empty, ValueError):
                break
            if error is None:
                results[one] = value
            else:
                deadline = deadline or time.monotonic() + self._grace_seconds
                failures.append((one, error))
        if not failures:
            return results
        first, error = failures[0]
        if not isinstance(error, Exception):
            raise error
        failure = _failure(group, first, error)
        for other, also in failures[1:]:
            failure.add_note(f"{other.task.name} on {other.node} failed too: {_describe(also)}")
        known = {*results, *(one for one, _ in failures)}
        for one in placed:
            if one not in known:
                failure.add_note(f"{one.task.name} on {one.node} still runs after {self._grace_seconds:g} s")
        raise failure from error


def _perform(placed: Placed, workspace: Workspace, ended: queue.SimpleQueue[_Ended]) -> None:
    try:
        value = placed.task(workspace)
    except BaseException as error:  # noqa: BLE001  Whatever ended the task, the session's caller gets it.
        ended.put((placed, None, error))
    else:
        ended.put((placed, value, None))


def _failure(group: str, placed: Placed, error: BaseException) -> TaskFailedError:
    return TaskFailedError(
        f"{placed.task.name} on {placed.node} failed, in the group {group}: {_describe(error)}",
        group=group,
        task=placed.task.name,
        node=placed.node,
    )


def _describe(error: BaseException) -> str:
    return error.message if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
