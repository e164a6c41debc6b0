"""The medians as bars, in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import median
from typing import Final

from benchmarks.harness.results import Results
from benchmarks.harness.summary import Spread, standings
from benchmarks.one_process.parts import growth_of

_WIDTH: Final = 1100
_COLUMNS: Final = 2
_LEFT: Final = 215
_RIGHT: Final = 60
_BAR: Final = 13
_ROW: Final = 20
_HEAD: Final = 46
_GAP: Final = 22
_LONGEST: Final = 3
"""A bar longer than so many times the middle one is cut, so that the short ones differ visibly."""
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 13px; }
  .note { fill: #57606a; font-size: 11px; }
  .own { fill: #1a7f64; } .peer { fill: #a5b4c3; } .range { stroke: #57606a; stroke-width: 1; }
  .strong { font-weight: 600; }
  .cut { stroke: #ffffff; stroke-width: 2; }
  .limit { stroke: #cf222e; stroke-width: 1; stroke-dasharray: 3 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .own { fill: #3fb996; } .peer { fill: #4d5b6a; }
    .range { stroke: #b1bac4; } .limit { stroke: #ff7b72; } .cut { stroke: #0d1117; }
  }
"""
_PANELS: Final = {
    "stall": ("Stall", "the bare copy"),
    "held": ("Until the state may change", "the bare copy"),
    "durable": ("Until durable", "the bare direct write"),
    "restore_cold": ("Restore, cold", "the bare direct read"),
    "restore_warm": ("Restore, warm", "the bare read from the page cache"),
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One small diagram: a bar for each contender.

    Attributes:
        title: Above it.
        note: Below the title.
        bars: Name and values of each.
        limit: Where to draw the line of what is the least possible; None for no line.
    """

    title: str
    note: str
    bars: Sequence[tuple[str, Spread]]
    limit: float | None


def render_picture(results: Results) -> str:
    """**Pure.** The picture."""
    return draw_panels(list(_panels(results)), "Benchmarks: medians as bars")


def draw_panels(panels: Sequence[Panel], label: str) -> str:
    """**Pure.** A picture of panels, two beside each other; the shortest bar of each is above."""
    panels = [replace(one, bars=sorted(one.bars, key=lambda bar: bar[1].median)) for one in panels if one.bars]
    rows = [panels[first : first + _COLUMNS] for first in range(0, len(panels), _COLUMNS)]
    body: list[str] = []
    top = _GAP // 2
    for row in rows:
        for column, panel in enumerate(row):
            body += _draw(panel, column * _WIDTH // _COLUMNS, top)
        top += _HEAD + _ROW * max(len(panel.bars) for panel in row) + _GAP
    if not rows:
        body.append(f'<text class="note" x="8" y="{top + 16}">Nothing that bars could show was measured.</text>')
        top += _HEAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        f'role="img" aria-label="{escape(label)}">\n<style>{_STYLE}</style>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panels(results: Results) -> Iterator[Panel]:
    """Two beside each other belong together."""
    yield from _save_panels(results, "model", ("stall", "held", "durable"))
    yield from _training_panel(results)
    yield from _save_panels(results, "model", ("restore_cold", "restore_warm"))
    yield from _save_panels(results, "small-tensors", ("stall", "durable", "restore_cold", "restore_warm"))
    yield from _frozen_panel(results)


def _save_panels(results: Results, workload: str, keys: Sequence[str]) -> Iterator[Panel]:
    found = standings(results, workload)
    shape = results.shapes.get(workload)
    if shape is None:
        return
    for key in keys:
        title, limit = _PANELS[key]
        ratios = [(s.contender, s.figures[key].ratio) for s in found if key in s.figures]
        yield Panel(
            f"{title}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors",
            f"times {limit} (the line)",
            [(name, ratio) for name, ratio in ratios if ratio is not None],
            1.0,
        )


def _training_panel(results: Results) -> Iterator[Panel]:
    if "training" in results.shapes:
        bars = [(s.contender, s.figures["lost"].value) for s in standings(results, "training") if s.figures]
        size = f"{results.shapes['training'].size_bytes / 1e9:.2f} GB"
        yield Panel(f"Training time lost for each save: {size}", "seconds", bars, None)


def _frozen_panel(results: Results) -> Iterator[Panel]:
    grown = [(s.contender, growth_of(results, s.contender)) for s in standings(results, "mostly-frozen")]
    bars = [(name, growth.bytes_ratio) for name, growth in grown if growth is not None]
    if results.changing is not None:
        yield Panel(
            f"Bytes of {results.changing.saves} saves, mostly frozen",
            "times one full state and what changed (the line)",
            [(name, Spread(ratio, ratio, ratio, 1)) for name, ratio in bars],
            1.0,
        )


def _draw(panel: Panel, left: int, top: int) -> Iterator[str]:
    """The bars end at the median; a thin line goes from the smallest value to the largest."""
    room = _WIDTH // _COLUMNS - _LEFT - _RIGHT
    medians = [bar.median for _, bar in panel.bars]
    largest = max(panel.limit or 0.0, min(max(medians), _LONGEST * max(median(medians), panel.limit or 0.0))) or 1.0

    def at(value: float) -> float:
        return left + _LEFT + room * min(max(value, 0.0) / largest, 1.0)

    yield f'<text class="title" x="{left + 8}" y="{top + 16}">{escape(panel.title)}</text>'
    yield f'<text class="note" x="{left + 8}" y="{top + 32}">{escape(panel.note)}</text>'
    for number, (name, bar) in enumerate(panel.bars):
        y = top + _HEAD + number * _ROW
        own = name.startswith("holdfast")
        middle = y + _BAR / 2
        weight = ' class="strong"' if own else ""
        yield f'<text{weight} x="{left + _LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
        width = max(at(bar.median) - at(0), 1)
        yield (
            f'<rect class="{"own" if own else "peer"}" x="{at(0):.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
        )
        yield f'<line class="range" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{middle}" y2="{middle}"/>'
        if bar.median > largest:
            for back in (14, 19):
                x = at(bar.median) - back
                yield f'<line class="cut" x1="{x:.1f}" x2="{x + 4:.1f}" y1="{y + _BAR}" y2="{y}"/>'
        label = max(at(bar.high), at(bar.median)) + 4
        yield f'<text class="note" x="{label:.1f}" y="{y + 11}">{bar.median:.2f}</text>'
    if panel.limit is not None:
        x, bottom = at(panel.limit), top + _HEAD + len(panel.bars) * _ROW - 4
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _HEAD - 5}" y2="{bottom}"/>'
