"""Decides what to do between two steps after a notice. Pure: no I/O, no clock, no thread."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from holdfast.preemption.sources.protocol import Demand, Notice

MARGIN_SECONDS: Final = 2.0
"""The time reserved before the end, for the process to exit."""

_PATIENCE_SECONDS: Final = 10.0
"""The time after which a warning says that the loop has not reached the end of its step, if no end is known."""

_STEP_FACTOR: Final = 1.25
_SAVE_FACTOR: Final = 1.5
"""By how much the next step and the next save may take longer than those before."""

_GUESS_FACTOR: Final = 4.0
"""By how much the first save may take longer than its beginning suggests."""

_AGREE_SECONDS: Final = 1.0
"""How long it may take until all workers know of a call; the fastest may be a step ahead by then."""


class Action(enum.Enum):
    """An action between two steps."""

    TRAIN = "train on"
    SAVE = "save and train on"
    OBEY = "do what the program has ordered, and train on"
    LEAVE = "save and leave"


class StopOrder(msgspec.Struct, frozen=True):
    """A request of the program, or because of a step that is not finite, to all workers at one step.

    Attributes:
        cause: Why, in words.
        raises: True to end training with an error.
        step: The step to go back to; None for the newest good one.
        skipped_batches: How many batches to leave out from there on; None for all that were drawn since.
    """

    cause: str
    raises: bool = False
    step: int | None = None
    skipped_batches: int | None = None


class Plan(msgspec.Struct, frozen=True):
    """An action that one worker asks for, with the reason.

    Attributes:
        action: The action.
        reason: Why now.
        text: The notice.
        demand: What it asks for.
        left_seconds: The remaining time then; None if it is not known.
        by_hand: True if a person at a terminal asked for it, and no other source.
        saves: True if there is time to save, if a save was made since the notice.
        rank: The worker.
        order: The order of `OBEY`.
    """

    action: Action
    reason: str
    text: str = ""
    demand: Demand = Demand.SAVE
    left_seconds: float | None = None
    by_hand: bool = False
    saves: bool = True
    rank: int = 0
    order: StopOrder | None = None


class ReceivedNotice(msgspec.Struct, frozen=True):
    """A notice, and when it arrived by the monotonic clock."""

    notice: Notice
    at: float


class CombinedDemand(NamedTuple):
    """The combined demand of several notices, and the remaining seconds; None if no end is known."""

    demand: Demand
    left_seconds: float | None


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The facts between two steps.

    Attributes:
        demand: The demand.
        left_seconds: The time until the process must be gone; None if it is not known.
        step_seconds: The longest recent step; None if none was measured.
        save_seconds: How long the newest save took until it was durable; None if none was measured.
        saving_seconds: How long the save in progress has taken so far; None if there is none.
        is_saved: True if a save was begun since the notice.
        has_failed: True if that save has failed.
        copy_seconds: How long the newest copy into the farthest tier of the run took; None if there was none.
    """

    demand: Demand
    left_seconds: float | None = None
    step_seconds: float | None = None
    save_seconds: float | None = None
    saving_seconds: float | None = None
    is_saved: bool = False
    has_failed: bool = False
    copy_seconds: float | None = None

    @property
    def next_save_seconds(self) -> float:
        """How long a save may take, with a margin; one in progress may take twice as long as it has."""
        known = _SAVE_FACTOR * (self.save_seconds or 0.0)
        return max(known, 2 * (self.saving_seconds or 0.0))

    @property
    def rest_seconds(self) -> float:
        """How much longer the save in progress may take."""
        saving = self.saving_seconds
        return 0.0 if saving is None else max(self.next_save_seconds - saving, 0.0)

    @property
    def last_copy_seconds(self) -> float:
        """The time for the copy of the last save into the farthest tier; 0 if it does not fit into what remains."""
        known = _SAVE_FACTOR * (self.copy_seconds or 0.0)
        fits = self.left_seconds is not None and self.next_save_seconds + known + MARGIN_SECONDS <= self.left_seconds
        return known if fits else 0.0

    @property
    def needed_seconds(self) -> float:
        """The time for another step, with the save after it and its copy and, before that, the rest of the save in
        progress."""
        step = _STEP_FACTOR * (self.step_seconds or 0.0)
        # The save in flight goes on while the step runs.
        return max(step, self.rest_seconds) + self.next_save_seconds + self.last_copy_seconds + MARGIN_SECONDS


