"""The results of one run of the kit, and their table. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from benchmarks.harness.results import Results
from benchmarks.harness.tables import draw_table

BARE: Final = "the machine alone"
_COLUMNS: Final = (
    ("save() returns", "returns_seconds", 1e3, "ms"),
    ("training may go on", "free_seconds", 1e3, "ms"),
    ("the first", "first_seconds", 1e3, "ms"),
    ("durable", "durable_seconds", 1.0, "s"),
    ("restore", "restore_seconds", 1.0, "s"),
    ("lost a save", "lost_seconds", 1e3, "ms"),
    ("of the time between saves", "lost_percent", 1.0, "%"),
    ("host memory", "host_bytes", 1e-9, "GB"),
    ("device memory", "device_bytes", 1e-9, "GB"),
)


class Outcome(msgspec.Struct, frozen=True):
    """The end of a part.

    Attributes:
        state: `done`, `failed` or `no time left`.
        seconds: How long it took.
        text: The end of what it printed.
    """

    state: str
    seconds: float
    text: str


class Run(msgspec.Struct, kw_only=True):
    """All that is known of one run.

    Attributes:
        begun: When it began.
        about: The device, Python and torch.
        notes: What was found besides figures.
        parts: How each part has ended.
        results: The figures; a workload is a size of the state.
    """

    begun: str = msgspec.field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    about: dict[str, str]
    notes: list[str] = []
    parts: dict[str, Outcome] = {}
    results: Results


def figures_by_size(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """**Pure.** All figures of each contender, by the size of the state."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for entry in results.rounds:
        found.setdefault(entry.workload, {}).setdefault(entry.contender, {}).update(entry.figures)
    for size, name, _ in results.failures:
        if size in found or "GB" in size:
            found.setdefault(size, {}).setdefault(name, {})
    return found


def make_table(run: Run) -> str:
    """**Pure.** The page of the run."""
    machine = run.results.machine
    lines = [f"# On {run.about.get('device', 'no device')}", ""]
    if "dry" in run.about:
        lines += ["**A dry run on the processor: the figures say nothing.**", ""]
    lines += [f"- {key}: {value}" for key, value in run.about.items() if key != "device"]
    lines += [f"- machine: {machine.processor}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB"]
    lines += [f"- files on {machine.file_system}", *(f"- {note}" for note in run.notes)]
    for size, peers in sorted(figures_by_size(run.results).items(), key=lambda pair: float(pair[0].split()[0])):
        bare = peers.get(BARE, {}).get("free_seconds")
        notes = {name: reason.replace("|", "/") for part, name, reason in run.results.failures if part == size}
        rows = [[name, *_cells(name, found, bare), notes.get(name, "")] for name, found in peers.items()]
        lines += ["", f"## {size}", "", *draw_table(["", *(title for title, *_ in _COLUMNS), "note"], rows)]
        lines += _goals(peers, bare)
    rows = [[name, outcome.state, f"{outcome.seconds:.0f}"] for name, outcome in run.parts.items()]
    lines += ["", "## Parts", "", *draw_table(["part", "state", "seconds"], rows)]
    for name, outcome in run.parts.items():
        if outcome.state == "failed":
            lines += ["", f"### {name}: failed", "", "```", *outcome.text[-4000:].splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _cells(name: str, found: Mapping[str, float], bare_seconds: float | None) -> list[str]:
    cells = [f"{found[key] * factor:.3g} {unit}" if key in found else "" for _, key, factor, unit in _COLUMNS]
    if bare_seconds and name != BARE and "free_seconds" in found:
        cells[1] += f" ({found['free_seconds'] / bare_seconds:.2f} x bare)"
    return cells


def _goals(peers: Mapping[str, Mapping[str, float]], bare_seconds: float | None) -> Iterator[str]:
    """Each goal whose figures are there, and whether it is met."""

    def compare(goal: str, value: float, most: float, unit: str) -> str:
        return f"- {goal}: {value:.3g}{unit}, at most {most:g}{unit}: {'met' if value <= most else '**missed**'}"

    plain, overlapped = peers.get("holdfast", {}), peers.get("holdfast, overlapped", {})
    if bare_seconds and "free_seconds" in plain:
        yield compare("a plain save, of the bare pinned copy", plain["free_seconds"] / bare_seconds, 1.15, " x")
    if "returns_seconds" in overlapped:
        yield compare("an overlapped save returns after", overlapped["returns_seconds"] * 1e3, 10, " ms")
    if "lost_seconds" in overlapped:
        yield compare("lost of the time between saves", overlapped["lost_percent"], 1.5, " %")
        others = [
            found["lost_seconds"]
            for name, found in peers.items()
            if "holdfast" not in name and found.get("lost_seconds", 0) > 0
        ]
        if others:
            yield compare("lost, of the best peer's loss", overlapped["lost_seconds"] / min(others), 0.2, " x")
