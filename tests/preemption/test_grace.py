"""What is decided between two steps after a notice: as a table, and what holds for all of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.preemption.grace import (
    MARGIN_SECONDS,
    Action,
    Outlook,
    ReceivedNotice,
    combine,
    decide,
    has_time_to_save,
)
from holdfast.preemption.sources.protocol import Demand, Notice

SAVE, LEAVE_BY, LEAVE = Demand.SAVE, Demand.LEAVE_BY, Demand.LEAVE


def received(demand: Demand, at: float = 0.0, left: float | None = None, *, insists: bool = False) -> ReceivedNotice:
    return ReceivedNotice(Notice(source="s", text="t", demand=demand, left_seconds=left, insists=insists), at)


@pytest.mark.parametrize(
    ("notices", "grace", "expected"),
    [
        # What sources say by themselves.
        ([received(SAVE)], None, (SAVE, None)),
        ([received(LEAVE)], None, (LEAVE, None)),
        ([received(LEAVE, left=30)], None, (LEAVE, 20)),
        ([received(LEAVE_BY, left=120)], None, (LEAVE_BY, 110)),
        ([received(LEAVE_BY)], None, (LEAVE, None)),
        # The earliest end counts, and an order more than a forecast.
        ([received(SAVE), received(LEAVE_BY, 2, 120), received(LEAVE_BY, 5, 30)], None, (LEAVE_BY, 25)),
        ([received(LEAVE_BY, left=120), received(LEAVE)], None, (LEAVE, 110)),
        # What the user allows.
        ([received(LEAVE)], 60, (LEAVE_BY, 50)),
        ([received(LEAVE, 4)], 60, (LEAVE_BY, 54)),
        ([received(LEAVE, left=30)], 60, (LEAVE_BY, 20)),
        ([received(LEAVE_BY, left=3600)], 60, (LEAVE_BY, 50)),
        ([received(LEAVE_BY, left=3600)], 0, (LEAVE, 3590)),
        ([received(LEAVE)], 0, (LEAVE, None)),
        ([received(SAVE)], 60, (SAVE, None)),
        # Further notices do not lengthen it, and a second signal ends it.
        ([received(LEAVE), received(LEAVE, 9)], 60, (LEAVE_BY, 50)),
        ([received(LEAVE, insists=True), received(LEAVE, 9, insists=True)], 60, (LEAVE, None)),
        ([received(LEAVE, left=30, insists=True), received(LEAVE, 9, insists=True)], 60, (LEAVE, 20)),
    ],
)
def test_what_notices_ask_for_together(
    notices: list[ReceivedNotice], grace: float | None, expected: tuple[Demand, float | None]
) -> None:
    assert combine(notices, grace, 10.0) == expected


def outlook(
    demand: Demand = LEAVE_BY, left: float | None = 100.0, step: float | None = 1.0, **known: object
) -> Outlook:
    return Outlook(demand=demand, left_seconds=left, step_seconds=step, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        (outlook(SAVE), Action.SAVE),
        (outlook(SAVE, is_saved=True), Action.TRAIN),
        (outlook(LEAVE), Action.LEAVE),
        (outlook(LEAVE, None), Action.LEAVE),
        # First a save, if two of them and a step have room.
        (outlook(), Action.SAVE),
        (outlook(step=None), Action.SAVE),
        (outlook(save_seconds=20), Action.SAVE),
        (outlook(save_seconds=40), Action.LEAVE),
        (outlook(step=90), Action.LEAVE),
        (outlook(left=1), Action.LEAVE),
        (outlook(left=-5), Action.LEAVE),
        # Then training, as long as a step and a save have room.
        (outlook(is_saved=True), Action.TRAIN),
        (outlook(is_saved=True, save_seconds=40), Action.TRAIN),
        (outlook(is_saved=True, save_seconds=66), Action.LEAVE),
        (outlook(is_saved=True, step=79), Action.LEAVE),
        (outlook(is_saved=True, step=None), Action.LEAVE),
        # A save in flight may take as long again as it has taken, and the next one as long as all of it.
        (outlook(is_saved=True, saving_seconds=20), Action.TRAIN),
        (outlook(is_saved=True, saving_seconds=33), Action.LEAVE),
        # The last save is copied into the farthest tier, if that has room at all.
        (outlook(is_saved=True, copy_seconds=40), Action.TRAIN),
        (outlook(is_saved=True, copy_seconds=65), Action.LEAVE),
        (outlook(is_saved=True, copy_seconds=66), Action.TRAIN),
    ],
)
def test_what_is_done(seen: Outlook, action: Action) -> None:
    verdict = decide(seen)
    assert verdict.action is action
    assert verdict.reason


def test_there_is_time_for_a_save_or_there_is_not() -> None:
    assert has_time_to_save(outlook(left=5, save_seconds=20)), "without another one it is tried in any case"
    assert not has_time_to_save(outlook(left=5, save_seconds=20, is_saved=True))
    assert has_time_to_save(outlook(left=50, save_seconds=20, is_saved=True))
    assert has_time_to_save(outlook(left=None, is_saved=True))
    assert has_time_to_save(outlook(left=5, save_seconds=20, is_saved=True, has_failed=True)), "that one is of no use"
    # The next one begins when the one in flight has ended.
    assert has_time_to_save(outlook(left=4.1, is_saved=True, saving_seconds=1, save_seconds=1))
    assert not has_time_to_save(outlook(left=3.9, is_saved=True, saving_seconds=1, save_seconds=1))
    # Nobody knows how long a first save takes until it has ended.
    assert has_time_to_save(outlook(left=30, is_saved=True, saving_seconds=1))
    assert not has_time_to_save(outlook(left=6, is_saved=True, saving_seconds=1))
    assert not has_time_to_save(outlook(left=30.5, save_seconds=20, is_saved=True)), "nor would the process be gone"


times = st.floats(0, 1e6)


@given(st.floats(-1e3, 1e6), times, times, st.one_of(st.none(), times), st.booleans())
def test_no_step_is_begun_that_cannot_end_in_time(
    left: float, step: float, save: float, saving: float | None, is_saved: bool
) -> None:
    seen = outlook(left=left, step=step, save_seconds=save, saving_seconds=saving, is_saved=is_saved)
    if decide(seen).action is not Action.LEAVE:
        assert step + save + MARGIN_SECONDS <= left


@given(times, times, st.floats(0.1, 1e5), st.floats(0.01, 1e3))
def test_training_in_a_grace_period_comes_to_an_end_in_time(
    step: float, save: float, grace: float, jitter: float
) -> None:
    """Steps and saves that take as long as those before: the process is gone before the end."""
    left, is_saved, steps = grace, False, 0
    while True:
        seen = outlook(left=left, step=step + jitter, save_seconds=save, is_saved=is_saved)
        action = decide(seen).action
        if action is Action.LEAVE:
            break
        if action is Action.SAVE:
            is_saved = True
        # Long periods of short steps are passed through in leaps, which end before the end of the period.
        leap = max(1, int(max(left - seen.needed_seconds, 0) / (step + jitter) / 2))
        left -= leap * (step + jitter)
        steps += leap
    if steps:
        assert left >= (save if has_time_to_save(seen) else 0)