def combine(received: Sequence[ReceivedNotice], grace_period: float | None, now: float) -> CombinedDemand:
    """**Pure.** Returns the combined demand of several notices, and the time that remains at `now` (monotonic).

    `grace_period` is the user's limit for training on; None for what the sources say.
    """
    stopping = [each for each in received if each.notice.demand is not Demand.SAVE]
    if not stopping:
        return CombinedDemand(Demand.SAVE, None)
    ends = [each.at + each.notice.left_seconds for each in stopping if each.notice.left_seconds is not None]
    orders = [each for each in stopping if each.notice.demand is Demand.LEAVE]
    is_hurried = sum(each.notice.insists for each in orders) > 1
    if is_hurried or grace_period == 0 or (grace_period is None and (orders or not ends)):
        return CombinedDemand(Demand.LEAVE, min(ends) - now if ends else None)
    if grace_period is not None:
        ends.append(min(each.at for each in stopping) + grace_period)
    return CombinedDemand(Demand.LEAVE_BY, min(ends) - now)


def is_by_hand(received: Sequence[ReceivedNotice]) -> bool:
    """**Pure.** Returns True if a person at a terminal asked, and no other source."""
    return all(each.notice.by_hand for each in received)


def allow_for_others(outlook: Outlook) -> Outlook:
    """**Pure.** Adjusts the outlook for one of several workers: a step takes longer until all of them have ended it."""
    if outlook.step_seconds is None:
        return outlook
    return replace(outlook, step_seconds=2 * outlook.step_seconds + _AGREE_SECONDS)


def to_spare(left_seconds: float | None) -> float | None:
    """**Pure.** Returns how much longer others may be waited for, for example in a save; None if no end is known."""
    return None if left_seconds is None else left_seconds - MARGIN_SECONDS


def decide(outlook: Outlook) -> Plan:
    """**Pure.** Returns what to do between two steps."""
    if outlook.demand is Demand.SAVE:
        if outlook.is_saved:
            return Plan(Action.TRAIN, "the state is saved, and nothing asks the job to stop")
        return Plan(Action.SAVE, "the machine may be taken away")
    if outlook.demand is Demand.LEAVE or outlook.left_seconds is None:
        return Plan(Action.LEAVE, "at once: no grace period is set, or a second signal ended it")
    left, needed = outlook.left_seconds, outlook.needed_seconds
    if not outlook.is_saved:
        # The save that is begun now, and the one before the end.
        needed += outlook.next_save_seconds
        if left <= needed:
            return Plan(Action.LEAVE, f"{left:.3g} s remain, and a step with two saves may take {needed:.3g} s")
        return Plan(Action.SAVE, f"{left:.3g} s remain, and training continues")
    if outlook.step_seconds is None:
        return Plan(Action.LEAVE, "no step was measured yet, so the duration of the next one is unknown")
    if left <= needed:
        return Plan(Action.LEAVE, f"{left:.3g} s remain, and a step with a save may take {needed:.3g} s")
    return Plan(Action.TRAIN, f"{left:.3g} s remain, and a step with a save takes at most {needed:.3g} s")


def has_time_to_save(outlook: Outlook) -> bool:
    """**Pure.** Returns True if another save can end in time, when one was made since the notice.

    It begins when the one in progress has ended. If it cannot end in time, the training since that save is given up
    rather than risking that the process is killed.
    """
    if not outlook.is_saved or outlook.has_failed or outlook.left_seconds is None:
        return True
    saves_seconds = outlook.rest_seconds + outlook.next_save_seconds
    if outlook.saving_seconds is not None and outlook.save_seconds is None:
        # The first save of all is in flight, and only a guess says how long it takes.
        saves_seconds *= _GUESS_FACTOR
    return outlook.left_seconds > saves_seconds + MARGIN_SECONDS / 2


def find_lateness(received: Sequence[ReceivedNotice], left_seconds: float | None, passed_at: float, now: float) -> str:
    """**Pure.** Returns the warning about a loop that was asked to stop and does not reach the end of its step, if any.

    It reached the end of one at `passed_at`, by the clock of `now`.
    """
    stopping = [each for each in received if each.notice.demand is not Demand.SAVE]
    if not stopping:
        return ""
    patience_seconds = _PATIENCE_SECONDS if left_seconds is None else min(max(left_seconds, 1.0), _PATIENCE_SECONDS)
    waited_seconds = now - max(stopping[0].at, passed_at)
    if waited_seconds < patience_seconds:
        return ""
    return (
        f"{waited_seconds:.0f} s after a notice, the loop has not reached the end of its step, and until then "
        "nothing newer than the last checkpoint can be saved. Use checkpointable() around long work outside of "
        "steps, or leave such work when should_stop() returns True"
    )
