"""Jobs whose run is in tiers, on machines that are lost and come back: only what was planted is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulation.planted_in_tiers import TIER_BUGS
from simulation.tiers import simulate_tiers

SEEDS = 198
FOUND = (214, 415, 619, 810)
"""Others that have found something, which has been mended."""

PAGE = Path(__file__).parents[2] / "docs/internals/crash-safety.md"


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS // 3))
def test_simulated_tiers_lose_nothing_and_mix_nothing(first: int) -> None:
    acknowledged = restored = fenced = deaths = 0
    for seed in range(first, first + SEEDS // 3):
        outcome = simulate_tiers(seed)
        if outcome.failure is not None:
            raise AssertionError(f"python -m simulation --tiers --seed {seed} shows this") from outcome.failure
        acknowledged += outcome.acknowledged
        restored += outcome.restored
        fenced += outcome.fenced
        deaths += outcome.deaths
    assert min(acknowledged, restored, fenced, deaths) > 20, "too little happens for anything to be found"


@pytest.mark.parametrize("seed", FOUND)
def test_seed_of_tiers_that_has_found_something_finds_nothing(seed: int) -> None:
    assert simulate_tiers(seed).failure is None


@pytest.mark.parametrize("name", TIER_BUGS)
def test_bug_planted_in_tiers_is_found_within_the_seeds(name: str) -> None:
    bug = TIER_BUGS[name]
    assert f"- {bug.what[:1].upper()}{bug.what[1:]}.\n" in PAGE.read_text(), "the page lists all of them"
    with bug.plant():
        # Where it was found last comes first.
        assert any(simulate_tiers(seed).failure is not None for seed in [bug.seed, *range(SEEDS)])


def test_seed_of_tiers_gives_the_same_calls_again() -> None:
    assert simulate_tiers(3).trace == simulate_tiers(3).trace
