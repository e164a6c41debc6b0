"""What holdfast must reach, and what it has reached. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    standing_of,
    standings,
)
from benchmarks.harness.tables import multiple, seconds, show_spread
from benchmarks.one_process.parts import COUNTED, growth_of

_LEVEL: Final = 0.05
"""Memory counts as level if it grows by no larger part of the state."""

_FEWEST_PEERS: Final = 2
"""The best of fewer says little."""


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table.

    Attributes:
        figure: What is measured.
        must: What it must reach, in words.
        reached: What it has reached, in words.
        holds: Whether that is enough; None where nothing is demanded, or nothing was measured.
    """

    figure: str
    must: str
    reached: str
    holds: bool | None


def target_lines(targets: Iterable[Target]) -> Iterator[str]:
    """**Pure.** Yields the lines of a table of targets."""
    yield "| | must reach | has reached | |"
    yield "|---|---|---|---|"
    for target in targets:
        verdict = {True: "yes", False: "**no**", None: ""}[target.holds]
        yield f"| {target.figure} | {target.must} | {target.reached} | {verdict} |"
    yield ""


def find_targets(results: Results) -> list[Target]:
    """**Pure.** All targets; one that was not measured says so."""
    return [*_saves(results), *_training(results), *_restores(results), *_small_tensors(results), *_rest(results)]


def _saves(results: Results) -> Iterator[Target]:
    own = standing_of(results, "model", "holdfast")
    figures = own.figures if own else {}
    yield _ratio("Stall of a save, from the second on", 1.15, "the bare copy", figures.get("stall"))
    yield _ratio("Stall of the first save", None, "the bare copy", own.first.get("stall") if own else None)
    ready = standing_of(results, "model", "holdfast, reserved")
    title = "The same, its memory allocated beforehand"
    yield _ratio(title, None, "the bare copy", ready.first.get("stall") if ready else None)
    lapped = standing_of(results, "model", "holdfast, overlapped")
    figures_lapped = lapped.figures if lapped else {}
    stall = _ratio("Overlapped copy: until the call returns", 0.15, "the bare copy", figures_lapped.get("stall"))
    yield stall
    held = figures_lapped.get("held")
    yield _ratio("Overlapped copy: until the state may change, if at once", None, "the bare copy", held)
    durable = figures.get("durable")
    # It writes over a file that is there, as it does by itself, and is held against the most that the disk gives.
    quickest = ratio_to_quickest(results, "model", "holdfast", "durable", ("write", "rewrite"))
    best = Figure(durable.value, quickest) if durable else None
    yield _ratio("Until durable", 1.15, "the quicker of the two bare direct writes", best)


def _training(results: Results) -> Iterator[Target]:
    figure, must = "Training time lost for each save", "at most 0.25 of the best peer's"
    found = {s.contender: s.figures["lost"].value for s in standings(results, "training") if "lost" in s.figures}
    peers = {name: lost for name, lost in found.items() if not name.startswith("holdfast")}
    if not peers:
        yield Target(figure, must, "not measured", None)
        return
    best = min(peers, key=lambda name: peers[name].median)
    least = peers[best].median
    for name in ("holdfast", "holdfast, overlapped"):
        title = figure if name == "holdfast" else "The same, overlapped copy"
        lost = found.get(name)
        if lost is None:
            yield Target(title, must, "not measured", None)
            continue
        share = _share_of(lost.median, least) if least > 0 else ""
        holds = lost.median <= 0.25 * least if least > 0 else None
        # More than that of one peer's is more than that of the best one's; less need not be less.
        is_open = bool(holds) and len(peers) < _FEWEST_PEERS
        alone = "; no verdict, as no other peer was measured" if is_open else ""
        reached = f"{share}{show_spread(lost)} s; {best} {show_spread(peers[best])} s{alone}"
        yield Target(title, must, reached, None if is_open else holds)


def _share_of(lost_seconds: float, least_seconds: float) -> str:
    # No save gains time: a negative value shows how unsteady the machine was.
    return (
        f"{lost_seconds / least_seconds:.2f} of it: " if lost_seconds > 0 else "too small to distinguish from noise: "
    )


def _restores(results: Results) -> Iterator[Target]:
    own = standing_of(results, "model", "holdfast")
    figures = own.figures if own else {}
    yield _ratio("Restore, cold, every byte checked", 1.2, "the bare direct read", figures.get("restore_cold"))
    warm = ratio_to(results, "model", "holdfast", "restore_warm", "safetensors", "restore_warm")
    yield _bound(
        "Restore, warm, every byte checked", 1.15, "safetensors' `load_file` and the copy into the tensors", warm
    )


