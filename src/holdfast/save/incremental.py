"""Saves that write only what has changed since the newest committed step, and refer to the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from holdfast.catalog import StoredRun
from holdfast.errors import DamageError, NotFoundError
from holdfast.format.digests import SPAN_BYTES
from holdfast.format.index import Index, LeafRecord, Place, ReferredRecord, Source, plan_layout
from holdfast.format.names import MANIFEST_NAME, StepName, find_order_problem
from holdfast.format.records import Worker
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.image import Snapshot
from holdfast.save.writer import FilePlan, Segment, plan_segments, take_digests

MAX_KEPT_STEPS: Final = 16
"""How many steps a step may refer to, and how many may be kept because of it."""

MAX_SHARE: Final = 2
"""How many times larger than the reused data everything that is kept for it may be."""

SMALL_BYTES: Final = 1 << 20
"""The bytes that may be kept beyond that: so few do not matter."""


class HeldSegment(msgspec.Struct, frozen=True):
    """An array on the disk: its digests and position, and the file."""

    record: LeafRecord
    source: Source

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self.record.end - self.record.begin


def list_held(index: Index) -> dict[str, HeldSegment]:
    """**Pure.** Returns the arrays of a step by name, each with the file that holds its bytes."""
    own = index.own_source
    held = {leaf.name: HeldSegment(leaf, own) for leaf in index.leaves}
    held |= {leaf.name: HeldSegment(leaf, index.sources[leaf.source]) for leaf in index.referred}
    return held


def find_unchanged(
    places: Sequence[Place], spans: Sequence[str], held: Mapping[str, HeldSegment]
) -> dict[str, HeldSegment]:
    """**Pure.** Returns the unchanged arrays: those of the same name, dtype, shape and digests."""
    unchanged = {}
    for place, digests in zip(places, spans, strict=True):
        known = held.get(place.name)
        if known is None or not digests or known.record.spans != digests:
            continue
        if (known.record.dtype, known.record.shape) == (place.dtype, place.shape):
            unchanged[place.name] = known
    return unchanged


class Offer(msgspec.Struct, frozen=True):
    """A step that could be referred to.

    Attributes:
        name: The step.
        held_bytes: How many bytes of the save are there.
        kept_bytes: What must stay on the disk if it is referred to, by step: its data, and that of the steps it refers
            to.
    """

    name: StepName
    held_bytes: int
    kept_bytes: Mapping[StepName, int]


def choose_sources(offers: Iterable[Offer], wanted: Collection[StepName]) -> frozenset[StepName]:
    """**Pure.** Returns the steps that are worth referring to; arrays in others are written again.

    A step that is referred to stays on the disk, with all that it refers to itself, regardless of the retention policy.
    To bound the total, steps are considered one by one, largest first, and one is chosen only if what it adds to the
    steps that the policy would remove takes at most `MAX_SHARE` times what is reused and `SMALL_BYTES`, and if they are
    at most `MAX_KEPT_STEPS` then. Steps that are `wanted`, because the policy keeps them anyway, cost nothing.
    """
    free = frozenset(wanted)
    chosen: set[StepName] = set()
    kept: set[StepName] = set()
    for offer in sorted(offers, key=lambda offer: (-offer.held_bytes, offer.name)):
        added = offer.kept_bytes.keys() - free - kept
        cost_bytes = sum(offer.kept_bytes[name] for name in added)
        is_cheap = cost_bytes <= MAX_SHARE * offer.held_bytes + SMALL_BYTES
        if is_cheap and len(chosen) < MAX_KEPT_STEPS and len(kept) + len(added) <= MAX_KEPT_STEPS:
            chosen.add(offer.name)
            kept |= added
    return frozenset(chosen)


def make_references(kept: Mapping[str, HeldSegment]) -> tuple[tuple[Source, ...], tuple[ReferredRecord, ...]]:
    """**Pure.** Returns the sources of an index, and its records of the arrays that refer to them, in order."""
    sources = tuple(sorted({held.source for held in kept.values()}))
    numbers = {source: number for number, source in enumerate(sources)}
    referred = (
        ReferredRecord(
            name=name,
            dtype=held.record.dtype,
            shape=held.record.shape,
            begin=held.record.begin,
            end=held.record.end,
            spans=held.record.spans,
            source=numbers[held.source],
        )
        for name, held in kept.items()
    )
    return sources, tuple(sorted(referred, key=lambda leaf: (leaf.source, leaf.begin)))


class Incremental:
    """Plans the files of the steps of one lineage. Not thread-safe: one save uses it at a time.

    A save may refer to the newest committed step of its lineage, and to the steps that that one refers to. Neither
    retention nor a person can remove these as long as no newer step is committed.
    """

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._storage = run.storage
        self._newest: StepName | None = None
        # What is known of that step; it is read when it is first needed, and never holds more than its arrays' records.
        self._index: Index | None = None
        self._written: Index | None = None

    def begin(self, origin: StepName | None) -> None:
        """Called when a generation was opened that continues from that step, or from the beginning."""
        self._newest, self._index, self._written = origin, None, None

    def list_known(self) -> Collection[StepName]:
        """**Blocks.** Returns the steps that a save may refer to, and those that the newest one refers to.

        They are known by their names. If a person has removed one, its name must never be used again: arrays of the
        same place and size would be confused with those that were there.
        """
        return () if self._newest is None else {self._newest, *self._run.history.references(self._newest)}

    def plan(self, snapshot: Snapshot, name: StepName, pool: WorkerPool, wanted: Collection[StepName]) -> FilePlan:
        """**Blocks.** Digests what is copied, and returns what is to be written of it, and what is referred to.

        `wanted` are the steps that the retention policy will keep anyway.
        """
        whole = snapshot.layout
        digests, nonfinite = take_digests(snapshot, pool)
        spans = dict(zip((place.name for place in whole.places), digests, strict=True))
        unchanged = find_unchanged(whole.places, list(spans.values()), self._find_held(name, snapshot.state.worker))
        chosen = choose_sources(self._make_offers(unchanged), wanted)
        kept = {leaf: held for leaf, held in unchanged.items() if held.source.name in chosen}
        if not kept:
            return FilePlan(whole, [Segment(0, len(snapshot.image), 0)], digests, nonfinite=nonfinite)
        changed = [place for place in whole.places if place.name not in kept]
        arrays = [(place.name, place.dtype, place.shape) for place in changed]
        layout = plan_layout(arrays, {"format": "holdfast", "step": str(name.step)})
        segments = plan_segments(layout, {place.name: place.begin for place in changed})
        own_spans = [spans[place.name] for place in layout.places]
        return FilePlan(layout, segments, own_spans, *make_references(kept), nonfinite)

    def note_written(self, index: Index) -> None:
        """Called when a step is written."""
        self._written = msgspec.structs.replace(index, objects={})

    def mark_committed(self) -> None:
        """Called when the last written step is committed."""
        written, self._written = self._written, None
        # A step that replaces an older one of the line is not its newest, and may be removed before that.
        if written is not None and (self._newest is None or written.name > self._newest):
            self._newest, self._index = written.name, written

    def _find_held(self, name: StepName, worker: Worker) -> Mapping[str, HeldSegment]:
        if self._newest is None or find_order_problem(self._newest, name):
            return {}
        if self._index is None:
            try:
                newest = self._run.step(self._newest)
                manifest = newest.manifest()
                if manifest.world_size != worker.world_size:
                    return {}
                index = newest.index(manifest, worker.rank)
            except (DamageError, NotFoundError):
                return {}
            self._index = msgspec.structs.replace(index, objects={})
        return list_held(self._index) if self._index.span_bytes == SPAN_BYTES else {}

    def _make_offers(self, unchanged: Mapping[str, HeldSegment]) -> list[Offer]:
        held_bytes: dict[Source, int] = {}
        for held in unchanged.values():
            held_bytes[held.source] = held_bytes.get(held.source, 0) + held.size_bytes
        return [
            Offer(source.name, size_bytes, {source.name: source.data_bytes, **self._list_kept(source.name)})
            for source, size_bytes in held_bytes.items()
            if self._has_file(source)
        ]

    def _list_kept(self, name: StepName) -> dict[StepName, int]:
        kept = {other: self._run.history.facts(other) for other in self._run.history.kept_with(name)}
        return {other: facts.size_bytes if facts else 0 for other, facts in kept.items()}

    def _has_file(self, source: Source) -> bool:
        """**Blocks.** Returns True if a file still exists: people remove directories by hand."""
        entries = {entry.name: entry.size_bytes for entry in self._storage.list(source.name.directory)}
        return MANIFEST_NAME in entries and entries.get(source.file_name) == source.data_bytes
