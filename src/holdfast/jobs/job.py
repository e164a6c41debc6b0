"""`Job`: the tasks to run once, in each epoch, and at the end; and `epoch_limiter`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, overload

from holdfast.errors import UsageError
from holdfast.jobs.workspace import Workspace, check_name
from holdfast.numbers import check_whole

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


_jobs: ContextVar[Job | None] = ContextVar("holdfast_job", default=None)


@dataclass(frozen=True, slots=True)
class ObjectMaker:
    """An object with state in the workspaces of nodes."""

    name: str
    make: Callable[[], Any]
    on: tuple[str, ...] | None


class Job:
    """Tasks in four groups: init, once; epoch, repeatedly; download, once after that; and exit, last.

    A task is a plain function of the workspace of the node on which it runs. After the init tasks, and after each
    epoch, a `JobRunner` saves the workspaces.

    Example:
        ```python
        with holdfast.Job() as job:

            @job.init_group(on="trainer")
            def begin(workspace):
                workspace["total"] = 100

            @job.epoch_group(on="trainer")
            def add(workspace):
                workspace["total"] += workspace.epoch

        holdfast.epoch_limiter(job, 4)
        ```

    Inside the `with` block, new tasks (`Task(function)`) are added to the epoch group, and `Job.current()` is the job.

    Attributes:
        init_group: Runs once, when the job starts from the beginning; not when it resumes from a checkpoint.
        epoch_group: Runs once per epoch.
        download_group: Runs once after the last epoch.
        exit_group: Runs last.
        stop_outputs: The stop conditions that are outputs of tasks of the epoch group.
        stop_group: The other stop conditions, as tasks that run after each epoch.
    """

    def __init__(
        self,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: Sequence[TaskOutput | TaskFunction | str] = (),
        nodes_to_checkpoint: Sequence[str] | None = None,
    ) -> None:
        """Creates a job from given groups or new ones.

        Args:
            init_group: The tasks that run once, first; None for a new, empty group.
            epoch_group: The tasks that run in each epoch; likewise.
            download_group: The tasks that run after the last epoch; likewise.
            exit_group: The tasks that run last; likewise.
            stop_conditions: As in `add_stop_condition`.
            nodes_to_checkpoint: The nodes whose state is saved; None, or an empty list, for those of the init tasks and
                objects, or all.

        Raises:
            UsageError: If an argument is wrong.
        """
        self.init_group = init_group if init_group is not None else TaskGroup("init")
        self.epoch_group = epoch_group if epoch_group is not None else TaskGroup("epoch")
        self.download_group = download_group if download_group is not None else TaskGroup("download")
        self.exit_group = exit_group if exit_group is not None else TaskGroup("exit")
        self._nodes_to_checkpoint = (
            check_place(nodes_to_checkpoint, "nodes_to_checkpoint") if nodes_to_checkpoint else None
        )
        self._objects: list[ObjectMaker] = []
        self.stop_outputs: list[TaskOutput] = []
        self.stop_group = TaskGroup("stop conditions")
        self._first_node_only: set[Task] = set()
        self._tokens: list[Token[Job | None]] = []
        # Held while the job is run.
        self.run_lock = threading.Lock()
        for condition in stop_conditions:
            self.add_stop_condition(condition)

    @classmethod
    def current(cls) -> Job:
        """Returns the job whose `with` block is the innermost one.

        Raises:
            UsageError: If there is none.
        """
        job = _jobs.get()
        if job is None:
            raise UsageError("there is no current job", hint="Write: with Job() as job:")
        return job

    def add_object(self, name: str, make: Callable[[], Any], *, on: Place = None) -> None:
        """Registers an object with state (a model, an optimizer, a reader) that nodes have in their workspaces.

        It is created on each node before the init tasks, and also when the job resumes from a checkpoint: code creates
        objects, and a checkpoint only restores their state. If the workspace already has something of that name, it is
        left; but an object that was created for an earlier run in the same session is created again if a job starts
        over.

        Args:
            name: Its name in the workspace.
            make: A function without arguments, or a class.
            on: Which nodes have it; None for all.

        Raises:
            UsageError: If an argument is wrong.
        """
        if not callable(make):
            raise UsageError(f"expected a function that makes an object, got {make!r}")
        self._objects.append(ObjectMaker(check_name("a value", name), make, check_place(on)))

    def add_stop_condition(self, condition: TaskOutput | TaskFunction | str, *, on: str | None = None) -> None:
        """Ends the epochs as soon as a condition is true after one of them.

        Args:
            condition: The output of a task of the epoch group (true on any of its nodes); the name of a value in a
                workspace; or a function of a workspace, which must not change anything.
            on: For a name or a function: the node; None for the first.

        Raises:
            UsageError: If it is none of these.
        """
        if isinstance(condition, TaskOutput):
            if condition.task not in self.epoch_group.tasks or on is not None:
                raise UsageError(
                    f"the output of {condition.task} cannot be a stop condition",
                    hint=(
                        "A stop condition must be the output of a task of the epoch group that has no node of its own."
                    ),
                )
            self.stop_outputs.append(condition)
            return
        if isinstance(condition, str):
            name = check_name("a value", condition)
            task = self.stop_group.add(lambda workspace: bool(workspace[name]), on=on, name=f"is {name} true?")
        elif callable(condition):
            task = self.stop_group.add(condition, on=on)
        else:
            raise UsageError(
                f"{condition!r} cannot be a stop condition",
                hint="Pass the output of a task, the name of a value, or a function of a workspace.",
            )
        if on is None:
            self._first_node_only.add(task)

    def nodes_to_checkpoint(self, nodes: Sequence[str] | None = None) -> tuple[str, ...]:
        """Returns the nodes whose state is saved, in order.

        Args:
            nodes: All nodes of the session; None for those that the job names.
        """
        if self._nodes_to_checkpoint is not None:
            return self._nodes_to_checkpoint
        everywhere = tuple(nodes) if nodes is not None else self.named_nodes()
        on_all = any(one.on is None for one in (*self.init_group, *self._objects))
        named = (*self.init_group.named_nodes(), *(node for maker in self._objects for node in maker.on or ()))
        if on_all or not named:
            return everywhere
        return tuple(dict.fromkeys(named))

    def named_nodes(self) -> tuple[str, ...]:
        """Returns all nodes that the job names, each once, in order."""
        named = [node for maker in self._objects for node in maker.on or ()]
        for group in (self.init_group, self.epoch_group, self.download_group, self.exit_group):
            named += group.named_nodes()
        # What was put on the first node of a session may be put on that of another one.
        own = [task for task in self.stop_group if task not in self._first_node_only]
        named += [node for task in own for node in task.on or ()]
        return tuple(dict.fromkeys((*named, *(self._nodes_to_checkpoint or ()))))

    @property
    def objects(self) -> tuple[ObjectMaker, ...]:
        """The objects that nodes have."""
        return tuple(self._objects)

    def freeze(self, nodes: Sequence[str]) -> None:
        """Called when the job is used: no task can be added after that, and conditions without a node get one."""
        for task in self._first_node_only:
            task.on = (nodes[0],)
        for group in (self.init_group, self.epoch_group, self.stop_group, self.download_group, self.exit_group):
            group.freeze()

    def __enter__(self) -> Self:
        self._tokens.append(_jobs.set(self))
        self.epoch_group.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.epoch_group.__exit__(kind, error, trace)
        _jobs.reset(self._tokens.pop())


def epoch_limiter(job: Job, num_epochs: int) -> None:
    """Ends a job after that many epochs in total, including those before a restart.

    The limit is that of the current program: a job that has completed 3 of 3 epochs continues with a limit of 10.

    Args:
        job: The job.
        num_epochs: How many epochs.

    Raises:
        OutOfRangeError: If that is less than one; also a `ValueError`.
        UsageError: If it is not a whole number, or `job` is not a job.
    """
    if not isinstance(job, Job):
        raise UsageError(f"expected a Job, got {job!r}", hint="Write: epoch_limiter(job, num_epochs).")
    most = check_whole("num_epochs", num_epochs, 1)

    def is_over(workspace: Workspace) -> bool:
        return workspace.epoch >= most

    is_over.__name__ = f"limit of {most} epochs"
    job.add_stop_condition(is_over)
