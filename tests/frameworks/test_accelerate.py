"""A loop that accelerate prepares goes on where it was, whatever ended it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from lives import Life, check_example, check_same, interrupt, live, live_together

import preloaded

pytest.importorskip("accelerate")

PROGRAM = "accelerate_training.py"
PRELOAD = (*preloaded.TRAINING, "accelerate", "holdfast.integrations.frameworks.accelerate.loop")

LONG = pytest.mark.long
"""`make test` has the time for one of a kind; `make test-frameworks` runs them all."""


def train(*options: str | Path) -> Life:
    return live(PROGRAM, *options, preload=PRELOAD)


def begin(*options: str | Path) -> Life:
    return Life(PROGRAM, *options, preload=PRELOAD)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=LONG),
        ("--workers=2", "--accumulate=2"),
        pytest.param(("--accumulate=3", "--seedable"), marks=LONG),
        pytest.param(("--stream",), marks=LONG),
        pytest.param(("--dispatch", "--accumulate=2"), marks=LONG),
        pytest.param(("--stream", "--workers=1"), marks=LONG),
        ("--row=last",),
    ],
    ids=" ".join,
)
def test_killed_at_any_moment_it_ends_as_an_untouched_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    untouched = train(tmp_path / "untouched", *options)
    lives = interrupt(lambda: begin(tmp_path / "killed", *options), [signal.SIGKILL] * 5, 1, 8)
    check_same([*lives, train(tmp_path / "killed", *options)], untouched)


def test_asked_to_leave_twice_it_trains_no_step_again(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched")
    lives = interrupt(lambda: begin(tmp_path / "asked"), [signal.SIGTERM] * 2, 3, 10)
    lives.append(train(tmp_path / "asked"))
    # A step is printed after it has counted: the last one of a life that left in it is not, but in an evaluation it is.
    expected = set(untouched.lines)
    assert all(line in expected for life in lives for line in life.lines)
    assert lives[-1].lines[-1] == untouched.lines[-1]
    steps_told = [line for life in lives for line in life.lines if line.startswith('{"step"')]
    assert len(steps_told) == len(set(steps_told)), "a step was trained again"
    assert 42 - 2 <= len(steps_told) <= 42


def test_a_notice_in_an_evaluation_in_a_block_ends_the_job_at_once(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched")
    left = begin(tmp_path / "asked", "--leaves-in=1")
    assert left.end() == 42, left.errors
    check_same([left, train(tmp_path / "asked")], untouched)
    assert left.lines[-1].startswith('{"epoch": 1, ')


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--split",), marks=LONG),
        pytest.param(("--dispatch", "--drop-last"), marks=LONG),
        pytest.param(("--seedable", "--accumulate=2"), marks=LONG),
        pytest.param(("--fsdp",), marks=LONG),
    ],
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


@LONG
def test_loop_that_skips_the_rest_of_an_epoch_is_warned(tmp_path: Path) -> None:
    left = begin(tmp_path, "--row=first", "--leaves-after=16")
    assert left.end() == 42, left.errors
    after = train(tmp_path, "--row=first")
    assert json.loads(after.first_step())["epoch"] == 1
    assert "step 16: the checkpoint is in the middle of one loader's epoch" in after.errors


@LONG
def test_filling_the_last_batch_from_the_first_is_warned_of(tmp_path: Path) -> None:
    first, _ = live_together(PROGRAM, tmp_path, "--dispatch", preload=PRELOAD)
    assert "accelerate fills the last batch of an epoch" in first.errors


@LONG
def test_the_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    check_example("accelerate_loop.py", tmp_path, PRELOAD, "epoch")


def test_loss_with_unnamed_parameters_resumes(tmp_path: Path) -> None:
    untouched = live("own_loss.py", tmp_path / "untouched", "accelerate", "1", preload=PRELOAD)
    killed = Life("own_loss.py", tmp_path / "killed", "accelerate", "1", preload=PRELOAD)
    killed.wait_steps(4)
    killed.send(signal.SIGKILL)
    killed.end()
    check_same([killed, live("own_loss.py", tmp_path / "killed", "accelerate", "2", preload=PRELOAD)], untouched)
