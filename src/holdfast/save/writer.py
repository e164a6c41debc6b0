"""Writes one worker's data file and index from the image of a snapshot, and computes digests on the way.

The file consists of *segments* of the image. Mostly that is one, the whole image; if only changes are written, each run
of adjacent arrays is one, and what is not on whole pages in both is gathered in aligned memory first.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final

import msgspec

from holdfast.catalog.publish import Receipts
from holdfast.format.digests import SPAN_BYTES, digest, seal, span_count
from holdfast.format.index import (
    ALIGNMENT_BYTES,
    Index,
    Layout,
    LeafRecord,
    ReferredRecord,
    Source,
    round_up,
)
from holdfast.format.names import StepName, data_name, index_name
from holdfast.format.records import Reference, WorkerRecord, list_features
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.image import Snapshot
from holdfast.storage.buffers import batches
from holdfast.storage.checks import choose_piece_bytes
from holdfast.storage.digesting import LOOKED_THROUGH, NONFINITE, MarkedParts, digest_parts
from holdfast.storage.protocol import PIECE_BYTES, Storage

_MOST_PIECES: Final = 4
"""So many pieces are written in one go when training no longer waits: to ask for each takes the interpreter's lock."""

_SHARES: Final = 16
"""A thread takes at most such a part of the rest, so that all threads end at about the same time."""

_GATHERED_BYTES: Final = 1 << 20
"""The size of one write if data must be gathered: each thread has its own memory for that, fresh with each save."""


class Segment(msgspec.Struct, frozen=True):
    """Adjacent bytes of the image that are adjacent in the file as well.

    Attributes:
        begin: Where they begin in the file.
        end: Where they end in the file, exclusive.
        image_begin: Where they begin in the image.
    """

    begin: int
    end: int
    image_begin: int


def plan_segments(layout: Layout, image_begins: Mapping[str, int]) -> list[Segment]:
    """**Pure.** Returns the segments from which the arrays of a file come, in its order, as few as possible."""
    segments: list[Segment] = []
    for place in layout.places:
        image_begin = image_begins[place.name]
        if place.begin == place.end:
            continue
        last = segments[-1] if segments else None
        if last is not None and image_begin - last.image_begin == place.begin - last.begin:
            segments[-1] = Segment(last.begin, place.end, last.image_begin)
        else:
            segments.append(Segment(place.begin, place.end, image_begin))
    return segments


class FilePlan(msgspec.Struct, frozen=True):
    """The content of one worker's data file.

    Attributes:
        layout: The position of each array in the file.
        segments: Where its bytes are in the image, in the order of the file.
        spans: For each array, the digests of its spans; None to take them while they are written.
        sources: The files of earlier steps that have the other arrays.
        referred: The records of these arrays.
        nonfinite: The leaves that are not finite, as far as they were found before; see `Receipts`.
        index: The index of the file, if it was made before.
    """

    layout: Layout
    segments: Sequence[Segment]
    spans: Sequence[str] | None = None
    sources: tuple[Source, ...] = ()
    referred: tuple[ReferredRecord, ...] = ()
    nonfinite: Mapping[str, bool] = msgspec.field(default_factory=dict)
    index: Index | None = None


