"""Training with a framework goes on with the samples that are left, however they are drawn and batched."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from lives import Life, check_same, live, live_together

import preloaded

pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

PROGRAM = "places_in_data.py"
FRAMEWORKS = ("accelerate", "lightning", "transformers")
PRELOAD = (
    *preloaded.TRAINING,
    "accelerate",
    "datasets",
    "lightning.pytorch",
    "transformers.trainer",
    "holdfast.integrations.frameworks.accelerate.loop",
    "holdfast.integrations.frameworks.lightning.fit",
    "holdfast.integrations.frameworks.transformers.callback",
)
OWN_DRAWS = ("weighted", "buckets", "stream", "shuffle")
STREAMS = ("plain", "shuffled", "filtered", "shuffled mapped", "interleaved shuffled")


def train(*options: str | Path) -> Life:
    return live(PROGRAM, *options, preload=PRELOAD)


def leave(*options: str | Path) -> Life:
    life = Life(PROGRAM, *options, preload=PRELOAD)
    assert life.end() == 42, life.errors
    return life


@pytest.mark.parametrize(
    ("framework", "data", "workers"),
    [
        *product(FRAMEWORKS, (*OWN_DRAWS, *STREAMS), ("0",)),
        *product(FRAMEWORKS, ("weighted", "shuffled", "plain"), ("2",)),
    ],
)
def test_it_takes_the_batches_of_an_untouched_run(framework: str, data: str, workers: str, tmp_path: Path) -> None:
    options = (f"--framework={framework}", f"--data={data}", f"--workers={workers}")
    untouched = train(tmp_path / "untouched", *options)
    # In the first epoch, and in the second.
    lives = [leave(tmp_path / "left", *options, f"--leaves-after={count}") for count in (4, 5)]
    check_same([*lives, train(tmp_path / "left", *options)], untouched)
    assert {json.loads(line)["epoch"] for line in untouched.lines[:-1]} >= {0, 1}


def samples_of(*lives: Life) -> list[int]:
    return [number for life in lives for line in life.lines if '"seen"' in line for number in json.loads(line)["seen"]]


CHANGES = {
    "larger": ("--batch=4", "--batch=8"),
    "smaller": ("--batch=8", "--batch=4"),
    "odd": ("--batch=4", "--batch=7"),
    "one larger than the rest": ("--batch=4", "--batch=40"),
    "batch for accumulation": ("--batch=2 --accumulate=4", "--batch=4 --accumulate=2"),
    "accumulation": ("--batch=4", "--batch=4 --accumulate=2"),
    "more data": ("--batch=4", "--batch=4 --length=60"),
    "more data in larger batches": ("--batch=4", "--batch=8 --length=60"),
}


@pytest.mark.parametrize(("framework", "change"), [*product(FRAMEWORKS, CHANGES)])
def test_after_a_change_each_sample_of_the_epoch_comes_once(framework: str, change: str, tmp_path: Path) -> None:
    before, after = (words.split() for words in CHANGES[change])
    options: list[str | Path] = [tmp_path, f"--framework={framework}", "--length=48", "--epochs=2"]
    left = leave(*options, *before, "--leaves-after=3")
    again = leave(*options, *after, "--leaves-after=2")
    rest = train(*options, *after)
    total = 60 if "data" in change else 48
    seen = samples_of(left, again, rest)
    assert sorted(seen[:total]) == list(range(total))
    assert sorted(seen[total:]) == list(range(total))
    words = [line for line in again.errors.splitlines() if "at the save)" in line]
    assert len(words) == (change != "accumulation"), again.errors
    assert "at the save)" not in rest.errors
    # The steps follow each other.
    steps = [json.loads(line)["step"] for life in (left, again, rest) for line in life.lines if '"step"' in line]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_after_a_change_between_two_epochs_the_next_one_is_whole(framework: str, tmp_path: Path) -> None:
    options: list[str | Path] = [tmp_path, f"--framework={framework}", "--length=48", "--epochs=3"]
    left = leave(*options, "--batch=4", "--leaves-after=12")
    rest = train(*options, "--batch=8", "--length=52")
    assert sorted(samples_of(left)) == list(range(48))
    seen = samples_of(rest)
    assert sorted(seen[:52]) == sorted(seen[52:]) == list(range(52))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_change_that_makes_the_resume_inexact_is_reported(framework: str, tmp_path: Path) -> None:
    options: list[str | Path] = [tmp_path, f"--framework={framework}", "--epochs=2", "--data=weighted"]
    leave(*options, "--length=48", "--leaves-after=3")
    rest = train(*options, "--length=60")
    assert (
        "samples in the dataset 60 (48 at the save): in the rest of this epoch some samples may come twice"
        in rest.errors
    )


def test_two_workers_of_accelerate_share_what_is_left(tmp_path: Path) -> None:
    options = (tmp_path, "--length=48", "--epochs=2")
    before = live_together(PROGRAM, *options, "--leaves-after=2", preload=PRELOAD, ends_with=42)
    after = live_together(PROGRAM, *options, "--batch=5", preload=PRELOAD)
    trained = samples_of(*before)
    assert len(trained) == len(set(trained)) == 16
    # accelerate fills the last batches with the first samples.
    in_epoch = [line for life in after for line in life.lines if '"epoch": 0' in line]
    assert {number for line in in_epoch for number in json.loads(line)["seen"]} >= {*range(48)} - {*trained}
    assert not {number for line in in_epoch for number in json.loads(line)["seen"]} & {*trained}


@pytest.mark.parametrize(("before", "after", "is_exact"), [("4", "8", True), ("8", "4", True), ("4", "5", False)])
def test_keras_goes_on_in_other_batches(before: str, after: str, is_exact: bool, tmp_path: Path) -> None:
    options: list[str | Path] = [tmp_path, "--framework=keras", "--length=48", "--epochs=2"]
    left = leave(*options, f"--batch={before}", "--leaves-after=4")
    rest = train(*options, f"--batch={after}")
    assert f"batch size {after} ({before} at the save)" in rest.errors
    assert ("may come twice" in rest.errors) is not is_exact
    seen = samples_of(left, rest)
    assert {*seen[:-48]} == {*seen[-48:]} == {*range(48)}
    assert len(seen) == 96 or not is_exact
