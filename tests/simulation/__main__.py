"""Runs many simulations, or shows one: `python -m simulation --seeds 100000`, `python -m simulation --seed 7`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Final

from simulation import planted
from simulation.planted_in_tiers import TIER_BUGS
from simulation.tiers import simulate_tiers
from simulation.world import kind_of, simulate

BUGS: Final = {**planted.BUGS, **TIER_BUGS}

_AT_ONCE: Final = 100
_MOST_NAMED: Final = 20


def run_seeds(bug: str | None, in_tiers: bool, seeds: range) -> tuple[Counter[str], dict[int, str]]:
    """Returns what happened in some simulations, and what was found, by seed."""
    counts: Counter[str] = Counter()
    found: dict[int, str] = {}
    with BUGS[bug].plant() if bug else nullcontext():
        for seed in seeds:
            outcome = simulate_tiers(seed) if in_tiers else simulate(seed)
            counts["calls"] += len(outcome.trace)
            for name in ("acknowledged", "restored", "fenced", "deaths"):
                counts[name] += getattr(outcome, name)
            if outcome.failure is not None:
                found[seed] = f"{type(outcome.failure).__name__}: {outcome.failure}"
    return counts, found


def run_all(first: int, seeds: int, bug: str | None, in_tiers: bool) -> int:
    """Runs simulations on all processors, says how far they are, and names those that found something."""
    begun_at, counts, is_seen = time.monotonic(), Counter[str](), sys.stderr.isatty()
    done = failures = 0
    parts = [range(begin, min(begin + _AT_ONCE, first + seeds)) for begin in range(first, first + seeds, _AT_ONCE)]
    with ProcessPoolExecutor() as pool:
        for part, (happened, found) in zip(parts, pool.map(partial(run_seeds, bug, in_tiers), parts), strict=True):
            counts += happened
            done, failures = done + len(part), failures + len(found)
            for seed, what in found.items():
                print(f"{chr(13) * is_seen}seed {seed}: {what}", flush=True)
            if is_seen or done % 10_000 == 0:
                text = f"{done} of {seeds} seeds, {failures} found something"
                print(f"\r{text}" if is_seen else text, end="" if is_seen else "\n", file=sys.stderr, flush=True)
            if failures >= _MOST_NAMED:
                pool.shutdown(cancel_futures=True)
                break
    happened_text = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(f"\n{done} seeds in {time.monotonic() - begun_at:.0f} s: {happened_text}")
    if failures:
        option = "--tiers " * in_tiers
        print(f"{failures} seeds found something; to see one: python -m simulation {option}--seed N")
    return min(failures, 1)


def show(seed: int, bug: str | None, in_tiers: bool) -> int:
    """Prints each call of one simulation, and what it found."""
    with BUGS[bug].plant() if bug else nullcontext():
        outcome = simulate_tiers(seed) if in_tiers else simulate(seed)
    print(f"seed {seed}, {'in tiers' if in_tiers else f'on a {kind_of(seed)}'}")
    for number, (task, what) in enumerate(outcome.trace):
        print(f"{number:5}  {task:16} {what}")
    print(f"{outcome.acknowledged} saves acknowledged, {outcome.restored} restored, {outcome.deaths} deaths")
    return outcome.failure is not None


def main() -> int:
    """Returns the exit code: 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description="Runs many simulations, or shows one.")
    parser.add_argument("--seeds", type=int, default=100_000, help="how many to run (100000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--seed", type=int, help="run only this one, and show each of its calls")
    parser.add_argument("--bug", choices=BUGS, help="with this bug planted")
    parser.add_argument("--tiers", action="store_true", help="of runs in tiers, not on one storage")
    chosen = parser.parse_args()
    in_tiers = chosen.tiers or chosen.bug in TIER_BUGS
    if chosen.seed is not None:
        return show(chosen.seed, chosen.bug, in_tiers)
    return run_all(chosen.first, chosen.seeds, chosen.bug, in_tiers)


if __name__ == "__main__":
    sys.exit(main())
