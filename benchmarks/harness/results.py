"""The results of a run of the benchmarks: every single figure, as JSON."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from benchmarks.harness.machine import Machine
from msgspec.structs import replace

LIMITS = "limits"
"""The contender that measures the machine."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one contender in one round.

    Attributes:
        workload: The workload's name, or `training`.
        contender: The peer's name, or `limits`.
        number: The round; 0 is the one that warms up and is not counted.
        figures: Seconds and bytes, by name.
        slice: The stretch of the run; those of one stretch ran side by side.
    """

    workload: str
    contender: str
    number: int
    figures: dict[str, float]
    slice: int = 0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a workload."""

    title: str
    size_bytes: int
    tensors: int


class Changing(msgspec.Struct, frozen=True, kw_only=True):
    """How often a state was saved of which a part changed in between, and how large that part was."""

    saves: int
    changed_bytes: int


class Results(msgspec.Struct, kw_only=True):
    """One run.

    Attributes:
        machine: Where it ran.
        scale: How large the workloads were, 1 for the real size.
        shapes: By workload.
        makes_last: By peer, what it makes durable by itself.
        rounds: Everything that was measured, in order of time.
        failures: What went wrong, as workload, contender and reason.
        missing: By peer, why it could not take part at all.
        changing: What the saves of `mostly-frozen` were; None if there were none.
    """

    machine: Machine
    scale: float
    shapes: dict[str, Shape] = {}
    makes_last: dict[str, str] = {}
    rounds: list[Round] = []
    failures: list[tuple[str, str, str]] = []
    missing: dict[str, str] = {}
    changing: Changing | None = None


class UnreadableResultsError(Exception):
    """A file does not hold what a run of the benchmarks leaves."""


def write_results(results: Results, path: Path) -> None:
    """Writes them as `write_json` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(results, path)


def write_json(value: msgspec.Struct, path: Path) -> None:
    """Writes JSON that people can read; a reader finds this or the last one whole, after a crash as well."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_results(path: Path) -> Results:
    """Reads them back.

    Raises:
        UnreadableResultsError: If the file cannot be read, or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnreadableResultsError(f"{path} does not hold results of the benchmarks: {error}") from error


def find_misfit(before: Results, machine: Machine, scale: float) -> str:
    """**Pure.** Why figures of an earlier run do not belong on one page with new ones; empty if they do."""
    if before.scale != scale:
        return f"they are of workloads at {before.scale:g} of their size, and these are to be at {scale:g}"
    if not before.machine.is_like(machine):
        return f"they were measured elsewhere, or with other versions: {before.machine.differences(machine)}"
    return ""


def merge(before: Results, now: Results) -> Results:
    """**Pure.** The results of now, and those of an earlier run for other contenders or other workloads.

    Args:
        before: What an earlier run has measured; it fits, by `find_misfit`.
        now: What was measured now.
    """
    named = {(entry.workload, entry.contender) for entry in now.rounds if entry.contender != LIMITS}
    named |= {(workload, contender) for workload, contender, _ in now.failures}

    def stays(workload: str, contender: str) -> bool:
        return (workload, contender) not in named

    last = max((entry.slice for entry in before.rounds), default=0)
    kept = [entry for entry in before.rounds if entry.contender != LIMITS and stays(entry.workload, entry.contender)]
    slices = {(entry.workload, entry.slice) for entry in kept}
    kept = [
        entry
        for entry in before.rounds
        if (entry.workload, entry.slice) in slices
        and (entry.contender == LIMITS or stays(entry.workload, entry.contender))
    ]
    added = [replace(entry, slice=entry.slice + last) for entry in now.rounds]
    present = {entry.contender for entry in kept + added}
    return Results(
        machine=now.machine.joined(before.machine),
        scale=now.scale,
        shapes={**before.shapes, **now.shapes},
        makes_last={**before.makes_last, **now.makes_last},
        rounds=kept + added,
        failures=[failure for failure in before.failures if stays(*failure[:2])] + now.failures,
        missing={name: why for name, why in (before.missing | now.missing).items() if name not in present},
        changing=now.changing or before.changing,
    )
