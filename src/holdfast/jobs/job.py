"""`Job`: the tasks to run once, in each epoch, and at the end; and `epoch_limiter`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from holdfast.errors import UsageError
from holdfast.jobs.task import Place, Task, TaskFunction, TaskGroup, TaskOutput, check_place
from holdfast.jobs.workspace import Workspace, check_name
from holdfast.numbers import check_whole

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
        with hf.Job() as job:

            @job.init_group(on="trainer")
            def begin(workspace):
                workspace["total"] = 100

            @job.epoch_group(on="trainer")
            def add(workspace):
                workspace["total"] += workspace.epoch

        hf.epoch_limiter(job, 4)
        ```

    Inside the `with` block, new tasks (`Task(function)`) are added to the epoch group, and `Job.current()` is the job.

    Attributes:
        init_group: Runs once, when the job starts from the beginning; not when it resumes from a checkpoint.
        epoch_group: Runs once per epoch.
        download_group: Runs once after the last epoch.
        exit_group: Runs last.
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
        self._stop_outputs: list[TaskOutput] = []
        self._stop_group = TaskGroup("stop conditions")
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
            self._stop_outputs.append(condition)
            return
        if isinstance(condition, str):
            name = check_name("a value", condition)
            task = self._stop_group.add(lambda workspace: bool(workspace[name]), on=on, name=f"is {name} true?")
        elif callable(condition):
            task = self._stop_group.add(condition, on=on)
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
        on_all = self.init_group.runs_on_all() or any(maker.on is None for maker in self._objects)
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
        own = [task for task in self._stop_group if task not in self._first_node_only]
        named += [node for task in own for node in task.on or ()]
        return tuple(dict.fromkeys((*named, *(self._nodes_to_checkpoint or ()))))

    @property
    def objects(self) -> tuple[ObjectMaker, ...]:
        """The objects that nodes have."""
        return tuple(self._objects)

    @property
    def stop_outputs(self) -> tuple[TaskOutput, ...]:
        """The stop conditions that are outputs of tasks of the epoch group."""
        return tuple(self._stop_outputs)

    @property
    def stop_group(self) -> TaskGroup:
        """The other stop conditions, as tasks that run after each epoch."""
        return self._stop_group

    @property
    def has_stop_condition(self) -> bool:
        """True if there is a condition that ends the epochs."""
        return bool(self._stop_outputs) or len(self._stop_group) > 0

    def freeze(self, nodes: Sequence[str]) -> None:
        """Called when the job is used: no task can be added after that, and conditions without a node get one."""
        for task in self._first_node_only:
            task.on = (nodes[0],)
        for group in (self.init_group, self.epoch_group, self._stop_group, self.download_group, self.exit_group):
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
