"""The section of the page that shows what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from benchmarks.frameworks import FRAMEWORKS, NOTHING
from benchmarks.frameworks.comparison import Plan, name_restarts
from benchmarks.harness.results import Results
from benchmarks.harness.summary import Spread, limits_of, rounds_of, spread
from benchmarks.harness.tables import draw_table, show_number, show_scale, show_spread, show_strong

TITLE: Final = "## In the loops of frameworks"
MOST: Final = 0.2
"""The part of what a framework's own checkpointing takes that holdfast may take."""

_HOLDFAST: Final = "holdfast"
_SAVES: Final = {
    "step": "a step, s",
    "lost": "lost for each save, s",
    "lost_cpu": "processor time of a save, s",
    "stall": "stall, s",
    "longest": "longest step, s",
    "first_stall": "stall of the first save, s",
}
_RESTARTS: Final = {"first": "first step, s", "resume": "first new step, s"}


def keep_section(page: str, old_page: str) -> str:
    """**Pure.** A page with the section of an older one instead of its own, if the older one has it."""
    head = f"\n{TITLE}\n"
    _, title, section = old_page.partition(head)
    return f"{page.partition(head)[0].rstrip()}\n{title}{section}" if title else page


def render_section(results: Results, plan: Plan) -> str:
    """**Pure.** The section in Markdown."""
    return "\n".join(
        [*_head(results, plan), *_goals(results), *_saves(results), *_restarts(results), *_failures(results)]
    )


def _head(results: Results, plan: Plan) -> Iterator[str]:
    machine = results.machine
    yield f"{TITLE}\n"
    yield (
        "Made by `make bench-frameworks`. holdfast and a framework's own checkpointing take turns, each in a fresh "
        f"process that computes with two threads; medians of {plan.rounds} rounds, with the smallest and the largest. "
        f"{machine.cores} cores ({machine.processor}), {machine.memory_bytes / 2**30:.0f} GiB of memory, "
        f"{machine.file_system}. {', '.join(f'{name} {version}' for name, version in machine.versions.items())}.\n"
    )
    yield from show_scale(results, "The models were")


def _goals(results: Results) -> Iterator[str]:
    """Holdfast's part of the others' costs, and the machine's own costs where that part is too large."""
    yield f"What holdfast takes, as a part of what the other takes. The goal is at most {MOST:g}; more is bold.\n"
    rows, missed = [], []
    for name, framework in FRAMEWORKS.items():
        for way in framework.ways[1:]:
            for is_stream in (False, True):
                restarts = name_restarts(name, is_stream=is_stream)
                parts = [(name, "lost"), (name, "lost_cpu"), (name, "stall"), (restarts, "resume")]
                shares = [None if is_stream and part[0] == name else _share(results, *part, way) for part in parts]
                shares.append(_share(results, *parts[-1], way, beyond=True))
                if all(share is None for share in shares):
                    continue
                title = f"{framework.title}, {way}{', a stream' if is_stream else ''}"
                rows.append([title, *("" if share is None else str(share) for share in shares)])
                missed += [
                    f"- {title}: {_explain(results, name, *part, way)}"
                    for part, share in zip(parts, shares, strict=False)
                    if share is not None and share.is_missed()
                ]
    heads = ["time lost for each save", "processor time of a save", "stall of a save"]
    yield from draw_table(["", *heads, "restart", "restart, beyond a first start"], rows)
    if missed:
        yield "Where it is missed:\n"
        yield from missed
        yield ""


class _Share(NamedTuple):
    """Holdfast's part of the other's costs.

    Attributes:
        value: The part; infinite if the other's rounds do not differ from nothing.
        is_bound: Whether holdfast's rounds do not differ from nothing, so that this is the most that it may be.
    """

    value: float
    is_bound: bool = False

    def is_missed(self) -> bool:
        """True if it is more than the goal."""
        return MOST < self.value < math.inf and not self.is_bound

    def __str__(self) -> str:
        if self.value == math.inf:
            return "within the noise"
        if self.is_bound:
            return f"within the noise (below {self.value:.2f})"
        return f"**{self.value:.2f}**" if self.is_missed() else f"{self.value:.2f}"


def _share(results: Results, part: str, key: str, way: str, *, beyond: bool = False) -> _Share | None:
    own, peer = _spread(results, part, _HOLDFAST, key), _spread(results, part, way, key)
    start = _spread(results, part, NOTHING, "first") if beyond else Spread(0.0, 0.0, 0.0, 1)
    if own is None or peer is None or start is None:
        return None
    if peer.low <= start.high:
        return _Share(math.inf)
    whole = peer.median - start.median
    if own.low <= start.high:
        bound = (own.high - start.median) / whole
        return _Share(bound, is_bound=True) if bound > 0 else _Share(math.inf)
    return _Share((own.median - start.median) / whole)


