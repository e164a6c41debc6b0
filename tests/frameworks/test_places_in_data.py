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
