"""The medians as bars, in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from benchmarks.results import Results
from benchmarks.summary import Spread, standings

_WIDTH: Final = 960
_COLUMNS: Final = 2
_LEFT: Final = 150
_RIGHT: Final = 62
_BAR: Final = 13
_ROW: Final = 20
_HEAD: Final = 46
_GAP: Final = 22
_STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 13px; }
  .note { fill: #6e7781; font-size: 11px; }
  .own { fill: #1a7f64; } .peer { fill: #a5b4c3; } .range { stroke: #57606a; stroke-width: 1; }
  .limit { stroke: #cf222e; stroke-width: 1; stroke-dasharray: 3 2; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .note { fill: #9198a1; } .own { fill: #3fb996; } .peer { fill: #4d5b6a; }
    .range { stroke: #b1bac4; } .limit { stroke: #ff7b72; }
  }
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One small diagram: a bar for each contender.

    Attributes:
        title: Above it.
        note: Below the title.
        bars: Name and values of each.
        limit: Where to draw the line of the machine's limit; None for no line.
    """

    title: str
    note: str
    bars: Sequence[tuple[str, Spread]]
    limit: float | None


def render_picture(results: Results) -> str:
    """**Pure.** The picture."""
    panels = list(_panels(results))
    rows = [panels[first : first + _COLUMNS] for first in range(0, len(panels), _COLUMNS)]
    body: list[str] = []
    top = _GAP // 2
    for row in rows:
        for column, panel in enumerate(row):
            body += _draw(panel, column * _WIDTH // _COLUMNS, top)
        top += _HEAD + _ROW * max(len(panel.bars) for panel in row) + _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        f'role="img" aria-label="Benchmarks: medians as bars">\n<style>{_STYLE}</style>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _panels(results: Results) -> Iterator[Panel]:
    for workload, shape in results.shapes.items():
        found = [standing for standing in standings(results, workload) if standing.figures]
        if not found:
            continue
        if workload == "training":
            bars = [(standing.contender, standing.figures["lost"].value) for standing in found]
            yield Panel("Training time lost for each save", f"seconds, {shape.size_bytes / 1e9:.2f} GB", bars, None)
            continue
        for key, title, limit in (
            ("stall", "Stall", "the bare copy"),
            ("durable", "Until durable", "the bare direct write"),
            ("restore_cold", "Restore, cold", "the bare direct read"),
            ("restore_warm", "Restore, warm", "the bare read from the page cache"),
        ):
            ratios = [(s.contender, s.figures[key].ratio) for s in found if key in s.figures]
            yield Panel(
                f"{title}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors",
                f"times {limit} (the line)",
                [(name, ratio) for name, ratio in ratios if ratio is not None],
                1.0,
            )


def _draw(panel: Panel, left: int, top: int) -> Iterator[str]:
    """The bars end at the median; a thin line goes from the smallest value to the largest."""
    room = _WIDTH // _COLUMNS - _LEFT - _RIGHT
    largest = max([panel.limit or 0.0, *(bar.median for _, bar in panel.bars)]) or 1.0

    def at(value: float) -> float:
        return left + _LEFT + room * min(max(value, 0.0) / largest, 1.12)

    yield f'<text class="title" x="{left + 8}" y="{top + 16}">{escape(panel.title)}</text>'
    yield f'<text class="note" x="{left + 8}" y="{top + 32}">{escape(panel.note)}</text>'
    for number, (name, bar) in enumerate(panel.bars):
        y = top + _HEAD + number * _ROW
        kind = "own" if name == "holdfast" else "peer"
        middle = y + _BAR / 2
        yield f'<text x="{left + _LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
        width = max(at(bar.median) - at(0), 1)
        yield f'<rect class="{kind}" x="{at(0):.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
        yield f'<line class="range" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{middle}" y2="{middle}"/>'
        label = max(at(bar.high), at(bar.median)) + 4
        yield f'<text class="note" x="{label:.1f}" y="{y + 11}">{bar.median:.2f}</text>'
    if panel.limit is not None:
        x, bottom = at(panel.limit), top + _HEAD + len(panel.bars) * _ROW - 4
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _HEAD - 5}" y2="{bottom}"/>'
