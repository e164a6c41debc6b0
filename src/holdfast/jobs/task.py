"""Tasks, the groups in which they run at the same time, and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, overload

from holdfast.errors import UsageError
from holdfast.jobs.workspace import Workspace, check_name

TaskFunction: TypeAlias = Callable[[Workspace], Any]
"""The function of a task. It is called with the node's workspace; its return value is the task's output there."""

Place: TypeAlias = str | Sequence[str] | None
"""One node by name, several, or None for all nodes of the session."""

_groups: ContextVar[TaskGroup | None] = ContextVar("holdfast_task_group", default=None)


class Task:
    """A plain function and the nodes on which it runs.

    A task created inside the `with` block of a group or of a job is added to that group, or to the job's epoch group.

    Attributes:
        name: Its name in errors and events.
        on: The names of its nodes; None for all.
    """

    def __init__(self, function: TaskFunction, *, on: Place = None, name: str | None = None) -> None:
        """Creates a task.

        Args:
            function: Called with the workspace of each node.
            on: Where it runs: the name of a node, several, or None for all nodes of the session.
            name: Its name in errors and events; None for the function's own name.

        Raises:
            UsageError: If an argument is wrong, or the group around it has already run.
        """
        if not callable(function):
            raise UsageError(f"{function!r} cannot be called", hint="A task is a function of a workspace.")
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.on = check_place(on)
        self._function = function
        self._results: dict[str, Any] = {}
        group = _groups.get()
        if group is not None:
            group.include(self)

    @property
    def function(self) -> TaskFunction:
        """The function."""
        return self._function

    @property
    def output(self) -> TaskOutput:
        """Returns the function's output, to be fetched after it has run; for several nodes, see `output_on`."""
        return TaskOutput(self, None)

    def output_on(self, node: str) -> TaskOutput:
        """Returns the function's output on one of its nodes."""
        if self.on is not None and node not in self.on:
            raise UsageError(f"task {self.name} does not run on {node}", hint=f"It runs on {', '.join(self.on)}.")
        return TaskOutput(self, node)

    def nodes_in(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """**Pure.** Returns those of a session's nodes on which it runs.

        Raises:
            UsageError: If one of its nodes is not among them.
        """
        if self.on is None:
            return tuple(nodes)
        absent = [node for node in self.on if node not in nodes]
        if absent:
            raise UsageError(
                f"task {self.name} needs the nodes {', '.join(absent)}, which the session does not have",
                hint=f"The session's nodes are {', '.join(nodes)}.",
            )
        return self.on

    def note_results(self, results: Mapping[str, Any]) -> None:
        """Called by the session with the function's results on each node."""
        self._results = dict(results)

    def results(self) -> Mapping[str, Any]:
        """Returns the function's results of the last run, by node; empty if it has not run."""
        return dict(self._results)

    def __call__(self, workspace: Workspace) -> Any:
        """Calls the function directly."""
        return self._function(workspace)

    def __repr__(self) -> str:
        return f"Task({self.name} on {', '.join(self.on) if self.on else 'all nodes'})"


@dataclass(frozen=True, slots=True)
class TaskOutput:
    """The output of a task's function.

    Attributes:
        task: The task.
        node: The node on which it runs; None if there is just one.
    """

    task: Task
    node: str | None = None

    def fetch(self) -> Any:
        """Returns the function's result of the last run.

        Raises:
            UsageError: If it has not run, or on several nodes and none was named.
        """
        results = self.task.results()
        if self.node is None and len(results) > 1:
            raise UsageError(
                f"task {self.task.name} ran on {', '.join(results)}", hint="Name the node: task.output_on(node)."
            )
        for node, value in results.items():
            if self.node in (None, node):
                return value
        where = f" on {self.node}" if self.node else ""
        raise UsageError(f"task {self.task.name} has not run{where}, so it has no output yet")


class TaskGroup:
    """Tasks that run at the same time. It has ended when all of them have.

    It may grow until it runs for the first time. Functions are added by `add`, or by the group as a decorator; and
    tasks that are created inside its `with` block are added to it.

    Attributes:
        name: Its name in errors and events.
    """

    def __init__(self, name: str = "tasks") -> None:
        self.name = name
        self._tasks: list[Task] = []
        self._frozen = False
        self._tokens: list[Token[TaskGroup | None]] = []

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks, in the order in which they were added."""
        return tuple(self._tasks)

    def include(self, task: Task) -> Task:
        """Adds an existing task.

        Raises:
            UsageError: If the group has already run, or already has the task.
        """
        if self._frozen:
            raise UsageError(
                f"task {task.name} cannot be added: the group {self.name} has already run",
                hint="Add all tasks before the first run.",
            )
        if task in self._tasks:
            raise UsageError(f"task {task.name} is already in the group {self.name}")
        self._tasks.append(task)
        return task

    def add(self, function: TaskFunction, *, on: Place = None, name: str | None = None) -> Task:
        """Creates a task from a function, and adds it.

        Args:
            function: Called with the workspace of each node.
            on: Where it runs: the name of a node, several, or None for all.
            name: Its name in errors and events.
        """
        token = _groups.set(None)
        try:
            return self.include(Task(function, on=on, name=name))
        finally:
            _groups.reset(token)

    @overload
    def __call__(self, function: TaskFunction) -> Task: ...
    @overload
    def __call__(self, *, on: Place = None, name: str | None = None) -> Callable[[TaskFunction], Task]: ...
    def __call__(
        self, function: TaskFunction | None = None, *, on: Place = None, name: str | None = None
    ) -> Task | Callable[[TaskFunction], Task]:
        """Like `add`, as a decorator: `@group`, or `@group(on="trainer_0")`."""
        if function is not None:
            return self.add(function, on=on, name=name)
        return lambda function: self.add(function, on=on, name=name)

    def named_nodes(self) -> tuple[str, ...]:
        """The nodes that its tasks name, each once, in order."""
        return tuple(dict.fromkeys(node for task in self._tasks for node in task.on or ()))

    def runs_on_all(self) -> bool:
        """True if one of its tasks runs on all nodes."""
        return any(task.on is None for task in self._tasks)

    def freeze(self) -> None:
        """Called when it runs: nothing can be added after that."""
        self._frozen = True

    def __enter__(self) -> Self:
        self._tokens.append(_groups.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _groups.reset(self._tokens.pop())

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __repr__(self) -> str:
        return f"TaskGroup({self.name}: {', '.join(task.name for task in self._tasks) or 'empty'})"


def check_place(on: Place, argument: str = "on") -> tuple[str, ...] | None:
    """**Pure.** Returns the nodes of a place, each once; None for all.

    Raises:
        UsageError: If it names none, or something that cannot be a node.
    """
    if on is None:
        return None
    names: Any = (on,) if isinstance(on, str) else on
    if not isinstance(names, Iterable) or not names:
        raise UsageError(
            f"{argument} must be the name of a node or several names, got {on!r}",
            hint=f'For example: {argument}="node0".',
        )
    return tuple(dict.fromkeys(check_name("a node", name) for name in names))
