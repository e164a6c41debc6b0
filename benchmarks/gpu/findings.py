"""What was found, kept as it comes: one JSON file and one table, both whole at any moment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

RESULTS: Final = "HOLDFAST_GPU_RESULTS"
"""The variable that tells a part into which file its findings go, a line each."""

FILES: Final = "HOLDFAST_GPU_FILES"
"""The variable that names the directory, on a real disk if there is one, for what a part writes."""

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


def report(**fields: Any) -> None:
    """Called in a part: one finding, kept at once."""
    line = json.dumps(fields)
    print(line, flush=True)
    if path := os.environ.get(RESULTS):
        with Path(path).open("a") as file:
            file.write(f"{line}\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The findings of a part so far; a line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Findings:
    """All that is known of one run of the kit.

    Attributes:
        document: What the JSON file holds.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        self._directory = directory
        self.document: dict[str, Any] = {
            "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "about": dict(about),
            "parts": {},
            "findings": [],
        }
        self.write()

    def add(self, part: str, ended: Mapping[str, Any], found: Iterable[Mapping[str, Any]]) -> None:
        """Takes in a part that has ended, however it did."""
        self.document["parts"][part] = dict(ended)
        self.document["findings"] += [{"part": part, **one} for one in found]
        self.write()

    def write(self) -> None:
        """Replaces both files; a crash at any point leaves the ones before."""
        for name, text in (("gpu.json", json.dumps(self.document, indent=1)), ("gpu.md", make_table(self.document))):
            path = self._directory / name
            path.with_suffix(".new").write_text(text)
            path.with_suffix(".new").replace(path)


def make_table(document: Mapping[str, Any]) -> str:
    """**Pure.** What was found, for people."""
    about = document["about"]
    lines = [f"# On {about.get('device', 'no device')}", ""]
    if about.get("dry"):
        lines += ["**A dry run on the processor: the figures say nothing.**", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if key != "device"]
    lines += [f"- {line}" for line in _notes(document)]
    by_size: dict[float, dict[str, dict[str, Any]]] = {}
    for one in document["findings"]:
        if "peer" in one and "size" in one:
            by_size.setdefault(one["size"], {}).setdefault(one["peer"], {}).update(one)
    for size, peers in sorted(by_size.items()):
        bare = peers.get(BARE, {}).get("free_seconds")
        lines += ["", f"## {size:g} GB", "", "| | " + " | ".join(name for name, *_ in _COLUMNS) + " | note |"]
        lines += ["|---|" + "---:|" * len(_COLUMNS) + "---|"]
        lines += [_row(name, found, bare) for name, found in peers.items()]
        lines += ["", *_goals(peers, bare)]
    lines += ["", "## Parts", "", "| part | state | seconds |", "|---|---|---:|"]
    lines += [f"| {name} | {end['state']} | {end['seconds']:.0f} |" for name, end in document["parts"].items()]
    for name, end in document["parts"].items():
        if end["state"] in ("failed", "crashed", "timed out"):
            lines += ["", f"### {name}: {end['state']}", "", "```", *end["text"][-4000:].splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _notes(document: Mapping[str, Any]) -> list[str]:
    return [one["say"] for one in document["findings"] if "say" in one]


def _row(name: str, found: Mapping[str, Any], bare_seconds: float | None) -> str:
    cells = []
    for _, key, factor, unit in _COLUMNS:
        value = found.get(key)
        cells.append("" if value is None else f"{value * factor:.3g} {unit}")
    if bare_seconds and name != BARE and "free_seconds" in found:
        cells[1] += f" ({found['free_seconds'] / bare_seconds:.2f} x bare)"
    return f"| {name} | " + " | ".join(cells) + f" | {found.get('note', '')} |"


def _goals(peers: Mapping[str, Mapping[str, Any]], bare_seconds: float | None) -> list[str]:
    """Each goal that can be told by now, and whether it is met."""
    lines = []

    def tell(what: str, value: float, most: float, unit: str) -> None:
        lines.append(f"- {what}: {value:.3g}{unit}, at most {most:g}{unit}: {'met' if value <= most else '**missed**'}")

    plain, overlapped = peers.get("holdfast", {}), peers.get("holdfast, overlapped", {})
    if bare_seconds and "free_seconds" in plain:
        tell("a plain save beside the bare pinned copy", plain["free_seconds"] / bare_seconds, 1.15, " x")
    if "returns_seconds" in overlapped:
        tell("an overlapped save returns after", overlapped["returns_seconds"] * 1e3, 10, " ms")
    if "lost_seconds" in overlapped:
        tell("lost of the time between saves", overlapped["lost_percent"], 1.5, " %")
        others = [
            found["lost_seconds"]
            for name, found in peers.items()
            if "holdfast" not in name and not name.startswith("JAX") and found.get("lost_seconds", 0) > 0
        ]
        if others:
            tell("lost beside the best peer", overlapped["lost_seconds"] / min(others), 0.2, " x")
    return lines
