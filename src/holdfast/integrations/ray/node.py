"""A node of a session on Ray: an actor that has the workspace and runs what is placed on it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import TaskFailedError
from holdfast.jobs.job import ObjectMaker
from holdfast.jobs.session import Placed
from holdfast.jobs.task import Task, TaskFunction
from holdfast.jobs.threads import run_here
from holdfast.jobs.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Call:
    """A task, as it travels to its node.

    Attributes:
        place: Its place in the group.
        name: What it is called.
        function: What it does.
    """

    place: int
    name: str
    function: TaskFunction


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of the tasks of a node.

    Attributes:
        outputs: By the place in the group, what each returned.
        task: The one that failed; empty if none did.
        text: How.
        trace: Where.
    """

    outputs: dict[int, Any]
    task: str = ""
    text: str = ""
    trace: str = ""


class NodeActor:
    """One node. An actor does one call after the other."""

    def __init__(self, node: str) -> None:
        self._workspace = Workspace(node)

    def make_objects(self, makers: Sequence[ObjectMaker]) -> None:
        """Makes the objects that this node has not yet."""
        node = self._workspace.node
        for maker in makers:
            if (maker.on is None or node in maker.on) and maker.name not in self._workspace:
                self._workspace[maker.name] = maker.make()

    def run(self, group: str, calls: Sequence[Call], epoch: int | None, grace_seconds: float) -> Answer:
        """Runs tasks at the same time."""
        workspace = self._workspace
        if epoch is not None:
            workspace.begin_epoch(epoch)
        if not calls:
            return Answer({})
        placed = {call.place: Placed(Task(call.function, name=call.name), workspace.node) for call in calls}
        try:
            results = run_here(group, list(placed.values()), {workspace.node: workspace}, grace_seconds)
        except TaskFailedError as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            trace = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
            return Answer({}, error.task, error.message + notes, trace)
        return Answer({place: results[one] for place, one in placed.items()})
