"""One small picture of what a save costs, in seconds, for the README and the guides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Final

from benchmarks.harness.results import Results
from benchmarks.harness.summary import standings

SHOWN: Final = {
    "holdfast, overlapped": "holdfast, overlap_copy",
    "holdfast": "holdfast",
    "Orbax async, uncompressed": "Orbax, async",
    "DCP async, thread, cached": "DCP, async",
    "torch.save": "torch.save",
}
"""The contenders in the picture, each with its settings that are best here, and what they are called there."""

TITLES: Final = {"stall": "Training stops for", "durable": "The checkpoint is durable after"}

_WIDTH: Final = 760
_LEFT: Final = 195
_RIGHT: Final = 70
_ROW: Final = 22
_STYLE: Final = """
  rect.page { fill: #ffffff; }
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 14px; }
  .own { fill: #1a7f64; } .peer { fill: #a5b4c3; } .strong { font-weight: 600; }
"""


def render_speed(results: Results) -> str:
    """**Pure.** The picture of the medians of one model's saves."""
    found = {standing.contender: standing.figures for standing in standings(results, "model")}
    seconds = {
        key: {SHOWN[name]: found[name][key].value.median for name in SHOWN if key in found.get(name, {})}
        for key in TITLES
    }
    return draw_speed(seconds)


def draw_speed(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """**Pure.** The picture, of the seconds by panel and name."""
    body: list[str] = []
    top = 8
    for key, bars in seconds.items():
        body += _panel(TITLES[key], bars, top)
        top += 34 + _ROW * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" height="{top}" '
        f'role="img" aria-label="What a save costs, in seconds">\n<style>{_STYLE}</style>\n'
        f'<rect class="page" width="{_WIDTH}" height="{top}"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _panel(title: str, bars: Mapping[str, float], top: int) -> Iterator[str]:
    yield f'<text class="title" x="8" y="{top + 16}">{escape(title)}</text>'
    longest = max(bars.values(), default=1.0)
    for number, (name, value) in enumerate(bars.items()):
        y = top + 26 + number * _ROW
        own = name.startswith("holdfast")
        width = max((_WIDTH - _LEFT - _RIGHT) * value / longest, 1)
        weight = ' class="strong"' if own else ""
        yield f'<text{weight} x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect class="{"own" if own else "peer"}" x="{_LEFT}" y="{y}" width="{width:.1f}" height="15"/>'
        yield f'<text{weight} x="{_LEFT + width + 6:.1f}" y="{y + 12}">{_shown(value)} s</text>'


def _shown(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"
