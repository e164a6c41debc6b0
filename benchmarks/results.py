"""What a run of the benchmarks leaves: every single figure, as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.machine import Machine


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What one contender did in one round.

    Attributes:
        workload: The workload's name, or `training`.
        contender: The peer's name, or `limits`.
        number: The round; 0 is the one that warms up and is not counted.
        figures: Seconds and bytes, by name.
    """

    workload: str
    contender: str
    number: int
    figures: dict[str, float]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """How large a workload was."""

    title: str
    size_bytes: int
    tensors: int


class Results(msgspec.Struct, kw_only=True):
    """One run.

    Attributes:
        machine: Where it ran.
        scale: How large the workloads were, 1 for the real size.
        shapes: By workload.
        makes_last: By peer, what it makes durable by itself.
        rounds: Everything that was measured, in order of time.
        failures: What went wrong, as workload, contender and reason.
    """

    machine: Machine
    scale: float
    shapes: dict[str, Shape] = {}
    makes_last: dict[str, str] = {}
    rounds: list[Round] = []
    failures: list[tuple[str, str, str]] = []


def write_results(results: Results, path: Path) -> None:
    """Writes them as JSON that people can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))


def read_results(path: Path) -> Results:
    """Reads them back."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def merge(before: Results, now: Results) -> Results:
    """**Pure.** What was measured now, and those parts of an earlier run that were left out now.

    Figures of another machine or another size do not belong on one page; then the earlier ones are dropped.
    """
    if (before.machine, before.scale) != (now.machine, now.scale):
        return now
    return Results(
        machine=now.machine,
        scale=now.scale,
        shapes={**before.shapes, **now.shapes},
        makes_last={**before.makes_last, **now.makes_last},
        rounds=[entry for entry in before.rounds if entry.workload not in now.shapes] + now.rounds,
        failures=[failure for failure in before.failures if failure[0] not in now.shapes] + now.failures,
    )
