"""Figures of planning by the number of workers: as lines, in SVG, and as a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, Final

_WIDTH: Final = 1100
_PANEL_WIDTH: Final = 550
_PANEL_HEIGHT: Final = 300
_LEFT: Final = 70
_RIGHT: Final = 110
_TOP: Final = 52
_BOTTOM: Final = 34
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 13px; } .note { fill: #57606a; font-size: 11px; }
  .grid { stroke: #d0d7de; stroke-width: 1; }
  .own { stroke: #1a7f64; fill: none; stroke-width: 2; } .peer { stroke: #8595a5; fill: none; stroke-width: 2; }
  .other { stroke: #1a7f64; fill: none; stroke-width: 2; stroke-dasharray: 5 3; }
  .guess { stroke: #8595a5; fill: none; stroke-width: 2; stroke-dasharray: 2 4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .grid { stroke: #30363d; }
    .own, .other { stroke: #3fb996; } .peer, .guess { stroke: #9198a1; }
  }
"""
_Line = tuple[str, str, list[tuple[float, float]]]


def extrapolate(figures: dict[str, Any], key: str, workers: int) -> float:
    """**Pure.** What a figure of DCP would be for more ranks: in proportion to the largest number that was measured."""
    last = figures["dcp"][-1]
    return float(last[key] * workers / last["workers"])


def render_scale(figures: dict[str, Any]) -> str:
    """**Pure.** The picture."""
    panels: list[tuple[str, str, str, list[_Line]]] = [
        (
            "What the leader does for one save",
            "seconds; the network is not counted",
            "s",
            [_own(figures, "leader_seconds"), *_peers(figures, "leader_seconds")],
        ),
        (
            "What the training thread of one worker decides",
            "seconds, without the copy",
            "s",
            [
                ("own", "sharded", _points(figures["holdfast"], "sharded_training_seconds")),
                ("other", "replicated", _points(figures["holdfast"], "replicated_training_seconds")),
            ],
        ),
        (
            "What one worker reads before its own bytes",
            "bytes, at a restore",
            "B",
            [_own(figures, "reader_bytes"), *_peers(figures, "reader_bytes")],
        ),
        (
            "How long it takes to read that",
            "seconds, with the same number of workers",
            "s",
            [_own(figures, "reader_seconds"), *_peers(figures, "reader_seconds")],
        ),
    ]
    height = _PANEL_HEIGHT * ((len(panels) + 1) // 2)
    body: list[str] = []
    for number, panel in enumerate(panels):
        body += _draw(number % 2 * _PANEL_WIDTH, number // 2 * _PANEL_HEIGHT, *panel)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="Planning by the number of workers">\n<style>{_STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def render_table(figures: dict[str, Any]) -> str:
    """**Pure.** The figures as a table in Markdown."""
    owns = {entry["workers"]: entry for entry in figures["holdfast"]}
    peers = {entry["workers"]: entry for entry in figures["dcp"]}
    lines = [
        "| Workers | Training thread, sharded | replicated | Index | Leader | gathered | requests | Manifest "
        "| Restore reads | in | DCP: coordinator | gathered | `.metadata` | read in |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for workers in sorted({*owns, *peers}):
        own, peer = owns.get(workers), peers.get(workers)
        cells = [f"{workers:,}", *([""] * 9 if own is None else _own_cells(own))]
        cells += [""] * 4 if peer is None else _peer_cells(peer)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _own_cells(own: dict[str, Any]) -> list[str]:
    return [
        _seconds(own["sharded_training_seconds"]),
        _seconds(own["replicated_training_seconds"]),
        _bytes(own["sharded_index_bytes"]),
        _seconds(own["leader_seconds"]),
        _bytes(own["gathered_bytes"]),
        f"{own['requests']:,.0f}",
        _bytes(own["metadata_bytes"]),
        _bytes(own["reader_bytes"]),
        _seconds(own["reader_seconds"]),
    ]


def _peer_cells(peer: dict[str, Any]) -> list[str]:
    return [
        _seconds(peer["leader_seconds"]),
        _bytes(peer["gathered_bytes"]),
        _bytes(peer["metadata_bytes"]),
        _seconds(peer["reader_seconds"]),
    ]


def _own(figures: dict[str, Any], key: str) -> _Line:
    return "own", "holdfast", _points(figures["holdfast"], key)


def _peers(figures: dict[str, Any], key: str) -> Iterator[_Line]:
    if not figures["dcp"]:
        return
    points = _points(figures["dcp"], key)
    yield "peer", "", points
    most = max(entry["workers"] for entry in figures["holdfast"])
    yield "guess", "DCP, in proportion", [points[-1], (most, extrapolate(figures, key, most))]


def _points(entries: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(entry["workers"], entry[key]) for entry in entries]


def _draw(left: int, top: int, title: str, note: str, unit: str, lines: Sequence[_Line]) -> Iterator[str]:
    """One panel, with both axes logarithmic."""
    points = [point for _, _, some in lines for point in some]
    first, last = (math.log10(end(x for x, _ in points)) for end in (min, max))
    low, high = math.floor(math.log10(min(y for _, y in points))), math.ceil(math.log10(max(y for _, y in points)))
    high = max(high, low + 1)
    width, height = _PANEL_WIDTH - _LEFT - _RIGHT, _PANEL_HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - first) / ((last - first) or 1)
        up = (math.log10(y) - low) / (high - low)
        return left + _LEFT + width * across, top + _TOP + height * (1 - up)

    yield f'<text class="title" x="{left + 8}" y="{top + 16}">{escape(title)}</text>'
    yield f'<text class="note" x="{left + 8}" y="{top + 32}">{escape(note)}</text>'
    for power in range(low, high + 1):
        x, y = at(10**first, 10**power)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = _seconds(10**power) if unit == "s" else _bytes(10**power)
        yield f'<text class="note" x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for workers in sorted({x for _, _, some in lines[:1] for x, _ in some}):
        x, y = at(workers, 10**low)
        yield f'<text class="note" x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{workers:,.0f}</text>'
    for kind, name, some in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in some))
        yield f'<polyline class="{kind}" points="{path}"/>'
        if name:
            x, y = at(*some[-1])
            yield f'<text class="note" x="{x + 5:.1f}" y="{y + 4:.1f}">{escape(name)}</text>'


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _bytes(size_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} B"