def _explain(results: Results, name: str, part: str, key: str, way: str) -> str:
    """The costs of holdfast and of the other, and the least that both need."""
    limits = limits_of(results, name)
    own, peer = _median(results, part, _HOLDFAST, key), _median(results, part, way, key)
    if key == "resume":
        start, whole = _spread(results, part, NOTHING, "first"), _spread(results, part, way, key)
        alone = _median(results, part, NOTHING, "first")
        shown = f"a restart takes {own} s and {peer} s. A first start alone takes {alone} s"
        if start is None or whole is None or not limits:
            return f"{shown}."
        read = limits["read_cold"].median
        least = (start.median + read) / whole.median
        return f"{shown}, and a bare direct read of as many bytes {show_number(read)} s: {least:.2f} of the other's."
    what = {"lost": "a save costs training", "lost_cpu": "a save takes processor time of"}.get(
        key, "a save stalls training for"
    )
    copy = f" A bare copy of these bytes takes {show_number(limits['copy'].median)} s." if limits else ""
    return f"{what} {own} s and {peer} s.{copy}"


def _median(results: Results, part: str, way: str, key: str) -> str:
    found = _spread(results, part, way, key)
    return "" if found is None else show_number(found.median)


def _saves(results: Results) -> Iterator[str]:
    yield "### A save\n"
    yield (
        "A model of 17 million parameters with AdamW state, 0.20 GB. Lost is what the steps with a save took longer "
        "than as many without, in a fit of the same process before and after it: the stall, and what the work in the "
        "background takes from training. Processor time is that of all threads, beyond the steps themselves; other "
        "work on the machine hardly changes it. The stall is the step that a save falls into, less a step without one. "
        "The first save of a fit, which makes memory and files ready, is a column of its own. All processes keep the "
        "memory that they have freed (`MALLOC_TRIM_THRESHOLD_`), and Python's collector passes over what was there "
        "before (`gc.freeze`): otherwise the speed of a fit's steps is a matter of chance.\n"
    )
    for name, framework in FRAMEWORKS.items():
        limits = limits_of(results, name)
        if limits:
            yield (
                f"{framework.title}: a bare copy of these bytes into touched memory took "
                f"{show_spread(limits['copy'])} s, a bare direct write {show_spread(limits['write'])} s.\n"
            )
    rows: list[list[str]] = []
    for name, framework in FRAMEWORKS.items():
        for way in framework.ways:
            rows += _rows(results, framework.title, name, way, way, _SAVES)
    yield from draw_table(["", "saved by", *_SAVES.values()], rows)


def _restarts(results: Results) -> Iterator[str]:
    yield "### A restart in the middle of an epoch\n"
    yield (
        "The same amount of state, most of it frozen, and samples that take a millisecond to load, two a step. The job "
        "was ended after 2,000 steps of its epoch, and its files are not in the page cache. Measured from the call of "
        "`fit`, with all imported and the model made, until a step is complete that was not trained before. In "
        "Lightning, ModelCheckpoint has a `StatefulDataLoader`, since Lightning keeps no place in a plain one. The "
        "BackupAndRestore of Keras begins the epoch again. Orbax keeps no place in the data; its loop passes over "
        "batches.\n"
    )
    rows: list[list[str]] = []
    for name, framework in FRAMEWORKS.items():
        for is_stream in (False, True):
            for way in (NOTHING, *framework.ways):
                title = f"{framework.title}, a stream" if is_stream else framework.title
                shown = "not saved: a first start" if way == NOTHING else way
                rows += _rows(results, title, name_restarts(name, is_stream=is_stream), way, shown, _RESTARTS)
    yield from draw_table(["", "saved by", *_RESTARTS.values()], rows)


def _failures(results: Results) -> Iterator[str]:
    yield from (f"- {part}, {way}: {reason}" for part, way, reason in results.failures)
    yield from (f"- {name}: {reason}" for name, reason in results.missing.items())


def _rows(results: Results, title: str, part: str, way: str, shown: str, keys: Iterable[str]) -> Iterator[list[str]]:
    """A row, if anything was measured."""
    found = [_spread(results, part, way, key) for key in keys]
    if any(found):
        yield [title, show_strong(shown), *("" if one is None else show_spread(one) for one in found)]


def _spread(results: Results, part: str, way: str, key: str) -> Spread | None:
    values = [entry.figures[key] for entry in rounds_of(results, part, way) if key in entry.figures]
    return spread(values) if values else None
