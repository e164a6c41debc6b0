"""Keeps long histories cheap: the owner of the newest generation summarizes old steps in one file.

No checkpoint depends on a summary. A summary says that a step is committed, and then its directory is not looked into.
Therefore a step is taken out of the summary before its manifest is removed.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.catalog.history import NEWEST, try_summary
from holdfast.catalog.stored_run import Catalog, StoredRun
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.digests import seal
from holdfast.format.names import (
    StepName,
    summary_path,
)
from holdfast.format.records import MAX_SUMMARY_BYTES, Summary

FEW: Final = 16
"""A run with no more steps, and no more generations, gets no summary."""

_BATCH: Final = 8
"""A summary is written once this many steps are missing in the last one. When one step has to be taken out, this many
of the oldest are left out with it: they are likely to be removed next."""

_LOOKS: Final = 64
"""So many looks for the manifests of fewer steps cost as much as a summary, so that one is written too."""

_LOOKED_AT: Final = 2
"""This many of the old steps are checked after each save, in turn, because their manifests may have been removed by
hand."""


class Summarizer:
    """Summarizes the history of one run. Not thread-safe.

    If anything but `release` fails, the run is unchanged: without a summary, each directory is looked into.
    """

    def __init__(self, run: StoredRun, token: str) -> None:
        self._run = run
        self._history = run.history
        self._token = token
        # What was left out of the last summary on purpose, and whether steps are removed again and again.
        self._left_out: frozenset[StepName] = frozenset()
        self._removes = False
        # How often a manifest was looked for because the last summary does not list the step.
        self._looks = 0
        # Which step was looked at last. Each job begins elsewhere.
        self._turn = int(token[:8], 16)

    def carry_over(self, generation: int) -> None:
        """**Blocks.** Takes over the summary of the generation before, which a new one has just made out of date.

        The generation before takes a step out of its summary, then checks that it is still the newest, and only then
        removes the step. So if it removes a step after this generation was opened, the summary that is read here lacks
        it. A crash before this is written leaves a run without a summary, whose directories are all looked into.
        """
        history = self._history
        history.look()
        before = max((opened for opened in history.opened if opened < generation), default=0)
        numbers = [number for owner, number in history.summaries if owner == before]
        summary = try_summary(self._run.storage, before, max(numbers)) if numbers else None
        if summary is not None and history.opened[-1] == generation:
            with suppress(HoldfastError):
                self._write(msgspec.structs.replace(summary, generation=generation, number=1, token=self._token))

    def release(self, names: tuple[StepName, ...], catalog: Catalog, generation: int) -> tuple[StepName, ...]:
        """**Blocks.** Takes steps that are about to be removed out of the summary; returns those that may be removed.

        A step that has lost its manifest stays: it is only removed by hand. A crash after this leaves steps that are
        looked at one by one.

        Raises:
            FencedError: If a newer generation was opened.
            StorageError: If a summary still lists them. They must stay.
        """
        history = self._history
        lost = {name for name in names if name in history.trusted and not self._run.step(name).is_committed()}
        history.trusted = history.trusted.difference(names)
        if history.believed.intersection(names):
            self._removes = True
            try:
                self._sum_up(catalog, generation, names)
            except HoldfastError:
                # It may be there or not. Without any, each directory is looked into; and a full disk has room for that.
                history.drop_summaries()
            self._run.check_fence(generation)
        return tuple(name for name in names if name not in lost)

    def update(self, catalog: Catalog, going: Collection[StepName], generation: int) -> None:
        """**Blocks.** Checks a few old steps, and writes a new summary if many steps have come since the last one.

        No summary lists steps that are `going`: they may be half removed.
        """
        history = self._history
        with suppress(HoldfastError):
            new = self._list_old(catalog, going).difference(history.believed, self._left_out)
            if not self._run.storage.traits.lists_deep:
                self._looks += len(new.difference(history.trusted))
            summed_up = {base.generation for base in (history.summary.bases if history.summary else ())}
            if len(new) >= _BATCH or self._looks >= _LOOKS or len(catalog.bases.keys() - summed_up) > FEW:
                self._sum_up(catalog, generation, going)
            self._look_at_some(catalog)

    def _look_at_some(self, catalog: Catalog) -> None:
        for _ in range(_LOOKED_AT):
            self._turn = (self._turn + 1) % len(catalog.committed)
            name = catalog.committed[self._turn]
            if name in self._history.trusted and not self._run.step(name).is_committed():
                # Where one is wrong, more may be: the next look is a close one.
                self._history.believe(None)
                self._history.drop_summaries()

    def _list_old(self, catalog: Catalog, left_out: Collection[StepName]) -> set[StepName]:
        """Returns the steps that a summary may list: they are committed, or listed as committed by the last summary."""
        return set(catalog.committed).difference(catalog.living[-NEWEST:], left_out)

    def _sum_up(self, catalog: Catalog, generation: int, left_out: Collection[StepName]) -> None:
        history = self._history
        old = sorted(self._list_old(catalog, left_out))
        left = frozenset(old[:_BATCH] if self._removes else ())
        facts = {name: known for name in old if name not in left and (known := history.facts(name)) is not None}
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
        self._left_out, self._looks = left, 0

    def _write(self, summary: Summary) -> None:
        """**Blocks.** Publishes a summary, and removes those before the last one.

        A crash before it appears leaves the last one, after it both. The last one stays for readers that have just seen
        its name.
        """
        data = seal(summary)
        path = summary_path(summary.generation, summary.number)
        if len(data) > MAX_SUMMARY_BYTES or not self._run.storage.publish(path, data):
            raise StorageError(f"{self._run.storage.url}: {path} cannot be written", path=path)
        own = (summary.generation, summary.number)
        before = [one for one in self._history.summaries if one < own]
        self._history.summaries = [*before[-1:], own]
        self._history.believe(summary)
        self._run.storage.delete([summary_path(owner, number) for owner, number in before[:-1]])
