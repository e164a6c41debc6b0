"""Bars in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import median
from typing import Final

from benchmarks.harness.summary import Spread

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
"""

_SMALL_WIDTH: Final = 760
_SMALL_LEFT: Final = 195
_SMALL_RIGHT: Final = 70
_SMALL_ROW: Final = 22
_SMALL_STYLE: Final = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 14px; }
  .own { fill: #1a7f64; } .peer { fill: #a5b4c3; } .strong { font-weight: 600; }
"""


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


def draw_svg(width: int, height: int, label: str, style: str, body: Sequence[str]) -> str:
    """**Pure.** A picture of some elements on a white page, which the site turns over in the dark."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">\n<style>{style}</style>\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def write(x: float | str, y: float | str, words: str, kind: str = "", anchor: str = "") -> str:
    """**Pure.** Some words, of a class of the style, that begin at a place or are anchored there."""
    kind, anchor = f' class="{kind}"' if kind else "", f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{kind} x="{x}" y="{y}"{anchor}>{escape(words)}</text>'


def write_head(left: int, top: int, title: str, note: str) -> Iterator[str]:
    """**Pure.** Title and note of a panel."""
    yield write(left + 8, top + 16, title, "title")
    yield write(left + 8, top + 32, note, "note")


def draw_panels(panels: Sequence[Panel], label: str) -> str:
    """**Pure.** A picture of panels in two columns; the shortest bar of each is above."""
    panels = [replace(one, bars=sorted(one.bars, key=lambda bar: bar[1].median)) for one in panels if one.bars]
    rows = [panels[first : first + _COLUMNS] for first in range(0, len(panels), _COLUMNS)]
    body: list[str] = []
    top = _GAP // 2
    for row in rows:
        for column, panel in enumerate(row):
            body += _draw(panel, column * _WIDTH // _COLUMNS, top)
        top += _HEAD + _ROW * max(len(panel.bars) for panel in row) + _GAP
    if not rows:
        body.append(write(8, top + 16, "Nothing that bars could show was measured.", "note"))
        top += _HEAD
    return draw_svg(_WIDTH, top, label, _STYLE, body)


def _draw(panel: Panel, left: int, top: int) -> Iterator[str]:
    """The bars end at the median; a thin line goes from the smallest value to the largest."""
    room = _WIDTH // _COLUMNS - _LEFT - _RIGHT
    medians = [bar.median for _, bar in panel.bars]
    largest = max(panel.limit or 0.0, min(max(medians), _LONGEST * max(median(medians), panel.limit or 0.0))) or 1.0

    def at(value: float) -> float:
        return left + _LEFT + room * min(max(value, 0.0) / largest, 1.0)

    yield from write_head(left, top, panel.title, panel.note)
    for number, (name, bar) in enumerate(panel.bars):
        y = top + _HEAD + number * _ROW
        own = name.startswith("holdfast")
        middle = y + _BAR / 2
        yield write(left + _LEFT - 6, y + 11, name, "strong" if own else "", "end")
        width = max(at(bar.median) - at(0), 1)
        yield f'<rect class="{"own" if own else "peer"}" x="{at(0):.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'
        yield f'<line class="range" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{middle}" y2="{middle}"/>'
        if bar.median > largest:
            for back in (14, 19):
                x = at(bar.median) - back
                yield f'<line class="cut" x1="{x:.1f}" x2="{x + 4:.1f}" y1="{y + _BAR}" y2="{y}"/>'
        yield write(f"{max(at(bar.high), at(bar.median)) + 4:.1f}", y + 11, f"{bar.median:.2f}", "note")
    if panel.limit is not None:
        x, bottom = at(panel.limit), top + _HEAD + len(panel.bars) * _ROW - 4
        yield f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top + _HEAD - 5}" y2="{bottom}"/>'


def draw_seconds(panels: Mapping[str, Mapping[str, float]], label: str) -> str:
    """**Pure.** A small picture of some seconds, by title and name: a bar each."""
    body: list[str] = []
    top = 8
    for title, bars in panels.items():
        body.append(write(8, top + 16, title, "title"))
        longest = max(bars.values(), default=1.0)
        for number, (name, value) in enumerate(bars.items()):
            y = top + 26 + number * _SMALL_ROW
            strong, kind = ("strong", "own") if name.startswith("holdfast") else ("", "peer")
            width = max((_SMALL_WIDTH - _SMALL_LEFT - _SMALL_RIGHT) * value / longest, 1)
            shown = f"{value:.3f}" if value < 1 else f"{value:.2f}"
            body.append(write(_SMALL_LEFT - 8, y + 12, name, strong, "end"))
            body.append(f'<rect class="{kind}" x="{_SMALL_LEFT}" y="{y}" width="{width:.1f}" height="15"/>')
            body.append(write(f"{_SMALL_LEFT + width + 6:.1f}", y + 12, f"{shown} s", strong))
        top += 34 + _SMALL_ROW * len(bars)
    return draw_svg(_SMALL_WIDTH, top, label, _SMALL_STYLE, body)
