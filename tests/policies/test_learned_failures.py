"""`Auto` learns how often a run dies, from what its own journal says of its earlier starts."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.catalog.starts import PastStarts, count_starts, read_starts
from holdfast.policies import Auto, SaveMoment


def useful_share(interval: float, cost: float, failure_seconds: float) -> float:
    """The share of the time that is kept of training, if failures come at any time with the same probability.

    A stretch of an interval and its save succeeds with probability exp(-length / mean); a failure loses what it has of
    the stretch.
    """
    return interval / (failure_seconds * math.expm1(min((interval + cost) / failure_seconds, 500.0)))


def moment(cost: float, failures: int, observed: float) -> SaveMoment:
    return SaveMoment(
        step=1000,
        last_saved_step=900,
        save_blocked_seconds=cost,
        failures=failures,
        observed_seconds=observed,
    )


@pytest.mark.parametrize("failure_seconds", [120.0, 600.0, 3600.0, 6 * 3600.0, 24 * 3600.0])
@pytest.mark.parametrize("cost", [0.05, 1.0, 10.0, 60.0])
def test_is_as_good_as_the_best_interval_from_the_tenth_failure_on(cost: float, failure_seconds: float) -> None:
    best = max(useful_share(1.02**power, cost, failure_seconds) for power in range(-100, 800))
    generator = random.Random(10)
    shares = []
    for _ in range(100):
        lives = [generator.expovariate(1 / failure_seconds) for _ in range(40)]
        for failures in (10, 15, 25, 40):
            chosen = Auto().chosen(moment(cost, failures, sum(lives[:failures]))).seconds
            shares.append(useful_share(chosen, cost, failure_seconds))
    assert sum(shares) / len(shares) > best - 0.02


def test_assumes_six_hours_and_one_percent_until_the_first_failure() -> None:
    assert Auto().chosen(moment(0.01, 0, 1e6)) == Auto(0.01, 6 * 3600.0).chosen(moment(0.01, 0, 1e6))
    assert Auto().chosen(moment(30.0, 0, 60.0)).bound == "overhead"
    assert Auto().chosen(moment(30.0, 3, 900.0)).bound == "optimum"
    assert Auto(overhead=0.01).chosen(moment(30.0, 3, 900.0)).bound == "overhead"
    assert Auto(mtbf_seconds=60.0).failure_seconds(moment(1.0, 9, 1e6)) == 60.0


def test_one_early_failure_changes_little() -> None:
    assert Auto().failure_seconds(moment(1.0, 1, 60.0)) > 3600
    # Time without a failure counts, too.
    assert Auto().failure_seconds(moment(1.0, 1, 1e6)) > 6e5


def event(kind: str, at: float) -> dict[str, Any]:
    return {"kind": kind, "at_unix_seconds": at}


def test_a_start_lasts_until_half_an_interval_after_its_last_save() -> None:
    events = [
        event("generation_opened", 100.0),
        *(event("committed", at) for at in (110.0, 120.0, 130.0)),
        # Dead at once, before a save: it is not known whether that was a start.
        event("restored", 140.0),
        event("restored", 150.0),
        event("generation_opened", 152.0),
        event("committed", 160.0),
        event("committed", 180.0),
    ]
    assert count_starts(events) == PastStarts(2, (30.0 + 5.0) + (30.0 + 10.0))
    assert count_starts([*events, event("leaving", 181.0)]) == PastStarts(1, 35.0 + 30.0)
    assert count_starts([]) == PastStarts()


def test_the_newest_fifty_starts_count() -> None:
    events = [
        one
        for start in range(80)
        for one in (event("generation_opened", start * 10.0), event("committed", start * 10.0))
    ]
    assert count_starts(events).failures == 50


def train_until(total: int, directory: Path) -> None:
    with hf.resumable(directory, count=1, save_every=1) as run:
        for step in run.steps(10):
            if step == total:
                raise ZeroDivisionError


def test_a_run_learns_from_its_own_journal(tmp_path: Path) -> None:
    for total in (2, 4, 6):
        with pytest.raises(ZeroDivisionError):
            train_until(total, tmp_path)
    starts = read_starts(tmp_path)
    assert starts.failures == 3
    assert 0 < starts.observed_seconds < 100
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("{broken\n[]\n" + json.dumps({"kind": "committed"}) + "\n")
    assert read_starts(tmp_path) == starts
    learning = hf.CheckpointManager(tmp_path, hf.Checkpoint(count=1), save_every="auto")
    assert learning.lineage.pace.moment(1, None, None).failures == 3
    told = hf.CheckpointManager(tmp_path, hf.Checkpoint(count=1), save_every=hf.Auto(mtbf_seconds=60))
    assert told.lineage.pace.moment(1, None, None).failures == 0
    assert read_starts(tmp_path / "none") == PastStarts()
