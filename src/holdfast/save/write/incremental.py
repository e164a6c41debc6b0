"""Saves that write only what has changed since the newest committed step, and refer to the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from holdfast.catalog import read_index
from holdfast.errors import DamageError, NotFoundError
from holdfast.format.digests import SPAN_BYTES
from holdfast.format.index import Index, Source
from holdfast.format.layout import Layout, plan_layout
from holdfast.format.names import MANIFEST_NAME, StepName, data_name, find_order_problem
from holdfast.format.workers import Worker
from holdfast.save.records import Receipts, Snapshot
from holdfast.save.write.gather import Move, plan_moves, write_gathered
from holdfast.save.write.manifest_cache import Ledger
from holdfast.save.write.references import Held, Offer, choose_sources, find_unchanged, list_held, make_references
from holdfast.save.write.writer import conclude, make_index, take_digests
from holdfast.storage.protocol import Storage
from holdfast.storage.worker_pool import WorkerPool


class Incremental:
    """Writes the steps of one line. Not thread-safe: one save uses it at a time.

    What a save may refer to are the newest committed step of its line, and what that one refers to. These are what
    neither retention nor a person can remove as long as no newer step is committed.
    """

    def __init__(self, storage: Storage, ledger: Ledger) -> None:
        self._storage = storage
        self._ledger = ledger
        self._newest: StepName | None = None
        # What is known of that step; it is read when it is first needed, and never holds more than its arrays' records.
        self._index: Index | None = None
        self._written: Index | None = None

    def begin(self, origin: StepName | None) -> None:
        """A generation was opened that goes on from that step, or anew."""
        self._newest, self._index, self._written = origin, None, None

    def list_known(self) -> Collection[StepName]:
        """**Blocks.** The steps that a save may refer to, and those that the newest one refers to.

        What lies there is known by their names. If a person has removed one, its name must not come to stand for
        anything else: arrays of the same place and size would be taken for those that lay there.
        """
        return () if self._newest is None else {self._newest, *self._ledger.references(self._newest)}

    def write(self, snapshot: Snapshot, name: StepName, pool: WorkerPool, wanted: Collection[StepName]) -> Receipts:
        """**Blocks.** Writes what has changed into a new directory and makes it last.

        A crash anywhere in here leaves a directory without a manifest, as with any save.

        Args:
            snapshot: All of the state, copied.
            name: The place of the new step.
            pool: The threads that work.
            wanted: The steps that the retention policy will keep anyway.

        Raises:
            StorageError: If the place fails; what was written stays as debris.
        """
        places = snapshot.layout.places
        spans = dict(zip((place.name for place in places), take_digests(snapshot, pool), strict=True))
        unchanged = find_unchanged(places, list(spans.values()), self._find_held(name, snapshot.worker))
        chosen = choose_sources(self._make_offers(unchanged), wanted)
        kept = {leaf: held for leaf, held in unchanged.items() if held.source.name in chosen}
        layout, moves = _plan_file(snapshot, name, kept)
        self._storage.make_directory(name.directory)
        worker = snapshot.worker
        path = f"{name.directory}/{data_name(worker.rank, worker.world_size)}"
        writer = self._storage.open_writer(path, layout.size_bytes)
        try:
            write_gathered(snapshot.image, layout, moves, writer, pool)
            writer.finish()
        finally:
            writer.abandon()
        index = make_index(snapshot, layout, name, (spans[place.name] for place in layout.places))
        sources, referred = make_references(kept)
        index = msgspec.structs.replace(index, sources=sources, referred=referred)
        receipts = conclude(index, self._storage, snapshot.loose)
        self._written = msgspec.structs.replace(index, objects={})
        return receipts

    def mark_committed(self) -> None:
        """What was written last is committed."""
        written = self._written
        # A step that replaces an older one of the line is not its newest, and may be removed before that.
        if written is not None and (self._newest is None or written.name > self._newest):
            self._newest, self._index = written.name, written
        self._written = None

    def _find_held(self, name: StepName, worker: Worker) -> Mapping[str, Held]:
        """The arrays that a step could refer to."""
        if self._newest is None or find_order_problem(self._newest, name):
            return {}
        if self._index is None:
            manifest = self._ledger.manifest(self._newest)
            if manifest is None or manifest.world_size != worker.world_size:
                return {}
            try:
                index = read_index(self._storage, self._newest.directory, manifest, worker.rank)
            except (DamageError, NotFoundError):
                return {}
            self._index = msgspec.structs.replace(index, objects={})
        return list_held(self._index) if self._index.span_bytes == SPAN_BYTES else {}

    def _make_offers(self, unchanged: Mapping[str, Held]) -> list[Offer]:
        held_bytes: dict[Source, int] = {}
        for held in unchanged.values():
            held_bytes[held.source] = held_bytes.get(held.source, 0) + held.size_bytes
        return [
            Offer(source.name, size_bytes, {source.name: source.data_bytes, **self._list_kept(source.name)})
            for source, size_bytes in held_bytes.items()
            if self._is_there(source)
        ]

    def _list_kept(self, name: StepName) -> dict[StepName, int]:
        kept = {other: self._ledger.manifest(other) for other in self._ledger.kept_with(name)}
        return {other: manifest.data_bytes if manifest else 0 for other, manifest in kept.items()}

    def _is_there(self, source: Source) -> bool:
        """**Blocks.** Whether a file still lies where it should: people remove directories by hand."""
        entries = {entry.name: entry.size_bytes for entry in self._storage.list(source.name.directory)}
        return MANIFEST_NAME in entries and entries.get(source.file_name) == source.data_bytes


class IncrementalWriting:
    """One step in the making of which only what has changed is written; that is not known before all is copied."""

    def __init__(
        self, incremental: Incremental, snapshot: Snapshot, name: StepName, wanted: Collection[StepName]
    ) -> None:
        self._incremental, self._snapshot, self._name, self._wanted = incremental, snapshot, name, wanted

    def write_behind_copy(self, pool: WorkerPool) -> None:
        """Nothing is written before all is copied."""

    def finish(self, pool: WorkerPool) -> Receipts:
        """**Blocks.** As `Incremental.write`."""
        return self._incremental.write(self._snapshot, self._name, pool, self._wanted)

    def abandon(self) -> None:
        """Nothing is open."""


def _plan_file(snapshot: Snapshot, name: StepName, kept: Mapping[str, Held]) -> tuple[Layout, list[Move]]:
    """The data file without what is kept, and where its bytes are in the image."""
    whole = snapshot.layout
    if not kept:
        return whole, [Move(0, whole.size_bytes, 0)]
    changed = [place for place in whole.places if place.name not in kept]
    layout = plan_layout(
        [(place.name, place.dtype, place.shape) for place in changed], {"format": "holdfast", "step": str(name.step)}
    )
    return layout, plan_moves(layout, {place.name: place.begin for place in changed})
