"""Jobs, readers and clean-up on one storage, in orders that follow from seeds: only what was planted is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.planted import BUGS
from simulation.world import kind_of, simulate

SEEDS = 1000
FOUND = (51_904, 100_227)
"""Others that have found something, which has been mended."""

PAGE = Path(__file__).parents[2] / "docs/internals/crash-safety.md"


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS // 4))
def test_simulated_jobs_lose_nothing_and_see_nothing_half(first: int) -> None:
    acknowledged = restored = fenced = deaths = 0
    for seed in range(first, first + SEEDS // 4):
        outcome = simulate(seed)
        if outcome.failure is not None:
            raise AssertionError(f"python -m simulation --seed {seed} shows: {outcome.failure}") from outcome.failure
        acknowledged += outcome.acknowledged
        restored += outcome.restored
        fenced += outcome.fenced
        deaths += outcome.deaths
    assert min(acknowledged, restored, fenced, deaths) > 50, "too little happens for anything to be found"


@pytest.mark.parametrize("seed", FOUND)
def test_seed_that_has_found_something_finds_nothing(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.failure is None
    assert outcome.acknowledged > 0


# The rarest of them takes as long as ten others.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "unsynced-removal")) for name in BUGS]
)
def test_planted_bug_is_found_within_the_seeds(name: str) -> None:
    bug = BUGS[name]
    # Where it was found last comes first: it is there still, unless the program makes other calls now.
    seeds = [bug.seed, *(seed for seed in range(SEEDS) if kind_of(seed) == kind_of(bug.seed))]
    assert f"- {bug.what[:1].upper()}{bug.what[1:]}.\n" in PAGE.read_text(), "the page lists all of them"
    with bug.plant():
        assert any(simulate(seed).failure is not None for seed in seeds)


@pytest.mark.parametrize("seed", [2, 3])
def test_seed_gives_the_same_calls_in_another_process(seed: int) -> None:
    command = [sys.executable, "-m", "simulation", "--seed", str(seed)]
    place = Path(__file__).parent.parent
    paths = os.pathsep.join([str(place), str(place / "support")])
    printed = [
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": order},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in ("0", "1")
    ]
    assert printed[0] == printed[1]
    assert [line.split(maxsplit=2)[1:] for line in printed[0].splitlines()[1:-1]] == [
        [task, what] for task, what in simulate(seed).trace
    ]
