"""The states of a guard, as a table: what each turning makes of each."""

from __future__ import annotations

import pytest

from holdfast.preemption.decide import NEXT, GuardState, Turning, make_plan
from holdfast.preemption.grace import Action, Outlook, Plan, ReceivedNotice
from holdfast.preemption.sources.protocol import Demand, Notice

# By turning: the state after it in each state, in the order of `GuardState`; "-" where nothing changes.
TABLE = """
            TRAINING  PAUSED    SETTLING  LEAVING
PAUSE       PAUSED    -         PAUSED    -
RESUME      -         TRAINING  TRAINING  -
AWAIT       -         SETTLING  -         -
SETTLE      SETTLING  SETTLING  -         -
GO          -         -         TRAINING  -
LEAVE       LEAVING   LEAVING   LEAVING   -
FAIL        -         -         TRAINING  PAUSED
RETURN      -         -         -         TRAINING
"""

HEAD, *ROWS = [line.split() for line in TABLE.strip().splitlines()]


@pytest.mark.parametrize("turning", Turning)
def test_turning_leads_to_the_state_of_the_table(turning: Turning) -> None:
    assert [state.name for state in GuardState] == HEAD
    after = {row[0]: row[1:] for row in ROWS}
    assert after.keys() == {each.name for each in Turning}
    found = [NEXT.get((state, turning)) for state in GuardState]
    assert [state.name if state else "-" for state in found] == after[turning.name]


def test_exit_is_undone_only_where_it_was_not_begun() -> None:
    """A program that leaves goes on only if `exit_fn` returns, or in a pause, before the last save of all is shared."""
    assert {turning for state, turning in NEXT if state is GuardState.LEAVING} == {Turning.RETURN, Turning.FAIL}
    assert all((state, Turning.LEAVE) in NEXT for state in GuardState if state is not GuardState.LEAVING)


def notice(demand: Demand, *, by_hand: bool = False) -> ReceivedNotice:
    return ReceivedNotice(Notice(source="s", text="it is time", demand=demand, by_hand=by_hand), 0.0)


LATER = Outlook(demand=Demand.LEAVE_BY, left_seconds=100.0, step_seconds=1.0)


@pytest.mark.parametrize(
    ("outlook", "pending", "flags", "action"),
    [
        (Outlook(demand=Demand.LEAVE), [notice(Demand.LEAVE)], "", Action.LEAVE),
        (Outlook(demand=Demand.LEAVE), [], "", None),
        (Outlook(demand=Demand.SAVE), [notice(Demand.SAVE)], "", Action.SAVE),
        (Outlook(demand=Demand.SAVE, is_saved=True), [notice(Demand.SAVE)], "", None),
        (LATER, [notice(Demand.LEAVE_BY)], "", Action.SAVE),
        # A save that was left out is not asked for again at the same step.
        (LATER, [notice(Demand.LEAVE_BY)], "left out", None),
        # A loop that has ended has no step for the time that is left.
        (LATER, [notice(Demand.LEAVE_BY)], "over", Action.LEAVE),
        (Outlook(demand=Demand.SAVE), [notice(Demand.SAVE)], "over", Action.SAVE),
    ],
)
def test_plan_of_a_worker(outlook: Outlook, pending: list[ReceivedNotice], flags: str, action: Action | None) -> None:
    plan = make_plan(outlook, pending, is_over=flags == "over", is_left_out=flags == "left out")
    assert (plan and plan.action) is action


def test_plan_says_who_asked_and_why() -> None:
    outlook = Outlook(demand=Demand.LEAVE, left_seconds=30.0)
    plan = make_plan(outlook, [notice(Demand.LEAVE, by_hand=True)], is_over=False, is_left_out=False)
    assert plan is not None
    assert plan == Plan(
        Action.LEAVE, plan.reason, text="it is time", demand=Demand.LEAVE, left_seconds=30.0, by_hand=True, saves=True
    )
    mixed = [notice(Demand.LEAVE, by_hand=True), notice(Demand.LEAVE)]
    plan = make_plan(outlook, mixed, is_over=False, is_left_out=False)
    assert plan is not None
    assert not plan.by_hand
