"""What holdfast must reach with several workers, and what it has reached. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.harness.results import Results
from benchmarks.harness.summary import Figure, Spread, ratio_to_quickest, standing_of
from benchmarks.harness.tables import show_time
from benchmarks.one_process.targets import Target
from benchmarks.several_workers import HOLDFAST, Setup, list_setups

_MOST_STALL: Final = 1.15
_MOST: Final = 1.1
_MOST_STALL_LEAF_SECONDS: Final = 5e-6
_MOST_RESTORE_LEAF_SECONDS: Final = 40e-6


def find_goals(results: Results) -> list[Target]:
    """**Pure.** All goals; one that was not measured says so."""
    setups = list_setups(results.scale)
    models = [goal for setup in setups if setup.model for goal in _for_model(results, setup)]
    small = [goal for setup in setups if not setup.model for goal in _for_leaves(results, setup)]
    return [*models, *small]


def _for_model(results: Results, setup: Setup) -> Iterator[Target]:
    own = standing_of(results, setup.name, HOLDFAST)
    figures = own.figures if own else {}
    title = f"{setup.title}: stall of a save right after another"
    stall = figures.get("stall")
    yield _ratio(title, _MOST_STALL, "the bare copy", stall, stall.ratio if stall else None)
    title = f"{setup.title}: until a save is durable"
    # It writes over a file that is there, and is held against the most that the disk gives.
    quickest = ratio_to_quickest(results, setup.name, HOLDFAST, "durable", ("write", "rewrite"))
    yield _ratio(title, _MOST, "the quicker bare write", figures.get("durable"), quickest)
    restore = figures.get("restore_cold")
    yield _ratio(f"{setup.title}: restore", _MOST, "the bare read", restore, restore.ratio if restore else None)


def _for_leaves(results: Results, setup: Setup) -> Iterator[Target]:
    own, shape = standing_of(results, setup.name, HOLDFAST), results.shapes.get(setup.name)
    figures = own.figures if own else {}
    wanted: Sequence[tuple[str, str, float]] = (
        ("stall", "stall", _MOST_STALL_LEAF_SECONDS),
        ("restore_warm", "warm restore", _MOST_RESTORE_LEAF_SECONDS),
    )
    for key, title, most_seconds in wanted:
        figure, must = f"{setup.title}: {title}", f"at most {most_seconds * 1e6:.0f} us a tensor"
        if key in figures and shape is not None and shape.tensors:
            each_seconds = figures[key].value.median / shape.tensors
            reached = f"{each_seconds * 1e6:.1f} us a tensor; {show_time(figures[key].value.median)}"
            yield Target(figure, must, reached, each_seconds <= most_seconds)
        else:
            yield Target(figure, must, "not measured", None)


def _ratio(figure: str, most: float, unit: str, found: Figure | None, ratio: Spread | None) -> Target:
    must = f"at most {most:g} x {unit}"
    if found is None or ratio is None:
        return Target(figure, must, "not measured", None)
    seen = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.count > 1 else ""
    reached = f"{ratio.median:.2f}{seen} x; {show_time(found.value.median)}"
    return Target(figure, must, reached, ratio.median <= most)
