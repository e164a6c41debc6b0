"""Runs the tasks that belong to this process."""

from __future__ import annotations

import _thread
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from holdfast.errors import HoldfastError, TaskFailedError
from holdfast.jobs.session import Placed
from holdfast.jobs.workspace import Workspace

GRACE_SECONDS: Final = 30.0
"""How long the other tasks of a group may go on when one has failed."""

_Ended: TypeAlias = tuple[Placed, Any, BaseException | None]


def run_here(
    group: str, placed: Sequence[Placed], workspaces: Mapping[str, Workspace], grace_seconds: float
) -> dict[Placed, Any]:
    """**Blocks.** Runs tasks at the same time, and gives what each returned.

    One by itself runs in the calling thread, others have a thread each.

    Args:
        group: What the group is called.
        placed: The tasks.
        workspaces: The workspace of each node.
        grace_seconds: How long others may go on when one has failed.

    Raises:
        TaskFailedError: If one raised an error.
    """
    if len(placed) == 1:
        (only,) = placed
        try:
            return {only: only.task(workspaces[only.node])}
        except Exception as error:
            raise _failure(group, only, error) from error
    ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
    for one in placed:
        # `Thread.start` waits in Python code, and an interrupt there would leave its lock taken.
        _thread.start_new_thread(_perform, (one, workspaces[one.node], ended))
    return _collect(group, placed, ended, grace_seconds)


def _collect(
    group: str, placed: Sequence[Placed], ended: queue.SimpleQueue[_Ended], grace_seconds: float
) -> dict[Placed, Any]:
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
            deadline = deadline or time.monotonic() + grace_seconds
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
            failure.add_note(f"{one.task.name} on {one.node} still runs after {grace_seconds:g} s")
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
