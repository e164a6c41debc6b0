"""What saving at an interval is expected to lose, against the sums that the formulas stand for."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policies.saving import ExpectedLosses, daly_interval_seconds, expect_losses


def lose(
    interval: float, mtbf: float, stall: float = 0.0, durable: float = 0.0, restore: float = 0.0
) -> ExpectedLosses:
    return expect_losses(
        interval, stall_seconds=stall, durable_seconds=durable, restore_seconds=restore, mtbf_seconds=mtbf
    )


def useful_share(interval: float, mtbf: float, stall: float, durable: float, restore: float) -> float:
    """What is kept: each save by the chance that the process lives until it is durable."""
    kept = 0.0
    for number in itertools.count(1):
        chance = math.exp(-(restore + number * interval + (number - 1) * stall + durable) / mtbf)
        kept += interval * chance
        if chance < 1e-15:
            return kept / mtbf
    raise AssertionError


@given(
    interval=st.floats(0.05, 20),
    stall=st.floats(0, 3),
    delay=st.floats(0, 10),
    restore=st.floats(0, 10),
)
def test_what_is_lost_and_what_is_kept_are_all_there_is(
    interval: float, stall: float, delay: float, restore: float
) -> None:
    losses = lose(interval, 10.0, stall, stall + delay, restore)
    kept = useful_share(interval, 10.0, stall, stall + delay, restore)
    assert losses.lost_share == pytest.approx(1 - kept, rel=1e-6, abs=1e-9)
    assert losses.saving_share == pytest.approx(stall / (interval + stall))


def test_known_values() -> None:
    free = lose(interval=100.0, mtbf=100.0)
    assert free.saving_share == 0
    assert free.lost_share == pytest.approx(1 - 1 / (math.e - 1))
    assert free.per_failure_seconds == pytest.approx(100 * (1 - 1 / (math.e - 1)))
    rare = lose(interval=600.0, mtbf=1e6, stall=6.0, durable=20.0, restore=30.0)
    assert rare.saving_share == pytest.approx(0.0099, abs=1e-5)
    assert rare.per_failure_seconds == pytest.approx(606 / 2 + 14 + 30, rel=1e-3)
    assert rare.failures_share == pytest.approx((606 / 2 + 14 + 30) / 1e6, rel=0.02)


def test_a_failure_undoes_half_a_period_or_less() -> None:
    assert lose(interval=2.0, mtbf=1e12).per_failure_seconds == pytest.approx(1.0)
    # On both sides of where the formula changes.
    near = [lose(interval=1e-4 * factor, mtbf=1.0).per_failure_seconds for factor in (0.999, 1.001)]
    assert near[0] == pytest.approx(near[1], rel=0.003)
    assert lose(interval=1e9, mtbf=1.0).per_failure_seconds == pytest.approx(1.0)


def test_a_job_that_never_lives_to_its_save_loses_all() -> None:
    assert lose(interval=1e9, mtbf=1.0, stall=1.0).lost_share == pytest.approx(1.0)
    assert lose(interval=1.0, mtbf=1.0, durable=1e6).lost_share == pytest.approx(1.0)


@given(st.floats(0.01, 100), st.floats(1e3, 1e6))
def test_the_interval_of_young_and_daly_loses_least(cost: float, mtbf: float) -> None:
    best = lose(daly_interval_seconds(cost, mtbf), mtbf, cost, cost).lost_share
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert best <= lose(factor * daly_interval_seconds(cost, mtbf), mtbf, cost, cost).lost_share


@given(st.floats(1e-3, 1e6), st.floats(1e-6, 1e10), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4))
def test_shares_are_shares(interval: float, mtbf: float, stall: float, durable: float, restore: float) -> None:
    losses = lose(interval, mtbf, stall, durable, restore)
    assert 0 <= losses.saving_share <= 1
    assert 0 <= losses.failures_share <= 1
    assert losses.lost_share <= 1 + 1e-12
    assert 0 <= losses.per_failure_seconds < math.inf
