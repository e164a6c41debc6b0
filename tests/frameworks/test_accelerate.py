"""A loop that accelerate prepares goes on where it was, whatever ended it."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from lives import Life, check_same, live, live_together

import holdfast as hf
import preloaded

accelerate = pytest.importorskip("accelerate")

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
    # With dispatch_batches, what the program does at the end of an epoch is left out after a save of its last step.
    check_same(lives, untouched, may_lack='{"epoch"' if "--dispatch" in options else "-")


def test_asked_to_leave_twice_it_trains_no_step_again(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched")
    lives = []
    for steps in (6, 11):
        lives.append(begin(tmp_path / "asked"))
        lives[-1].wait_steps(steps)
        lives[-1].send(signal.SIGTERM)
        assert lives[-1].end() == 42, lives[-1].errors
    lives.append(train(tmp_path / "asked"))
    # A step is told after it has counted: the last one of a life that was asked to leave is not.
    expected = set(untouched.lines)
    assert all(line in expected for life in lives for line in life.lines)
    assert lives[-1].lines[-1] == untouched.lines[-1]
    steps_told = [line for life in lives for line in life.lines if line.startswith('{"step"')]
    assert len(steps_told) == len(set(steps_told)) == 42 - 2


@pytest.mark.parametrize(
    "options", [(), ("--split",), ("--dispatch", "--drop-last"), ("--seedable", "--accumulate=2")], ids=" ".join
)
def test_two_workers_of_which_one_is_killed_end_as_if_untouched(tmp_path: Path, options: tuple[str, ...]) -> None:
    untouched = live_together(PROGRAM, tmp_path / "untouched", *options, preload=PRELOAD)
    killed = live_together(PROGRAM, tmp_path / "killed", *options, preload=PRELOAD, kill_after=10)
    after = live_together(PROGRAM, tmp_path / "killed", *options, preload=PRELOAD)
    for rank in range(2):
        may_lack = '{"epoch"' if "--dispatch" in options else "-"
        check_same([killed[rank], after[rank]], untouched[rank], may_lack=may_lack)
        assert after[rank].first_step() != untouched[rank].first_step()


def test_filling_the_last_batch_from_the_first_is_warned_of(tmp_path: Path) -> None:
    first, _ = live_together(PROGRAM, tmp_path, "--dispatch", preload=PRELOAD)
    assert "accelerate fills the last batch of an epoch" in first.errors


def test_an_accelerator_that_has_prepared_nothing_is_refused(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(hf.errors.UsageError, match="the accelerator has prepared nothing yet"):
        hf.accelerate.resumable(accelerator, tmp_path)


def test_an_object_under_a_prepared_name_is_refused(tmp_path: Path) -> None:
    import torch

    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(hf.errors.UsageError, match="model is what the accelerator has prepared"):
        hf.accelerate.resumable(accelerator, tmp_path, model=model)
