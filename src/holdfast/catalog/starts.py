"""The earlier starts of a run: how long each trained, and how many of them failed, from its journal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.events.sinks import JOURNAL_NAMES

_READ_BYTES: Final = 512 << 10
"""The newest events of this size are read: some two thousand saves."""

_MOST_STARTS: Final = 50
"""Older starts say little of the machines of today."""

_KINDS: Final = ("generation_opened", "restored", "committed", "leaving")


class PastStarts(NamedTuple):
    """The number of the earlier starts of a run, and their time.

    Attributes:
        failures: How many of them failed.
        observed_seconds: How long all of them trained.
    """

    failures: int = 0
    observed_seconds: float = 0.0


def read_starts(directory: Path) -> PastStarts:
    """**Blocks** for milliseconds. Returns what a run's journal says; nothing if it has none, or it cannot be read."""
    events: list[dict[str, Any]] = []
    for name in JOURNAL_NAMES:
        with suppress(OSError), (directory / name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _READ_BYTES, 0))
            for line in file.read(_READ_BYTES).splitlines():
                with suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("kind") in _KINDS:
                        events.append(event)
    return count_starts(events)


def count_starts(events: Iterable[dict[str, Any]]) -> PastStarts:
    """**Pure.** Returns how many starts failed, and how long all trained.

    A start that saved nothing is not known. One that left because it was asked to, with its state saved, has not
    failed. Of the others the death is not in the journal: it came after the newest save, half an interval later on
    average.

    Args:
        events: The events of the run, oldest first, as the journal has them.
    """
    starts: list[tuple[float, list[float], bool]] = []
    begun: float | None = None
    for event in events:
        at, kind = event.get("at_unix_seconds"), event["kind"]
        if not isinstance(at, int | float):
            continue
        if kind == "restored":
            begun = at
        elif kind == "generation_opened":
            starts.append((at if begun is None else begun, [], False))
            begun = None
        elif starts and begun is None:
            first, saved, has_left = starts[-1]
            starts[-1] = (first, [*saved, at] if kind == "committed" else saved, has_left or kind == "leaving")
    newest = starts[-_MOST_STARTS:]
    failures = sum(not has_left for _, _, has_left in newest)
    return PastStarts(failures, sum(_find_seconds(first, saved, fails=not left) for first, saved, left in newest))


def _find_seconds(first: float, saved: list[float], *, fails: bool) -> float:
    if not saved:
        return 0.0
    trained = max(saved[-1] - first, 0.0)
    interval = (saved[-1] - saved[0]) / (len(saved) - 1) if len(saved) > 1 else trained
    return trained + max(interval, 0.0) / 2 * fails
