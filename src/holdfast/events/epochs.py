"""What happens in an epoch job."""

from __future__ import annotations

from holdfast.events.event import Event, time_text


class GroupEnded(Event, frozen=True):
    """All tasks of a group of a job have ended well.

    Attributes:
        group: The group, such as `init` or `epoch`.
        epoch: The epoch, counted from 1; 0 before the first.
        seconds: How long the tasks ran.
    """

    group: str
    epoch: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.group}{f' {self.epoch}' if self.group == 'epoch' else ''} ended after {time_text(self.seconds)}"


class NodesTimed(Event, frozen=True):
    """The state of a job's nodes has been saved or loaded.

    Attributes:
        action: `checkpoint_save`, `checkpoint_load` or `checkpoint_partial_load`.
        epoch: The epoch.
        node_seconds: How long it took each node.
        slowest: The node that it took longest.
    """

    action: str
    epoch: int
    node_seconds: dict[str, float]
    slowest: str

    def __str__(self) -> str:
        longest = time_text(self.node_seconds.get(self.slowest, 0.0))
        what = self.action.replace("_", " ")
        return f"{what} of epoch {self.epoch}: {len(self.node_seconds)} nodes, longest {self.slowest} with {longest}"