class StepFiles:
    """One worker's data file of one step in progress, and its index. Not thread-safe.

    A crash anywhere in here leaves a directory without a manifest, which is not a checkpoint, and which the next save
    removes.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        storage: Storage,
        name: StepName,
        plan: FilePlan | None = None,
        note_index: Callable[[Index], object] | None = None,
    ) -> None:
        """**Blocks.** Creates the file, and the step's directory.

        Args:
            snapshot: The snapshot.
            storage: The storage of the run.
            name: The step.
            plan: The content of the file; None for the whole image.
            note_index: Called with the index when it is written.
        """
        self._snapshot, self._storage, self._name = snapshot, storage, name
        self._plan = plan or FilePlan(snapshot.layout, [Segment(0, len(snapshot.image), 0)])
        self._note_index = note_index
        worker = snapshot.state.worker
        path = f"{name.directory}/{data_name(worker.rank, worker.world_size)}"
        self._writer = storage.create(path, self._plan.layout.size_bytes)
        self._digests: list[str] = []
        self._marks = bytearray()
        self._scratches: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
        self._scratch_bytes = 0
        self._pieces = self._list_pieces()

    def write_behind_copy(self, pool: WorkerPool) -> None:
        """**Blocks.** Writes what has been copied, until all is."""
        # While training waits for the copy, more than this one thread would take the processors away from that.
        pool.run(self._snapshot.copied.while_copied(self._pieces), most_helpers=0)

    def finish(self, pool: WorkerPool) -> Receipts:
        """**Blocks.** Writes the rest, and makes all of it durable."""
        plan = self._plan
        pool.run(self._pieces)
        index = plan.index
        if index is None:
            spans = _join_digests(plan.layout, self._digests) if plan.spans is None else plan.spans
            index = make_index(self._snapshot, plan.layout, self._name, spans, plan.sources, plan.referred)
        # Before the data are durable: an upload goes on meanwhile. Neither counts without the manifest.
        receipts = write_index(index, self._storage, self._name.directory, self._snapshot.state.loose)
        nonfinite = plan.nonfinite
        if NONFINITE in self._marks:
            nonfinite = self._snapshot.floats.find_nonfinite(self._marks, self._snapshot.image)
        receipts = msgspec.structs.replace(receipts, nonfinite=nonfinite)
        self._writer.finish()
        if self._note_index is not None:
            self._note_index(index)
        return receipts

    def abandon(self) -> None:
        """Closes what is open; may be repeated, and follow `finish`."""
        self._pieces = iter(())  # It has the image.
        self._writer.abandon()

    def _list_pieces(self) -> Iterator[Callable[[], None]]:
        """Yields jobs that each write a part of the file, and digest the spans that begin there.

        Both use what they write while it is in the processor's cache, and both let the other threads run.
        """
        layout, segments, copied = self._plan.layout, self._plan.segments, self._snapshot.copied
        is_aligned = len(segments) == 1 and (segments[0].image_begin - segments[0].begin) % ALIGNMENT_BYTES == 0
        # The header is gathered by one thread, unless the whole image is written.
        piece_bytes = choose_piece_bytes(self._storage.traits, layout.size_bytes, 0 if is_aligned else _GATHERED_BYTES)
        spans = _list_spans(layout) if self._plan.spans is None else []
        begins = [span[0] for span in spans]
        self._digests = [""] * len(spans)
        self._marks = bytearray(self._snapshot.floats.marks if spans else b"")
        padded_bytes = round_up(layout.size_bytes)
        self._scratch_bytes = min(piece_bytes, padded_bytes)
        begin = first = ahead = 0
        while begin < padded_bytes:
            pieces = 1
            if self._plan.spans is None and copied.copy_ended.is_open:
                pieces = min(max((padded_bytes - begin) // (_SHARES * piece_bytes), 1), _MOST_PIECES)
            end = min(begin + pieces * piece_bytes, padded_bytes)
            last = bisect_left(begins, end)
            while ahead < len(segments) and segments[ahead].end <= begin:
                ahead += 1
            behind = bisect_left(segments, end, ahead, key=attrgetter("begin"))
            yield partial(self._write_piece, begin, end, segments[ahead:behind], first, spans[first:last])
            begin, first = end, last

    def _write_piece(
        self, begin: int, end: int, segments: Sequence[Segment], first: int, spans: list[tuple[int, int]]
    ) -> None:
        """**Thread-safe.** Writes a piece, from the image if it is page-aligned there as well."""
        image = self._snapshot.image
        # The last of the spans that begin here may end beyond.
        self._snapshot.copied.wait(max([end, *(span[1] for span in spans[-1:])]))
        parts = MarkedParts([image[span_begin:span_end] for span_begin, span_end in spans])
        parts.marks = self._marks[first : first + len(spans)]
        image_begin = -1
        if segments and segments[0].begin <= begin and end <= segments[0].end:
            image_begin = segments[0].image_begin + begin - segments[0].begin
        if image_begin >= 0 and image_begin % ALIGNMENT_BYTES == 0:
            digests = self._writer.write_at(begin, image[image_begin : image_begin + end - begin], parts)
        else:
            try:
                scratch = self._scratches.get_nowait()
            except queue.Empty:
                scratch = mmap.mmap(-1, self._scratch_bytes)
            try:
                self._gather(scratch, begin, end, segments)
                digests = self._writer.write_at(begin, memoryview(scratch)[: end - begin], parts)
            finally:
                self._scratches.put(scratch)
        self._digests[first : first + len(digests)] = digests
        if parts.marks.strip(LOOKED_THROUGH):
            parts.look_through()
        self._marks[first : first + len(spans)] = parts.marks

    def _gather(self, scratch: mmap.mmap, begin: int, end: int, segments: Sequence[Segment]) -> None:
        layout = self._plan.layout
        header = layout.header[begin:end]
        scratch[: len(header)] = header
        address, image_address = _address_of(scratch) - begin, _address_of(self._snapshot.image)
        for segment in segments:
            first, last = max(segment.begin, begin), min(segment.end, end)
            # Unlike an assignment of views, this lets the other threads work.
            ctypes.memmove(address + first, image_address + segment.image_begin + first - segment.begin, last - first)
        # What was in it before must not be read.
        if end > layout.size_bytes:
            scratch[layout.size_bytes - begin : end - begin] = bytes(end - layout.size_bytes)


def _address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def write_index(index: Index, storage: Storage, directory: str, loose: Collection[str] = ()) -> Receipts:
    """**Blocks.** Writes the index of a complete data file, and makes both durable.

    The receipt has a digest of the boxes of the leaves that are `loose`.
    """
    data = seal(index)
    storage.write(f"{directory}/{index_name(index.rank, index.world_size)}", data)
    # Without this the files may be nameless after a power cut although their bytes are there.
    storage.sync_directory(directory)
    return make_receipts(index, data, loose)


def make_receipts(
    index: Index, data: bytes, loose: Collection[str] = (), nonfinite: Mapping[str, bool] | None = None
) -> Receipts:
    """**Pure.** Returns the receipts of a data file and its index, whose bytes are `data`; see `write_index`."""
    references = tuple(
        Reference(name.step, name.generation, name.attempt, leaves, size_bytes)
        for name, (leaves, size_bytes) in sorted(index.refers_to().items())
    )
    values = ""
    if loose:
        boxes = [
            (stored.leaf, stored.box.offsets, stored.record.spans)
            for stored in index.stored_boxes()
            if stored.leaf in loose and stored.box.elements
        ]
        values = digest(msgspec.msgpack.encode(sorted(boxes)))
    return Receipts(
        (WorkerRecord(len(data), digest(data), index.data_bytes),), references, list_features(index), values, nonfinite
    )


def take_digests(snapshot: Snapshot, pool: WorkerPool) -> tuple[list[str], dict[str, bool]]:
    """**Blocks.** Returns for each array, in the order of the image, the digests of its spans; all must be copied.

    And the leaves that are not finite, as `Receipts` has them.
    """
    spans, marks = _list_spans(snapshot.layout), bytearray(snapshot.floats.marks)
    digests = [""] * len(spans)

    def take(numbers: list[int]) -> None:
        some = slice(numbers[0], numbers[-1] + 1)
        parts = MarkedParts([snapshot.image[begin:end] for begin, end in spans[some]])
        parts.marks = marks[some]
        digests[some] = digest_parts(parts)
        if parts.marks.strip(LOOKED_THROUGH):
            parts.look_through()
        marks[some] = parts.marks

    each = batches(range(len(spans)), lambda number: spans[number][1] - spans[number][0], PIECE_BYTES)
    pool.run(partial(take, numbers) for numbers in each)
    return list(_join_digests(snapshot.layout, digests)), snapshot.floats.find_nonfinite(marks, snapshot.image)


def digest_plan(snapshot: Snapshot, pool: WorkerPool) -> FilePlan:
    """**Blocks.** Digests a snapshot, and returns the plan to write all of it."""
    digests, nonfinite = take_digests(snapshot, pool)
    return FilePlan(snapshot.layout, [Segment(0, len(snapshot.image), 0)], digests, nonfinite=nonfinite)


def _list_spans(layout: Layout) -> list[tuple[int, int]]:
    """Returns where each span of each array begins and ends, in the order of the file."""
    return [
        (begin, min(begin + SPAN_BYTES, place.end))
        for place in layout.places
        for begin in range(place.begin, place.end, SPAN_BYTES)
    ]


def _join_digests(layout: Layout, digests: Iterable[str]) -> Iterator[str]:
    """Yields for each array, in the order of the file, the digests of its spans."""
    ahead = iter(digests)
    for place in layout.places:
        yield "".join(islice(ahead, span_count(place.end - place.begin, SPAN_BYTES)))


def make_index(
    snapshot: Snapshot,
    layout: Layout,
    name: StepName,
    spans: Iterable[str],
    sources: tuple[Source, ...] = (),
    referred: tuple[ReferredRecord, ...] = (),
) -> Index:
    """**Pure.** Returns the index of a data file, with the digests of each array's spans in the order of the file."""
    return Index(
        step=name.step,
        generation=name.generation,
        attempt=name.attempt,
        rank=snapshot.state.worker.rank,
        world_size=snapshot.state.worker.world_size,
        data_bytes=layout.size_bytes,
        header_bytes=len(layout.header),
        header_digest=digest(layout.header),
        span_bytes=SPAN_BYTES,
        leaves=tuple(
            LeafRecord(place.name, place.dtype, place.shape, place.begin, place.end, digests)
            for place, digests in zip(layout.places, spans, strict=True)
        ),
        objects=snapshot.state.objects,
        boxes=snapshot.state.boxes,
        elsewhere=snapshot.state.elsewhere,
        strides=snapshot.state.strides,
        quantizers=snapshot.state.quantizers,
        sources=sources,
        referred=referred,
    )
