"""Saves and restores the nodes of a session in which each worker is one, and all run the same program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import FencedError, SaveFailedError
from holdfast.jobs.keeper import CommonSaving, LoadOrder, NodeDurations
from holdfast.jobs.meetings import Meetings
from holdfast.jobs.node_keeper import NodeKeeper
from holdfast.jobs.outcome import Outcome, check_outcomes


class WorkerKeeper:
    """A `Keeper` of which each worker has a part. What it does is collective, and ends alike on all of them."""

    def __init__(self, keeper: NodeKeeper, node: str, nodes: Sequence[str], meetings: Meetings) -> None:
        self._keeper = keeper
        self._node = node
        self._nodes = tuple(nodes)
        self._meetings = meetings

    def save(self, epoch: int, metadata: Mapping[str, Any]) -> CommonSaving:
        """**Collective.** Copies the workspaces and returns; see `Keeper`."""
        with self._meetings.together():
            self._keeper.save(epoch, metadata)
        return CommonSaving(epoch, self.wait, self._keeper.handle)

    def wait(self, epoch: int) -> NodeDurations:
        """**Collective.** **Blocks.** Waits until the save is committed; what the leader met with counts for all."""
        return check_save(epoch, self._share(f"the save of epoch {epoch}", self._keeper.wait))

    def load(self, order: LoadOrder) -> NodeDurations:
        """**Collective.** **Blocks.** Each worker loads its own node; see `Keeper`."""
        return check_outcomes(self._share(f"the load of epoch {order.name.step}", lambda: self._keeper.load(order)))

    def go_on_from(self, epoch: int) -> None:
        """**Collective.** **Blocks.** Has what is saved next follow this epoch; see `Keeper`."""
        with self._meetings.together():
            self._keeper.go_on_from(epoch)

    def close(self) -> None:
        """**Blocks.** Waits for the save in flight, and ends all threads; harmless twice."""
        self._keeper.close()

    def _share(self, what: str, act: Callable[[], Outcome]) -> dict[str, Outcome]:
        """What the act has come to on each node."""
        with self._meetings.together():
            outcome = act()
            self._meetings.begin()
            records = self._meetings.meet(what, msgspec.json.encode(outcome))
            outcomes = [msgspec.json.decode(record, type=Outcome) for record in records]
        return dict(zip(self._nodes, outcomes, strict=True))


def check_save(epoch: int, outcomes: Mapping[str, Outcome]) -> NodeDurations:
    """**Pure.** The times of a save, if it is committed. The first node leads: it publishes, and so it knows.

    Raises:
        SaveFailedError: If it is not.
    """
    leader = next(iter(outcomes.values()))
    if leader.kind:
        failure = SaveFailedError(leader.text, step=epoch, hint=leader.hint)
        if leader.is_fenced:
            failure.__cause__ = FencedError(leader.text, hint=leader.hint)
        raise failure
    return NodeDurations({node: one.seconds for node, one in outcomes.items() if one.seconds is not None})
