"""A loop that accelerate prepares goes on where it was, whatever ended it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lives import Life, live, live_together

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
