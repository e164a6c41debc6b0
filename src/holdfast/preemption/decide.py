"""Decides about the next act of a guard: its states as one table, and the plan of its worker.

Pure: no I/O, no clock, no thread.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from holdfast.preemption.grace import (
    Action,
    Outlook,
    Plan,
    ReceivedNotice,
    decide,
    has_time_to_save,
    is_by_hand,
)
from holdfast.preemption.sources.protocol import Demand


class GuardState(enum.Enum):
    """The state of the training thread, as far as its guard is concerned."""

    TRAINING = "training"
    """Steps are taken; notices are gathered."""
    PAUSED = "paused"
    """The training thread takes no steps, and its state may be saved in its stead."""
    SETTLING = "settling"
    """The training thread waits between two steps until it is settled, by all workers, what is done there."""
    LEAVING = "leaving"
    """The program is about to end. Nothing is undone from here, unless the user's `exit_fn` returns."""


class Turning(enum.Enum):
    """An event that may move a guard to another state."""

    PAUSE = "the training thread pauses"
    RESUME = "it continues after a pause"
    AWAIT = "it would continue, but all may stop at the step before the pause"
    SETTLE = "it asks between two steps what is to be done"
    GO = "another step may begin"
    LEAVE = "the job exits"
    FAIL = "the last save of all workers is given up because one of them has failed"
    RETURN = "the user's exit_fn has returned, and training continues"


_TRAINING, _PAUSED, _SETTLING, _LEAVING = GuardState

NEXT: Final = {
    (_TRAINING, Turning.PAUSE): _PAUSED,
    (_TRAINING, Turning.SETTLE): _SETTLING,
    (_TRAINING, Turning.LEAVE): _LEAVING,
    (_PAUSED, Turning.RESUME): _TRAINING,
    (_PAUSED, Turning.AWAIT): _SETTLING,
    (_PAUSED, Turning.SETTLE): _SETTLING,
    (_PAUSED, Turning.LEAVE): _LEAVING,
    (_SETTLING, Turning.PAUSE): _PAUSED,
    (_SETTLING, Turning.RESUME): _TRAINING,
    (_SETTLING, Turning.GO): _TRAINING,
    (_SETTLING, Turning.FAIL): _TRAINING,
    (_SETTLING, Turning.LEAVE): _LEAVING,
    (_LEAVING, Turning.FAIL): _PAUSED,  # Only in a pause it leaves before the last save is shared.
    (_LEAVING, Turning.RETURN): _TRAINING,
}
"""The state after each turning; one that is not here changes nothing."""


class StopRecord(msgspec.Struct, frozen=True):
    """The stop step of a round.

    Attributes:
        step: The step.
        absent: Workers that did not pledge because they are dead.
        done: Workers whose training had ended before.
    """

    step: int
    absent: tuple[int, ...] = ()
    done: tuple[int, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """The common action of all workers at a step.

    Attributes:
        action: The action; None while it is not settled.
        plan: What was called for, if anything was.
        stop: The stop step of all workers; None before it is known, and without other workers.
        objection: Why not to wait for the others any more; empty as long as there is no reason.
    """

    action: Action | None
    plan: Plan | None = None
    stop: StopRecord | None = None
    objection: str = ""

    @property
    def absent(self) -> tuple[int, ...]:
        """The workers that are dead, so that nothing can be saved together."""
        return () if self.stop is None else self.stop.absent


def make_plan(outlook: Outlook, pending: Sequence[ReceivedNotice], *, is_over: bool, is_left_out: bool) -> Plan | None:
    """**Pure.** Returns what this worker asks for because of its notices; None if it may train on.

    Args:
        outlook: What it knows.
        pending: The notices.
        is_over: True if its training has ended. A loop that continued in the remaining time would have to be notified
            again, and nothing else would do it.
        is_left_out: True if a save at this step was skipped, because another was in progress.
    """
    plan = decide(outlook)
    if is_over and outlook.demand is not Demand.SAVE and plan.action is not Action.LEAVE:
        plan = Plan(Action.LEAVE, "no step remains")
    if not pending or plan.action is Action.TRAIN or (plan.action is Action.SAVE and is_left_out):
        return None
    return replace(
        plan,
        text=pending[0].notice.text,
        demand=Demand.LEAVE if plan.action is Action.LEAVE else outlook.demand,
        left_seconds=outlook.left_seconds,
        by_hand=is_by_hand(pending),
        saves=has_time_to_save(outlook),
    )
