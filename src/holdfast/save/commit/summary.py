"""What the owner of the newest generation does so that a long history costs nobody anything.

It sums up old steps in one file, and removes records of old generations that the line needs no more. Nothing here is
needed for a checkpoint to count. A summary says of a step that it is committed, and nobody looks into its directory
then. Therefore the step is taken out of the summary before its manifest goes.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.catalog import Catalog, History, check_fence, is_committed, try_summary
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.digests import seal
from holdfast.format.names import (
    GENERATIONS_DIRECTORY,
    StepName,
    base_path,
    generation_path,
    parse_summary_file,
    summary_path,
)
from holdfast.format.records import KEPT_GENERATIONS, MAX_SUMMARY_BYTES, Summary, plan_forgetting
from holdfast.storage.protocol import Storage

FEW: Final = 16
"""A run with no more steps, and no more generations, is not summed up."""

_NEWEST: Final = 4
"""So many of the newest steps are never in a summary: their manifests are looked for at each look."""

_BATCH: Final = 8
"""A summary is written when so many steps have come that are not in the last one. When one step has to be taken out, so
many of the oldest are left out with it: they are likely to go next."""

_LOOKED_AT: Final = 2
"""So many steps of the summary are looked at after each save, in turn: somebody may have removed their manifests."""

_MOST_FORGOTTEN: Final = 512
"""The records of so many generations are removed after one save."""


class Summarizer:
    """Sums up the history of one run. Not thread-safe.

    All but `release` leave the run as it counts, whatever fails: without a summary, each directory is looked into.
    """

    def __init__(self, storage: Storage, history: History, token: str) -> None:
        self._storage = storage
        self._history = history
        self._token = token
        # What was left out of the last summary on purpose, and whether steps are removed again and again.
        self._left_out: frozenset[StepName] = frozenset()
        self._removes = False
        # Which step was looked at last. Each job begins elsewhere.
        self._turn = int(token[:8], 16)

    def carry_over(self, generation: int) -> None:
        """**Blocks.** Takes over the summary of the generation before, which a new one has just made out of date.

        The generation before takes a step out of its summary, then looks whether it is still the newest, and only then
        removes the step. So if it removes a step after this generation was opened, the summary that is read here lacks
        it. A crash before this has written leaves a run without a summary, which is looked at closely.
        """
        history = self._history
        history.look()
        before = max((opened for opened in history.opened if opened < generation), default=0)
        numbers = [number for owner, number in history.summaries if owner == before]
        summary = try_summary(self._storage, before, max(numbers)) if numbers else None
        if summary is not None and history.opened[-1] == generation:
            with suppress(HoldfastError):
                self._write(msgspec.structs.replace(summary, generation=generation, number=1, token=self._token))

    def release(self, names: tuple[StepName, ...], catalog: Catalog, generation: int) -> tuple[StepName, ...]:
        """**Blocks.** Makes sure that no summary vouches for steps that are to be removed; gives those that may be.

        A step that has lost its manifest stays: only a person removes it. A crash after this leaves steps that are
        looked at one by one.

        Raises:
            FencedError: If a newer generation was opened.
            StorageError: If a summary still vouches for them. They must stay.
        """
        history = self._history
        believed = history.believed.intersection(names)
        if not believed:
            return names
        self._removes = True
        lost = {name for name in believed if not is_committed(self._storage, name)}
        try:
            self._sum_up(catalog, generation, names)
        except HoldfastError:
            # It may be there or not. Without any, each directory is looked into; and a full disk has room for that.
            drop_summaries(self._storage)
            history.believe(None)
        check_fence(self._storage, generation)
        return tuple(name for name in names if name not in lost)

    def update(self, catalog: Catalog, going: Collection[StepName], generation: int) -> None:
        """**Blocks.** Looks at a few old steps, and sums up anew if much has come since the last time.

        No summary vouches for what is `going`: it may be half removed.
        """
        history = self._history
        with suppress(HoldfastError):
            new = self._list_old(catalog, going).difference(history.believed, self._left_out)
            told = {base.generation for base in (history.summary.bases if history.summary else ())}
            if len(new) >= _BATCH or len(catalog.bases.keys() - told) > FEW:
                self._sum_up(catalog, generation, going)
            self._look_at_some(catalog)
        if len(history.opened) > KEPT_GENERATIONS + _BATCH and not catalog.faults:
            with suppress(HoldfastError):
                self._forget_generations(catalog)

    def _look_at_some(self, catalog: Catalog) -> None:
        for _ in range(_LOOKED_AT):
            self._turn = (self._turn + 1) % len(catalog.committed)
            name = catalog.committed[self._turn]
            if name in self._history.believed and not is_committed(self._storage, name):
                # Where one is wrong, more may be: the next look is a close one.
                self._history.believe(None)
                drop_summaries(self._storage)

    def _list_old(self, catalog: Catalog, left_out: Collection[StepName]) -> set[StepName]:
        """The steps that a summary may vouch for: they are committed, or are believed to be."""
        return set(catalog.committed).difference(catalog.living[-_NEWEST:], left_out)

    def _sum_up(self, catalog: Catalog, generation: int, left_out: Collection[StepName]) -> None:
        history = self._history
        old = sorted(self._list_old(catalog, left_out))
        apart = frozenset(old[:_BATCH] if self._removes else ())
        facts = {name: known for name in old if name not in apart and (known := history.facts(name)) is not None}
        numbers = [number for owner, number in history.summaries if owner == generation]
        self._write(
            Summary(
                generation=generation,
                number=max(numbers, default=0) + 1,
                token=self._token,
                directories=tuple(name.directory for name in facts),
                facts=msgspec.Raw(msgspec.json.encode(tuple(facts.values()))),
                bases=tuple(catalog.bases.values()),
            )
        )
        self._left_out = apart

    def _write(self, summary: Summary) -> None:
        """**Blocks.** Publishes a summary, and removes those before the last one.

        A crash before it appears leaves the last one, after it both. The last one stays beside it for those who have
        just seen its name.
        """
        data = seal(summary)
        path = summary_path(summary.generation, summary.number)
        if len(data) > MAX_SUMMARY_BYTES or not self._storage.publish(path, data):
            raise StorageError(f"{self._storage.url}: {path} cannot be written", path=path)
        own = (summary.generation, summary.number)
        before = [one for one in self._history.summaries if one < own]
        self._history.summaries = [*before[-1:], own]
        self._history.believe(summary)
        for owner, number in before[:-1]:
            self._storage.remove(summary_path(owner, number))

    def _forget_generations(self, catalog: Catalog) -> None:
        """**Blocks.** Removes records of generations that say nothing which the line needs.

        A crash in the middle leaves some of them, and the line as it is.
        """
        others = [*set(catalog.committed).difference(catalog.living), *catalog.unfinished, *catalog.lost]
        first, then = plan_forgetting(catalog.living, others, catalog.bases, self._history.opened)
        for generations in (first[:_MOST_FORGOTTEN], then[:_MOST_FORGOTTEN] if len(first) <= _MOST_FORGOTTEN else ()):
            for generation in generations:
                self._storage.remove(base_path(generation))
                self._storage.remove(generation_path(generation))
            if generations:
                self._storage.sync_directory(GENERATIONS_DIRECTORY)


def drop_summaries(storage: Storage) -> None:
    """**Blocks.** Removes all summaries for good, so that each directory is looked into until there is a new one.

    Raises:
        StorageError: If one may still be there.
    """
    # The last one goes last, and is the only one by then: an older one may vouch for what has been removed since.
    for summary in sorted(filter(None, (parse_summary_file(one.name) for one in storage.list(GENERATIONS_DIRECTORY)))):
        storage.remove(summary_path(*summary))
        storage.sync_directory(GENERATIONS_DIRECTORY)
