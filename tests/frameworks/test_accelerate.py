"""A loop that accelerate prepares goes on where it was, whatever ended it."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from lives import Life, check_same, live, live_together

import preloaded

pytest.importorskip("accelerate")

PROGRAM = "accelerate_training.py"
PRELOAD = (*preloaded.TRAINING, "accelerate", "holdfast.integrations.accelerate.loop")


def train(*options: str | Path) -> Life:
    return live(PROGRAM, *options, preload=PRELOAD)


def begin(*options: str | Path) -> Life:
    return Life(PROGRAM, *options, preload=PRELOAD)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--workers=2", "--accumulate=2"),
        ("--accumulate=3", "--seedable"),
        ("--stream",),
        ("--dispatch", "--accumulate=2"),
        ("--stream", "--workers=1"),
    ],
    ids=" ".join,
)
def test_killed_at_any_moment_it_ends_as_an_untouched_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    untouched = train(tmp_path / "untouched", *options)
    seed = random.randrange(10**6)
    print("seed", seed)  # noqa: T201
    moments = random.Random(seed)
    lives = []
    for _ in range(5):
        lives.append(begin(tmp_path / "killed", *options))
        lives[-1].wait_steps(moments.randint(1, 9))
        lives[-1].send(signal.SIGKILL)
        lives[-1].end()
    lives.append(train(tmp_path / "killed", *options))
    check_same(lives, untouched)


def test_asked_to_leave_twice_it_trains_no_step_again(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched")
    lives = []
    for steps in (6, 11):
        lives.append(begin(tmp_path / "asked"))
        lives[-1].wait_steps(steps)
        lives[-1].send(signal.SIGTERM)
        assert lives[-1].end() == 42, lives[-1].errors
    lives.append(train(tmp_path / "asked"))
    # A step is printed after it has counted: the last one of a life that was asked to leave is not.
    expected = set(untouched.lines)
    assert all(line in expected for life in lives for line in life.lines)
    assert lives[-1].lines[-1] == untouched.lines[-1]
    steps_told = [line for life in lives for line in life.lines if line.startswith('{"step"')]
    assert len(steps_told) == len(set(steps_told)) == 42 - 2


@pytest.mark.parametrize(
    "options",
    [(), ("--split",), ("--dispatch", "--drop-last"), ("--seedable", "--accumulate=2"), ("--fsdp",)],
    ids=" ".join,
)
def test_two_workers_of_which_one_is_killed_end_as_if_untouched(tmp_path: Path, options: tuple[str, ...]) -> None:
    untouched = live_together(PROGRAM, tmp_path / "untouched", *options, preload=PRELOAD)
    states = {json.loads(life.first_step())["state"] for life in untouched}
    assert len(states) == (2 if "--fsdp" in options else 1)
    killed = live_together(PROGRAM, tmp_path / "killed", *options, preload=PRELOAD, kill_after=10)
    after = live_together(PROGRAM, tmp_path / "killed", *options, preload=PRELOAD)
    for rank in range(2):
        check_same([killed[rank], after[rank]], untouched[rank])
        assert after[rank].first_step() != untouched[rank].first_step()


def test_filling_the_last_batch_from_the_first_is_warned_of(tmp_path: Path) -> None:
    first, _ = live_together(PROGRAM, tmp_path, "--dispatch", preload=PRELOAD)
    assert "accelerate fills the last batch of an epoch" in first.errors
