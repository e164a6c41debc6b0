"""Training with a framework goes on with the samples that are left, however they are drawn and batched."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from lives import Life, check_same, live

import preloaded

pytest.importorskip("lightning")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

PROGRAM = "places_in_data.py"
DOORS = ("accelerate", "lightning", "transformers")
PRELOAD = (
    *preloaded.TRAINING,
    "accelerate",
    "datasets",
    "lightning.pytorch",
    "transformers.trainer",
    "holdfast.integrations.accelerate.loop",
    "holdfast.integrations.lightning.fit",
    "holdfast.integrations.transformers.callback",
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
    ("door", "data", "workers"),
    [*product(DOORS, (*OWN_DRAWS, *STREAMS), ("0",)), *product(DOORS, ("weighted", "shuffled", "plain"), ("2",))],
)
def test_it_takes_the_batches_of_an_untouched_run(door: str, data: str, workers: str, tmp_path: Path) -> None:
    options = (f"--door={door}", f"--data={data}", f"--workers={workers}")
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


@pytest.mark.parametrize(("door", "change"), [*product(DOORS, CHANGES)])
def test_after_a_change_each_sample_of_the_epoch_comes_once(door: str, change: str, tmp_path: Path) -> None:
    before, after = (words.split() for words in CHANGES[change])
    options = [tmp_path, f"--door={door}", "--length=48", "--epochs=2"]
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
