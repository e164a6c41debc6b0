"""Medians of what was measured, in seconds and as ratios to the machine's limits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness.results import LIMITS, Results, Round


@dataclass(frozen=True, slots=True)
class Spread:
    """Some values of one kind: their median and their extremes."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one contender.

    Attributes:
        value: In seconds.
        ratio: To the machine's limit of the same round; None where there is no such limit.
    """

    value: Spread
    ratio: Spread | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of one contender in one workload, and the memory that it took beyond the state itself.

    Attributes:
        contender: Its name.
        figures: Of the rounds that count.
        first: Of the round that warms up.
        save_extra_bytes: The most while it saved.
        restore_extra_bytes: The most while it restored.
    """

    contender: str
    figures: dict[str, Figure]
    first: dict[str, Figure]
    save_extra_bytes: float | None
    restore_extra_bytes: float | None


LIMIT_OF = {
    "stall": "copy",
    "held": "copy",
    "stall_apart": "copy",
    "durable": "write",
    "durable_apart": "write",
    "restore_cold": "read_cold",
    "restore_warm": "read_warm",
    "load_file_cold": "read_cold",
    "load_file_warm": "read_warm",
}
"""The limit that each figure is held against."""


def spread(values: Sequence[float]) -> Spread:
    """**Pure.** The median and the extremes of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


def rounds_of(results: Results, workload: str, name: str) -> list[Round]:
    """**Pure.** The rounds of one contender in one workload, without the one that warms up."""
    return [e for e in results.rounds if e.workload == workload and e.contender == name and e.number > 0]


def limits_of(results: Results, workload: str) -> dict[str, Spread]:
    """**Pure.** The machine's limits while a workload ran, in seconds."""
    found = [entry for entry in results.rounds if entry.workload == workload and entry.contender == LIMITS]
    # Where there is but one round, it has no other to warm up for.
    counted = [entry.figures for entry in found if entry.number > 0] or [entry.figures for entry in found]
    names = (*LIMIT_OF.values(), "rewrite")
    return {name: spread([figures[name] for figures in counted]) for name in names if counted and name in counted[0]}


def summaries(results: Results, workload: str) -> list[Summary]:
    """**Pure.** The figures of each contender, in the order in which they first appear."""
    names = dict.fromkeys(entry.contender for entry in results.rounds if entry.workload == workload)
    return [_sum_up(results, workload, name) for name in names if name != LIMITS]


def summary_of(results: Results, workload: str, name: str) -> Summary | None:
    """**Pure.** The figures of one contender, or None if it was not measured."""
    return next((summary for summary in summaries(results, workload) if summary.contender == name), None)


def ratio_to(
    results: Results, workload: str, contender: str, figure: str, peer: str, peer_figure: str
) -> Spread | None:
    """**Pure.** A contender's figure over a peer's of the same round; None if they never ran in one stretch."""
    peers = {(entry.slice, entry.number): entry.figures for entry in rounds_of(results, workload, peer)}
    ratios = [
        entry.figures[figure] / peers[entry.slice, entry.number][peer_figure]
        for entry in rounds_of(results, workload, contender)
        if (entry.slice, entry.number) in peers
    ]
    return spread(ratios) if ratios else None


def ratio_to_quickest(
    results: Results, workload: str, contender: str, figure: str, limits: Sequence[str]
) -> Spread | None:
    """**Pure.** A contender's figure over the least of some of the machine's limits of the same round."""
    known = {(entry.slice, entry.number): entry.figures for entry in rounds_of(results, workload, LIMITS)}
    ratios = [
        entry.figures[figure] / min(found[limit] for limit in limits)
        for entry in rounds_of(results, workload, contender)
        if figure in entry.figures and set(limits) <= (found := known.get((entry.slice, entry.number), {})).keys()
    ]
    return spread(ratios) if ratios else None


def _sum_up(results: Results, workload: str, name: str) -> Summary:
    own = [e for e in results.rounds if e.workload == workload and e.contender == name]
    limits = {
        (e.slice, e.number): e.figures for e in results.rounds if e.workload == workload and e.contender == LIMITS
    }
    counted = [entry for entry in own if entry.number > 0]
    return Summary(
        name,
        dict(_figures(counted, limits)),
        dict(_figures([entry for entry in own if entry.number == 0], limits)),
        _largest(counted, "save_extra_bytes"),
        _largest(counted, "restore_extra_bytes"),
    )


def _figures(rounds: Sequence[Round], limits: dict[tuple[int, int], dict[str, float]]) -> Iterator[tuple[str, Figure]]:
    keys = dict.fromkeys(
        key for entry in rounds for key in entry.figures if not key.endswith("_bytes") and key != "copy"
    )
    for key in keys:
        having = [entry for entry in rounds if key in entry.figures]
        limit = LIMIT_OF.get(key)
        found = [limits.get((entry.slice, entry.number), {}) | entry.figures for entry in having]
        ratios = [figures[key] / figures[limit] for figures in found if limit is not None and limit in figures]
        yield key, Figure(spread([e.figures[key] for e in having]), spread(ratios) if ratios else None)


def _largest(rounds: Sequence[Round], key: str) -> float | None:
    return max((entry.figures[key] for entry in rounds if key in entry.figures), default=None)
