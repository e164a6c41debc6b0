"""The pictures of one process: all medians as bars, and a small one for the README and the guides. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.harness.picture import Panel, draw_panels, draw_seconds
from benchmarks.harness.results import Results
from benchmarks.harness.summary import Spread, summaries
from benchmarks.one_process.parts import growth_of

SHOWN: Final = {
    "holdfast, overlapped": "holdfast, overlap_copy",
    "holdfast": "holdfast",
    "Orbax async, uncompressed": "Orbax, async",
    "DCP async, thread, cached": "DCP, async",
    "torch.save": "torch.save",
}
"""The contenders in the small picture, each with its settings that are best here, and their names there."""

TITLES: Final = {"stall": "Training stops for", "durable": "The checkpoint is durable after"}

_PANELS: Final = {
    "stall": ("Stall", "the bare copy"),
    "held": ("Until the state may change", "the bare copy"),
    "durable": ("Until durable", "the bare direct write"),
    "restore_cold": ("Restore, cold", "the bare direct read"),
    "restore_warm": ("Restore, warm", "the bare read from the page cache"),
}


def render_speed(results: Results) -> str:
    """**Pure.** The small picture: the medians of one model's saves, in seconds."""
    found = {one.contender: one.figures for one in summaries(results, "model")}
    panels = {
        title: {SHOWN[name]: found[name][key].value.median for name in SHOWN if key in found.get(name, {})}
        for key, title in TITLES.items()
    }
    return draw_seconds(panels, "What a save costs, in seconds")


def render_picture(results: Results) -> str:
    """**Pure.** All medians. Two panels in a row belong together."""
    panels = [
        *_save_panels(results, "model", ("stall", "held", "durable")),
        *_training_panel(results),
        *_save_panels(results, "model", ("restore_cold", "restore_warm")),
        *_save_panels(results, "small-tensors", ("stall", "durable", "restore_cold", "restore_warm")),
        *_frozen_panel(results),
    ]
    return draw_panels(panels, "Benchmarks: medians as bars")


def _save_panels(results: Results, workload: str, keys: Sequence[str]) -> Iterator[Panel]:
    shape = results.shapes.get(workload)
    if shape is None:
        return
    for key in keys:
        title, limit = _PANELS[key]
        ratios = [(one.contender, one.figures[key].ratio) for one in summaries(results, workload) if key in one.figures]
        yield Panel(
            f"{title}: {shape.size_bytes / 1e9:.2f} GB in {shape.tensors:,} tensors",
            f"times {limit} (the line)",
            [(name, ratio) for name, ratio in ratios if ratio is not None],
            1.0,
        )


def _training_panel(results: Results) -> Iterator[Panel]:
    if "training" in results.shapes:
        bars = [(one.contender, one.figures["lost"].value) for one in summaries(results, "training") if one.figures]
        size = f"{results.shapes['training'].size_bytes / 1e9:.2f} GB"
        yield Panel(f"Training time lost for each save: {size}", "seconds", bars, None)


def _frozen_panel(results: Results) -> Iterator[Panel]:
    if results.changing is not None:
        grown = {one.contender: growth_of(results, one.contender) for one in summaries(results, "mostly-frozen")}
        ratios = {name: growth.bytes_ratio for name, growth in grown.items() if growth is not None}
        yield Panel(
            f"Bytes of {results.changing.saves} saves, mostly frozen",
            "times one full state and what changed (the line)",
            [(name, Spread(ratio, ratio, ratio, 1)) for name, ratio in ratios.items()],
            1.0,
        )
