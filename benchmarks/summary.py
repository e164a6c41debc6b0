"""Medians of what was measured, in seconds and as ratios to the machine's limits. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.results import Results, Round


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
class Standing:
    """All figures of one contender in one workload, and the memory that it took beyond the state itself."""

    contender: str
    figures: dict[str, Figure]
    first_stall_seconds: float | None
    save_extra_bytes: float | None
    restore_extra_bytes: float | None
    disk_bytes: float | None


LIMIT_OF = {
    "stall": "copy",
    "durable": "write",
    "restore_cold": "read_cold",
    "restore_warm": "read_warm",
    "load_file_cold": "read_cold",
    "load_file_warm": "read_warm",
}
"""The limit that each figure is held against."""


def spread(values: Sequence[float]) -> Spread:
    """**Pure.** The median and the extremes of at least one value."""
    return Spread(median(values), min(values), max(values), len(values))


def limits_of(results: Results, workload: str) -> dict[str, Spread]:
    """**Pure.** The machine's limits while a workload ran, in seconds."""
    rounds = [entry.figures for entry in _counted(results, workload, "limits")]
    return {name: spread([figures[name] for figures in rounds]) for name in (rounds[0] if rounds else ())}


def standings(results: Results, workload: str) -> list[Standing]:
    """**Pure.** What each contender reached, in the order in which they first appear."""
    names = dict.fromkeys(entry.contender for entry in results.rounds if entry.workload == workload)
    return [_standing(results, workload, name) for name in names if name != "limits"]


def ratio_to(
    results: Results, workload: str, contender: str, figure: str, peer: str, peer_figure: str
) -> Spread | None:
    """**Pure.** A contender's figure over a peer's of the same round; None if they have no round in common."""
    peers = {entry.number: entry.figures for entry in _counted(results, workload, peer)}
    ratios = [
        entry.figures[figure] / peers[entry.number][peer_figure]
        for entry in _counted(results, workload, contender)
        if entry.number in peers
    ]
    return spread(ratios) if ratios else None


def _standing(results: Results, workload: str, name: str) -> Standing:
    limits = {entry.number: entry.figures for entry in _counted(results, workload, "limits")}
    rounds = list(_counted(results, workload, name))
    first = next((e for e in results.rounds if (e.workload, e.contender, e.number) == (workload, name, 0)), None)
    keys = [key for key in (rounds[0].figures if rounds else ()) if not key.endswith("_bytes")]
    figures = {}
    for key in keys:
        limit = LIMIT_OF.get(key)
        ratios = [e.figures[key] / limits[e.number][limit] for e in rounds if limit and e.number in limits]
        figures[key] = Figure(spread([e.figures[key] for e in rounds]), spread(ratios) if ratios else None)
    return Standing(
        name,
        figures,
        first.figures.get("stall") if first else None,
        _largest(rounds, "save_extra_bytes"),
        _largest(rounds, "restore_extra_bytes"),
        _largest(rounds, "disk_bytes"),
    )


def _largest(rounds: Sequence[Round], key: str) -> float | None:
    return max((entry.figures[key] for entry in rounds if key in entry.figures), default=None)


def _counted(results: Results, workload: str, name: str) -> Iterator[Round]:
    """Without the round that warms up."""
    return (e for e in results.rounds if e.workload == workload and e.contender == name and e.number > 0)
