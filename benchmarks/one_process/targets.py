"""The goals, and what holdfast has reached. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Final

from benchmarks.harness.results import Results
from benchmarks.harness.summary import (
    LIMIT_OF,
    Figure,
    Spread,
    limits_of,
    ratio_to,
    ratio_to_quickest,
    rounds_of,
    summaries,
    summary_of,
)
from benchmarks.harness.tables import Target, show_spread
from benchmarks.one_process.parts import COUNTED, growth_of

_LEVEL: Final = 0.05
"""Memory counts as level if it grows by no larger part of the state."""

_FEWEST_PEERS: Final = 2
"""The best of fewer says little."""


def find_targets(results: Results) -> list[Target]:
    """**Pure.** All targets; one that was not measured says so."""
    return [
        *_saves(results),
        *_training(results),
        *_restores(results),
        *_small_tensors(results),
        *_frozen(results),
        *_memory(results),
        *_small(results),
    ]


def _saves(results: Results) -> Iterator[Target]:
    own, reserved, overlapped = (
        summary_of(results, "model", f"holdfast{option}") for option in ("", ", reserved", ", overlapped")
    )
    figures = own.figures if own else {}
    yield _ratio("Stall of a save, from the second on", 1.15, "the bare copy", figures.get("stall"))
    yield _ratio("Stall of the first save", None, "the bare copy", own.first.get("stall") if own else None)
    first = reserved.first.get("stall") if reserved else None
    yield _ratio("The same, its memory allocated beforehand", None, "the bare copy", first)
    others = overlapped.figures if overlapped else {}
    yield _ratio("Overlapped copy: until the call returns", 0.15, "the bare copy", others.get("stall"))
    title = "Overlapped copy: until the state may change, if at once"
    yield _ratio(title, None, "the bare copy", others.get("held"))
    durable = figures.get("durable")
    # It writes over a file that is there, as it does by itself, and is held against the most that the disk gives.
    quickest = ratio_to_quickest(results, "model", "holdfast", "durable", ("write", "rewrite"))
    best = Figure(durable.value, quickest) if durable else None
    yield _ratio("Until durable", 1.15, "the quicker of the two bare direct writes", best)


def _training(results: Results) -> Iterator[Target]:
    title, must = "Training time lost for each save", "at most 0.25 of the best peer's"
    found = {s.contender: s.figures["lost"].value for s in summaries(results, "training") if "lost" in s.figures}
    peers = {name: lost for name, lost in found.items() if not name.startswith("holdfast")}
    if not peers:
        yield Target(title, must)
        return
    best = min(peers, key=lambda name: peers[name].median)
    least = peers[best].median
    for name, figure in (("holdfast", title), ("holdfast, overlapped", "The same, overlapped copy")):
        lost = found.get(name)
        if lost is None:
            yield Target(figure, must)
            continue
        # No save gains time: a negative value shows how unsteady the machine was.
        share = f"{lost.median / least:.2f} of it: " if lost.median > 0 else "too small to distinguish from noise: "
        holds = lost.median <= 0.25 * least if least > 0 else None
        # More than that of one peer's is more than that of the best one's; less need not be less.
        is_open = bool(holds) and len(peers) < _FEWEST_PEERS
        alone = "; no verdict, as no other peer was measured" if is_open else ""
        shown = f"{share if least > 0 else ''}{show_spread(lost)} s; {best} {show_spread(peers[best])} s{alone}"
        yield Target(figure, must, shown, None if is_open else holds)


def _restores(results: Results) -> Iterator[Target]:
    own = summary_of(results, "model", "holdfast")
    cold = own.figures.get("restore_cold") if own else None
    yield _ratio("Restore, cold, every byte checked", 1.2, "the bare direct read", cold)
    warm = ratio_to(results, "model", "holdfast", "restore_warm", "safetensors", "restore_warm")
    unit = "safetensors' `load_file` and the copy into the tensors"
    yield _bound("Restore, warm, every byte checked", 1.15, unit, warm)


def _small_tensors(results: Results) -> Iterator[Target]:
    own = summary_of(results, "small-tensors", "holdfast")
    limits = limits_of(results, "small-tensors")
    for key, title, most, unit in (
        ("stall", "stall", 5, "the bare copy"),
        ("restore_cold", "restore, cold", 20, "the bare direct read"),
        ("restore_warm", "restore, warm", 20, "the bare read from the page cache"),
    ):
        figure, must = f"Many small tensors: {title}", f"at most {most} microseconds a tensor"
        if own is None or key not in own.figures:
            yield Target(figure, must)
            continue
        value, count = own.figures[key].value, results.shapes["small-tensors"].tensors
        low, high = value.low / count * 1e6, value.high / count * 1e6
        each = Spread(value.median / count * 1e6, low, high, value.count)
        limit = limits.get(LIMIT_OF[key])
        # The most is one of time, which no disk can keep that takes longer for the bytes themselves.
        alone = f"; {unit} alone {limit.median / count * 1e6:.1f}" if limit else ""
        yield Target(figure, must, f"{show_spread(each)}{alone}", each.median <= most)


def _frozen(results: Results) -> Iterator[Target]:
    growth = growth_of(results, "holdfast, incremental")
    title, must = "Mostly frozen, ten saves: bytes on the disk", "at most 1.05 x a full state and nine times the change"
    if growth is None:
        yield Target(title, must)
        return
    yield Target(title, must, f"{growth.bytes_ratio:.2f} x", growth.bytes_ratio <= 1.05)
    shown = f"{growth.seconds_share:.2f} of the first one's time, for {growth.changed_share:.2f} of its bytes"
    yield Target("Mostly frozen: a later save, until durable", "in proportion", shown)


def _memory(results: Results) -> Iterator[Target]:
    title, must = "Extra memory while a save runs", "at most 1.05 x the state"
    own, shape = summary_of(results, "model", "holdfast"), results.shapes.get("model")
    if own and shape and own.save_extra_bytes is not None:
        extra = own.save_extra_bytes / shape.size_bytes
        yield Target(title, must, f"{extra:.2f} x", extra <= 1.05)
    else:
        yield Target(title, must)
    small, shape = summary_of(results, "small-tensors", "holdfast"), results.shapes.get("small-tensors")
    if small and shape and small.save_extra_bytes is not None:
        each_bytes = (small.save_extra_bytes - shape.size_bytes) / shape.tensors
        shown = f"{small.save_extra_bytes / shape.size_bytes:.2f} x: {each_bytes / 1e3:.1f} kB a tensor beside the copy"
        yield Target("The same, many small tensors", "the copy, and what has to be noted for each", shown)
    title, must = f"Extra memory over {COUNTED[-1]} saves", "level"
    held = {entry.number: entry.figures for entry in rounds_of(results, "many-saves", "holdfast")}
    if COUNTED[-1] not in held:
        yield Target(title, must)
        return
    size_bytes = results.shapes["many-saves"].size_bytes
    parts = {number: figures["held_bytes"] / size_bytes for number, figures in held.items()}
    shown = ", ".join(f"{part:.2f} after {number}" for number, part in parts.items())
    yield Target(title, must, shown, parts[COUNTED[-1]] - parts[COUNTED[0]] <= _LEVEL)


def _small(results: Results) -> Iterator[Target]:
    rounds = [entry.figures for entry in rounds_of(results, "small", "holdfast")]
    imported, turn = ("Import, without a framework", "under 150 ms"), "`steps()`, a step that saves nothing"
    if not rounds:
        yield from (Target(*imported), Target(turn, "under 20 microseconds"))
        return
    seconds = median(figures["start_holdfast"] - figures["start"] for figures in rounds)
    yield Target(*imported, f"{seconds * 1000:.0f} ms", seconds < 0.150)
    turns = {name: median(figures[f"turn_{name}"] for figures in rounds) * 1e6 for name in ("steps", "auto", "seconds")}
    shown = ", ".join(f"{value:.1f} with `{name.capitalize()}`" for name, value in turns.items())
    yield Target(turn, "under 20 microseconds", shown, max(turns.values()) < 20)


def _ratio(figure: str, most: float | None, unit: str, found: Figure | None) -> Target:
    target = _bound(figure, most, unit, found.ratio if found else None)
    if found is None or found.ratio is None:
        return target
    return Target(target.figure, target.must, f"{target.reached}; {show_spread(found.value)} s", target.holds)


def _bound(figure: str, most: float | None, unit: str, found: Spread | None) -> Target:
    must = f"at most {most:g} x {unit}" if most is not None else f"as near to {unit} as may be"
    if found is None:
        return Target(figure, must)
    return Target(figure, must, f"{show_spread(found)} x", found.median <= most if most is not None else None)
