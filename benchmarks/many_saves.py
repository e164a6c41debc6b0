"""Two hundred saves of a small state, the newest three kept: whether memory, descriptors and threads stay level."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contender import Contender
from benchmarks.messages import Order
from benchmarks.rounds import open_values
from benchmarks.turns import Bench
from benchmarks.workloads import make_workload

COUNTED = (2, 50, 100, 200)
"""After which saves it is looked at; the results use these numbers for rounds."""
_KEEP = 3
_NAME = "many-saves"


def compare_many_saves(bench: Bench, contenders: Sequence[str], counted: Sequence[int] = COUNTED) -> None:
    """Measures what each contender holds after some of its saves, beyond what it held before the first."""
    with open_values(bench, make_workload(_NAME, bench.results.scale)) as (values, memory):

        def save_up_to(contender: Contender, number: int) -> dict[str, float]:
            before = max((count for count in counted if count < number), default=0)
            most_bytes = 0.0
            for step in range(before + 1, number + 1):
                values.change()
                most_bytes = contender.order(Order(verb="save", step=step))["extra_bytes"]
                contender.order(Order(verb="retain", step=step))
            held = contender.count_held()
            return {
                "save_extra_bytes": most_bytes,
                "held_bytes": float(held.size_bytes),
                "descriptors": float(held.descriptors),
                "threads": float(held.threads),
            }

        for name in contenders:
            with bench.started(_NAME, [name], lambda one: bench.start(one, _NAME, memory, keep=_KEEP)) as live:
                for number in counted:
                    if name in live:
                        bench.attempt(_NAME, live, name, number, save_up_to)
