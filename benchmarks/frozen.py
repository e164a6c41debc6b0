"""Ten saves of a state of which a small part changes: what lies on the disk afterwards, and how long each took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import page_cache
from benchmarks.contender import Contender
from benchmarks.messages import Order
from benchmarks.results import LIMITS, Changing, Results
from benchmarks.rounds import open_values, restore_checked
from benchmarks.summary import Spread, spread
from benchmarks.turns import Bench
from benchmarks.workloads import make_workload, place_tensors, state_bytes, state_shapes, trained_names

SAVES = 10
_NAME = "mostly-frozen"


def compare_frozen(bench: Bench, contenders: Sequence[str]) -> None:
    """Measures ten saves of each contender that keeps them all. The first one's figures are those of round 0.

    One contender after the other: the disk need not have room for all of them.
    """
    workload = make_workload(_NAME, bench.results.scale)
    names = trained_names(workload)
    trained = [place for place in place_tensors(state_shapes(workload))[0] if place.name in names]
    bench.results.changing = Changing(saves=SAVES, changed_bytes=state_bytes(trained))
    with open_values(bench, workload) as (values, memory):

        def save(contender: Contender, number: int) -> dict[str, float]:
            if contender.name == LIMITS:
                return contender.order(Order(verb="measure"))
            if number > 0:
                values.change(trained)
            saved = contender.order(Order(verb="save", step=number + 1))
            figures = {key: saved[key] for key in ("stall", "durable")}
            figures["disk_bytes"] = float(page_cache.count_bytes(contender.directory))
            if number == SAVES - 1:
                figures["restore_cold"] = restore_checked(contender, number + 1, values, "cold")["restore"]
            return figures

        for name in contenders:
            with bench.started(_NAME, [LIMITS, name], lambda one: bench.start(one, _NAME, memory)) as live:
                bench.attempt(_NAME, live, LIMITS, 0, save)
                for number in range(SAVES):
                    if name in live:
                        bench.attempt(_NAME, live, name, number, save)


@dataclass(frozen=True, slots=True)
class Growth:
    """What ten saves of one contender came to.

    Attributes:
        bytes_ratio: What lies on the disk, over one full state and the changed part for each later save.
        first_seconds: Until the first save was durable.
        later: The same of the later ones.
        seconds_share: A later save's time over the first one's.
        changed_share: The changed part over the full state.
        restore_seconds: A cold restore of the last save.
    """

    bytes_ratio: float
    first_seconds: float
    later: Spread
    seconds_share: float
    changed_share: float
    restore_seconds: float


def growth_of(results: Results, name: str) -> Growth | None:
    """**Pure.** What a contender's saves came to, or None if it has not done them all."""
    rounds = {e.number: e.figures for e in results.rounds if e.workload == _NAME and e.contender == name}
    changing = results.changing
    if changing is None or len(rounds) < changing.saves:
        return None
    full_bytes = results.shapes[_NAME].size_bytes
    later = spread([rounds[number]["durable"] for number in range(1, changing.saves)])
    last = rounds[changing.saves - 1]
    return Growth(
        last["disk_bytes"] / (full_bytes + (changing.saves - 1) * changing.changed_bytes),
        rounds[0]["durable"],
        later,
        later.median / rounds[0]["durable"],
        changing.changed_bytes / full_bytes,
        last["restore_cold"],
    )
