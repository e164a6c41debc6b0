"""Charts as SVG: text of HTML, from figures alone. All text that comes from a run is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final, NamedTuple, TypeVar

from holdfast.numbers import time_text

Item = TypeVar("Item")

WIDTH: Final = 960
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 28
_MOST_MARKS: Final = 600
"""More points than a person can tell apart on one line are thinned out."""


_MOST: Final = 1e100
"""Values beyond are not drawn."""


class Span(NamedTuple):
    """A bar of a timeline, and the text that shows when one points at it."""

    kind: str
    begin: float
    end: float
    text: str


class Instant(NamedTuple):
    """A moment of a timeline."""

    kind: str
    at: float
    text: str


def thin(items: Sequence[Item], most: int = _MOST_MARKS) -> list[Item]:
    """**Pure.** Returns at most so many of the items, evenly spread, the last one among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def draw_timeline(rows: Sequence[tuple[str, Sequence[Span], Sequence[Instant]]], begin: float, end: float) -> str:
    """**Pure.** Draws a row for each start of a run, over the time from `begin` to `end`.

    Args:
        rows: For each start its label, its bars and its moments, in seconds as `begin` and `end`.
        begin: The left end.
        end: The right end.
    """
    height, row_height = _TOP + 26 * len(rows) + _BOTTOM, 26
    scale = (WIDTH - _LEFT - _RIGHT) / max(end - begin, 1e-9)

    def x(at: float) -> float:
        return _LEFT + (min(max(at, begin), end) - begin) * scale

    parts = []
    for place, (label, spans, marks) in enumerate(rows):
        top = _TOP + place * row_height
        parts.append(f'<text class="label" x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(label)}</text>')
        for span in spans:
            width = max(x(span.end) - x(span.begin), 0.75)
            parts.append(
                f'<rect class="{span.kind}" x="{x(span.begin):.1f}" y="{top + 4}" width="{width:.1f}" height="14">'
                f"<title>{escape(span.text)}</title></rect>"
            )
        parts += [
            f'<line class="{mark.kind}" x1="{x(mark.at):.1f}" x2="{x(mark.at):.1f}" y1="{top + 1}" y2="{top + 21}">'
            f"<title>{escape(mark.text)}</title></line>"
            for mark in marks
        ]
    ticks = choose_ticks(0.0, end - begin, 6)
    parts += [_draw_tick(x(begin + at), height, time_text(at) if at else "0") for at in ticks]
    return _wrap(parts, height)


def draw_points(
    points: Sequence[tuple[float, float, str]],
    *,
    title: str,
    write: Callable[[float], str],
    marked: frozenset[float] = frozenset(),
    is_line: bool = False,
) -> str:
    """**Pure.** Draws values by step; an empty text without any.

    Args:
        points: For each the step, the value, and the text that shows when one points at it.
        title: What the values are, for those who hear the page.
        write: Writes a value.
        marked: The steps that are marked.
        is_line: True to connect the points.
    """
    known = [point for point in points if abs(point[1]) < _MOST]  # Neither is nan.
    if not known:
        return ""
    height = 180
    low, high = min(value for _, value, _ in known), max(value for _, value, _ in known)
    if not is_line:
        low = min(low, 0.0)
    if high - low < 1e-12 * max(abs(high), 1e-300):
        pad = abs(high) / 2 if abs(high) > 1 / _MOST else 0.5
        low, high = low - pad, high + pad
    first, last = known[0][0], max(point[0] for point in known)
    across = (WIDTH - _LEFT - _RIGHT) / max(last - first, 1)
    up = (height - _TOP - _BOTTOM) / (high - low)

    def place(step: float, value: float) -> tuple[float, float]:
        return _LEFT + (step - first) * across, height - _BOTTOM - (value - low) * up

    parts = []
    for value in choose_ticks(low, high, 4):
        y = place(first, value)[1]
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(write(value))}</text>')
    parts += [_draw_tick(place(step, low)[0], height, f"{step:,.0f}") for step in choose_ticks(first, last, 6)]
    shown = thin(known)
    if is_line:
        places = " ".join("{:.1f},{:.1f}".format(*place(step, value)) for step, value, _ in shown)
        parts.append(f'<polyline class="line" points="{places}"/>')
    for step, value, text in shown:
        x, y = place(step, value)
        kind = "dot marked" if step in marked else "dot"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(text)}</title></circle>')
    return _wrap(parts, height, title)


def draw_shares(shares: Sequence[tuple[str, str, float]]) -> str:
    """**Pure.** Draws one bar, divided by these shares: for each its kind, its text and its size."""
    whole, at, parts = sum(size for _, _, size in shares), 0.0, []
    for kind, text, size in shares:
        width = WIDTH * size / whole if whole else 0.0
        box = f'x="{at:.1f}" y="4" width="{width:.1f}" height="24"'
        parts.append(f'<rect class="{kind}" {box}><title>{escape(text)}</title></rect>')
        at += width
    return _wrap(parts, 32)


def choose_ticks(low: float, high: float, about: int) -> list[float]:
    """**Pure.** Returns round numbers within a range, about so many; one at least."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / about))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= about)
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def _draw_tick(x: float, height: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{escape(text)}</text>'


def _wrap(parts: Sequence[str], height: int, title: str = "") -> str:
    label = f' role="img" aria-label="{escape(title)}"' if title else ""
    return f'<svg viewBox="0 0 {WIDTH} {height}"{label}>{"".join(parts)}</svg>'
