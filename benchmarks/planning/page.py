"""Figures of planning by the number of workers: as lines, in SVG, and as a table. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from benchmarks.harness.picture import draw_svg, write, write_head
from benchmarks.harness.tables import draw_table

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
"""
_Line = tuple[str, str, list[tuple[float, float]]]
_Column = tuple[str, str, Callable[[Any], str]]


def render_scale(figures: dict[str, Any]) -> str:
    """**Pure.** The picture."""
    panels: list[tuple[str, str, str, list[_Line]]] = [
        (
            "What the leader does for one save",
            "seconds; the network is not counted",
            "s",
            _both(figures, "leader_seconds"),
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
        ("What one worker reads before its own bytes", "bytes, at a restore", "B", _both(figures, "reader_bytes")),
        (
            "How long it takes to read that",
            "seconds, with the same number of workers",
            "s",
            _both(figures, "reader_seconds"),
        ),
    ]
    body: list[str] = []
    for number, panel in enumerate(panels):
        body += _draw(number % 2 * _PANEL_WIDTH, number // 2 * _PANEL_HEIGHT, *panel)
    height = _PANEL_HEIGHT * ((len(panels) + 1) // 2)
    return draw_svg(_WIDTH, height, "Planning by the number of workers", _STYLE, body)


def render_tables(figures: dict[str, Any]) -> str:
    """**Pure.** The figures as tables in Markdown, each narrow enough for a small screen."""
    return "\n\n".join(_render_table(figures[who], columns) for who, columns in _TABLES if figures[who])


def _render_table(entries: Sequence[dict[str, Any]], columns: Sequence[_Column]) -> str:
    rows = [[f"{entry['workers']:,}", *(show(entry[key]) for _, key, show in columns)] for entry in entries]
    return "\n".join(draw_table(["Workers", *(title for title, *_ in columns)], rows)).rstrip()


def _both(figures: dict[str, Any], key: str) -> list[_Line]:
    own = _points(figures["holdfast"], key)
    lines: list[_Line] = [("own", "holdfast", own)]
    if figures["dcp"]:
        points = _points(figures["dcp"], key)
        most = max(workers for workers, _ in own)
        ranks, value = points[-1]
        guessed = [points[-1], (most, value * most / ranks)]
        lines += [("peer", "", points), ("guess", "DCP, in proportion", guessed)]
    return lines


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

    yield from write_head(left, top, title, note)
    for power in range(low, high + 1):
        x, y = at(10**first, 10**power)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = _seconds(10**power) if unit == "s" else _bytes(10**power)
        yield write(f"{x - 6:.1f}", f"{y + 4:.1f}", label, "note", "end")
    for workers in sorted({x for _, _, some in lines[:1] for x, _ in some}):
        x, y = at(workers, 10**low)
        yield write(f"{x:.1f}", f"{y + 16:.1f}", f"{workers:,.0f}", "note", "middle")
    for kind, name, some in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in some))
        yield f'<polyline class="{kind}" points="{path}"/>'
        if name:
            x, y = at(*some[-1])
            yield write(f"{x + 5:.1f}", f"{y + 4:.1f}", name, "note")


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _bytes(size_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.0f} B"


_TABLES: Final[tuple[tuple[str, tuple[_Column, ...]], ...]] = (
    (
        "holdfast",
        (
            ("Training thread, sharded", "sharded_training_seconds", _seconds),
            ("Training thread, replicated", "replicated_training_seconds", _seconds),
            ("Index", "sharded_index_bytes", _bytes),
        ),
    ),
    (
        "holdfast",
        (
            ("Rank 0 takes", "leader_seconds", _seconds),
            ("Rank 0 gathers", "gathered_bytes", _bytes),
            ("Rank 0 requests", "requests", "{:,.0f}".format),
        ),
    ),
    (
        "holdfast",
        (
            ("Manifest", "metadata_bytes", _bytes),
            ("A restore reads", "reader_bytes", _bytes),
            ("A restore reads for", "reader_seconds", _seconds),
        ),
    ),
    (
        "dcp",
        (
            ("DCP: coordinator", "leader_seconds", _seconds),
            ("gathers", "gathered_bytes", _bytes),
            ("`.metadata`", "metadata_bytes", _bytes),
            ("is read for", "reader_seconds", _seconds),
        ),
    ),
)
"""The tables: whose figures they have, and for each column the title, the name of the figure, and how it is written."""