def _small_tensors(results: Results) -> Iterator[Target]:
    own = standing_of(results, "small-tensors", "holdfast")
    limits = limits_of(results, "small-tensors")
    for key, title, most, unit in (
        ("stall", "stall", 5, "the bare copy"),
        ("restore_cold", "restore, cold", 20, "the bare direct read"),
        ("restore_warm", "restore, warm", 20, "the bare read from the page cache"),
    ):
        figure, must = f"Many small tensors: {title}", f"at most {most} microseconds a tensor"
        value = own.figures[key].value if own and key in own.figures else None
        if value is None:
            yield Target(figure, must, "not measured", None)
            continue
        count = results.shapes["small-tensors"].tensors
        each = [part / count * 1e6 for part in (value.median, value.low, value.high)]
        shown = show_spread(Spread(each[0], each[1], each[2], value.count))
        limit = limits.get(LIMIT_OF[key])
        # The most is one of time, which no disk can keep that takes longer for the bytes themselves.
        alone = f"; {unit} alone {limit.median / count * 1e6:.1f}" if limit else ""
        yield Target(figure, must, f"{shown}{alone}", each[0] <= most)


def _rest(results: Results) -> Iterator[Target]:
    yield from _frozen(results)
    yield from _memory(results)
    rounds = [entry.figures for entry in rounds_of(results, "small", "holdfast")]
    imports = [figures["start_holdfast"] - figures["start"] for figures in rounds]
    must = "under 150 ms"
    if imports:
        yield Target("Import, without a framework", must, seconds(median(imports)), median(imports) < 0.150)
    else:
        yield Target("Import, without a framework", must, "not measured", None)
    turns = {
        name: median([figures[f"turn_{name}"] for figures in rounds]) * 1e6
        for name in ("steps", "auto", "seconds")
        if rounds
    }
    shown = ", ".join(f"{value:.1f} with `{name.capitalize()}`" for name, value in turns.items())
    yield Target(
        "`steps()`, a step that saves nothing",
        "under 20 microseconds",
        shown or "not measured",
        max(turns.values()) < 20 if turns else None,
    )


def _frozen(results: Results) -> Iterator[Target]:
    name = "holdfast, incremental"
    growth = growth_of(results, name)
    figure, must = (
        "Mostly frozen, ten saves: bytes on the disk",
        "at most 1.05 x a full state and nine times the change",
    )
    if growth is None:
        yield Target(figure, must, "not measured", None)
        return
    yield Target(figure, must, multiple(growth.bytes_ratio), growth.bytes_ratio <= 1.05)
    yield Target(
        "Mostly frozen: a later save, until durable",
        "in proportion",
        f"{growth.seconds_share:.2f} of the first one's time, for {growth.changed_share:.2f} of its bytes",
        None,
    )


def _memory(results: Results) -> Iterator[Target]:
    own = standing_of(results, "model", "holdfast")
    shape = results.shapes.get("model")
    extra = own.save_extra_bytes / shape.size_bytes if own and shape and own.save_extra_bytes is not None else None
    yield Target(
        "Extra memory while a save runs",
        "at most 1.05 x the state",
        multiple(extra) if extra is not None else "not measured",
        extra <= 1.05 if extra is not None else None,
    )
    small, shape = standing_of(results, "small-tensors", "holdfast"), results.shapes.get("small-tensors")
    if small and shape and small.save_extra_bytes is not None:
        each_bytes = (small.save_extra_bytes - shape.size_bytes) / shape.tensors
        shown = multiple(small.save_extra_bytes / shape.size_bytes)
        yield Target(
            "The same, many small tensors",
            "the copy, and what has to be noted for each",
            f"{shown}: {each_bytes / 1e3:.1f} kB a tensor beside the copy",
            None,
        )
    figure, must = f"Extra memory over {COUNTED[-1]} saves", "level"
    held = {entry.number: entry.figures for entry in rounds_of(results, "many-saves", "holdfast")}
    if COUNTED[-1] not in held:
        yield Target(figure, must, "not measured", None)
        return
    size_bytes = results.shapes["many-saves"].size_bytes
    parts = {number: figures["held_bytes"] / size_bytes for number, figures in held.items()}
    shown = ", ".join(f"{part:.2f} after {number}" for number, part in parts.items())
    yield Target(figure, must, shown, parts[COUNTED[-1]] - parts[COUNTED[0]] <= _LEVEL)


def _ratio(figure: str, most: float | None, unit: str, found: Figure | None) -> Target:
    target = _bound(figure, most, unit, found.ratio if found else None)
    if found is None or found.ratio is None:
        return target
    return Target(target.figure, target.must, f"{target.reached}; {show_spread(found.value)} s", target.holds)


def _bound(figure: str, most: float | None, unit: str, found: Spread | None) -> Target:
    must = f"at most {most:g} x {unit}" if most is not None else f"as near to {unit} as may be"
    if found is None:
        return Target(figure, must, "not measured", None)
    return Target(figure, must, f"{show_spread(found)} x", found.median <= most if most is not None else None)
