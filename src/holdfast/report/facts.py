"""The facts that a page about a run shows, read from its storage alone."""

from __future__ import annotations

import time
from collections import deque
from typing import Final, NamedTuple

from holdfast.catalog import StoredRun
from holdfast.catalog.ledger import RunTimes, sum_up
from holdfast.catalog.survey import Survey, survey_run
from holdfast.events.kinds import (
    Clocked,
    Committed,
    Diverged,
    Event,
    Failed,
    Leaving,
    NotFinite,
    NoticeHeard,
    PartsWritten,
    PassedOver,
    Resized,
    Restored,
    Retained,
    Skipped,
    Warned,
    WitnessDiffers,
)
from holdfast.format.names import StepName
from holdfast.storage import Storage
from holdfast.storage.tiers import Tiers

NEWS: Final = (Failed, Warned, Skipped, PassedOver, Resized, Diverged, NotFinite, WitnessDiffers, NoticeHeard, Leaving)
"""Events that a person should know of, in the order in which they happened."""

MOST_NEWS: Final = 500
MOST_SAVES: Final = 20_000


class RunFacts(NamedTuple):
    """A run at one moment.

    Attributes:
        location: Its place, as a person would write it.
        looked_at: When it was looked at, in seconds since 1970.
        survey: Its checkpoints.
        times: Where its time went.
        saves: Its commits, oldest first; the newest 20,000.
        parts: How long several workers took for their parts of these.
        restores: Its restores.
        news: Warnings, errors, notices and ends, oldest first; the newest 500.
        kept: Why each step is kept, as of the newest save.
        places: Where each step is, the nearest place first; empty if the run was looked at in one place.
    """

    location: str
    looked_at: float
    survey: Survey
    times: RunTimes
    saves: tuple[Committed, ...]
    parts: tuple[PartsWritten, ...]
    restores: tuple[Restored, ...]
    news: tuple[Event, ...]
    kept: dict[int, str]
    places: dict[StepName, list[str]]


def find_places(storage: Storage) -> dict[StepName, list[str]]:
    """**Blocks.** Returns the tiers in which each step of a run is committed; nothing for a storage without tiers."""
    places: dict[StepName, list[str]] = {}
    for tier in storage.tiers if isinstance(storage, Tiers) else ():
        for name in StoredRun(tier.storage).look().committed:
            places.setdefault(name, []).append(tier.url)
    return places


def read_facts(storage: Storage, location: str) -> RunFacts:
    """**Blocks.** Reads a run's journal, and the manifests of its checkpoints.

    Raises:
        StorageError: If the storage cannot be read.
    """
    saves: deque[Committed] = deque(maxlen=MOST_SAVES)
    parts: deque[PartsWritten] = deque(maxlen=MOST_SAVES)
    news: deque[Event] = deque(maxlen=MOST_NEWS)
    clocked: dict[float, Clocked] = {}
    restores: list[Restored] = []
    kept: dict[int, str] = {}
    for event in StoredRun(storage).read_journal():
        if isinstance(event, Committed):
            saves.append(event)
        elif isinstance(event, PartsWritten):
            parts.append(event)
        elif isinstance(event, Clocked):
            begun_at = event.begun_at_unix_seconds
            if begun_at not in clocked or event.at_unix_seconds >= clocked[begun_at].at_unix_seconds:
                clocked[begun_at] = event
        elif isinstance(event, Restored):
            restores.append(event)
        elif isinstance(event, Retained):
            kept = event.kept
        elif isinstance(event, NEWS):
            news.append(event)
    return RunFacts(
        location=location,
        looked_at=time.time(),
        survey=survey_run(storage),
        times=sum_up([*clocked.values(), *saves, *parts]),
        saves=tuple(saves),
        parts=tuple(parts),
        restores=tuple(restores),
        news=tuple(news),
        kept=kept,
        places=find_places(storage),
    )
