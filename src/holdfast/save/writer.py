"""Writes a snapshot as one worker's data file and index, and computes digests on the way.

If only changes are written, adjacent arrays form *segments*, which are gathered in aligned memory first.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, TypeAlias

import msgspec

from holdfast.catalog.publish import Receipts
from holdfast.format.digests import SPAN_BYTES, digest, seal, span_count
from holdfast.format.index import ALIGNMENT_BYTES, Index, Layout, LeafRecord, round_up
from holdfast.format.names import StepName, data_name, index_name
from holdfast.format.records import Reference, WorkerRecord, list_features
from holdfast.process.worker_pool import WorkerPool
from holdfast.save.records import Snapshot
from holdfast.storage.checks import choose_piece_bytes
from holdfast.storage.digesting import digest_parts
from holdfast.storage.protocol import PIECE_BYTES, FileWriter, Storage, Traits

_MOST_PIECES: Final = 4
"""So many pieces are written in one go when training no longer waits: to ask for each takes the interpreter's lock."""

_SHARES: Final = 16
"""A thread takes at most such a part of the rest, so that all threads end at about the same time."""

_Write: TypeAlias = Callable[[int, memoryview, list[memoryview]], list[str]]
"""Writes a piece of the image at an offset; returns the digests of some parts of memory."""


class WholeStepFiles:
    """One worker's data file in progress, with all arrays of a snapshot. Not thread-safe.

    A crash anywhere in here leaves a directory without a manifest, which is not a checkpoint, and which the next save
    removes.
    """

    def __init__(self, snapshot: Snapshot, storage: Storage, name: StepName) -> None:
        """**Blocks.** Creates the file, and the step's directory."""
        self._snapshot, self._storage, self._name = snapshot, storage, name
        worker = snapshot.state.worker
        data_path = f"{name.directory}/{data_name(worker.rank, worker.world_size)}"
        size_bytes = snapshot.layout.size_bytes
        self._writer = storage.create(data_path, size_bytes)
        self._digests: list[str] = []
        piece_bytes = choose_piece_bytes(storage.traits, size_bytes)
        self._pieces = _pieces(snapshot, self._writer.write_at, self._digests, piece_bytes)

    def write_behind_copy(self, pool: WorkerPool) -> None:
        """See `StepFiles`."""
        # While training waits for the copy, more than this one thread would take the processors away from that.
        pool.run(self._snapshot.copied.while_copied(self._pieces), most_helpers=0)

    def finish(self, pool: WorkerPool) -> Receipts:
        """See `StepFiles`."""
        pool.run(self._pieces)
        self._writer.finish()
        spans = _join_digests(self._snapshot, self._digests)
        index = make_index(self._snapshot, self._snapshot.layout, self._name, spans)
        return write_index(index, self._storage, self._name.directory, self._snapshot.state.loose)

    def abandon(self) -> None:
        """See `StepFiles`."""
        self._writer.abandon()


def write_index(index: Index, storage: Storage, directory: str, loose: Collection[str] = ()) -> Receipts:
    """**Blocks.** Writes the index of a complete data file, and makes both durable."""
    data = seal(index)
    storage.write(f"{directory}/{index_name(index.rank, index.world_size)}", data)
    # Without this the files may be nameless after a power cut although their bytes are there.
    storage.sync_directory(directory)
    references = tuple(
        Reference(name.step, name.generation, name.attempt, leaves, size_bytes)
        for name, (leaves, size_bytes) in sorted(index.refers_to().items())
    )
    values = digest_loose(index, loose) if loose else ""
    return Receipts(
        (WorkerRecord(len(data), digest(data), index.data_bytes),), references, list_features(index), values
    )


def digest_loose(index: Index, loose: Collection[str]) -> str:
    """**Pure.** Returns a digest of the boxes of loose leaves."""
    values = [
        (stored.leaf, stored.box.offsets, stored.record.spans)
        for stored in index.stored_boxes()
        if stored.leaf in loose and stored.box.elements
    ]
    return digest(msgspec.msgpack.encode(sorted(values)))


def take_digests(snapshot: Snapshot, pool: WorkerPool) -> list[str]:
    """**Blocks.** Returns for each array, in the order of the image, the digests of its spans."""
    digests: list[str] = []
    pool.run(_pieces(snapshot, lambda _offset, _data, parts: digest_parts(parts), digests, PIECE_BYTES))
    return list(_join_digests(snapshot, digests))


def _join_digests(snapshot: Snapshot, digests: Iterable[str]) -> Iterator[str]:
    """Yields for each array, in the order of the image, the digests of its spans."""
    ahead = iter(digests)
    for place in snapshot.layout.places:
        yield "".join(islice(ahead, span_count(place.end - place.begin, SPAN_BYTES)))


def _pieces(snapshot: Snapshot, write: _Write, digests: list[str], piece_bytes: int) -> Iterator[Callable[[], None]]:
    """Yields jobs that each write a part of the file, and digest the spans that begin there.

    Both use what they write while it is in the processor's cache, and both let the other threads run. `digests` gets
    those of all spans, in the order of the file.
    """
    places = snapshot.layout.places
    begins = [begin for place in places for begin in range(place.begin, place.end, SPAN_BYTES)]
    ends = [min(first + SPAN_BYTES, one.end) for one in places for first in range(one.begin, one.end, SPAN_BYTES)]
    digests[:] = [""] * len(begins)
    image_bytes = len(snapshot.image)
    begin = first = 0
    while begin < image_bytes:
        pieces = 1
        if snapshot.copied.copy_ended.is_open:
            pieces = min(max((image_bytes - begin) // (_SHARES * piece_bytes), 1), _MOST_PIECES)
        end = min(begin + pieces * piece_bytes, image_bytes)
        last = bisect_left(begins, end)
        spans = list(zip(begins[first:last], ends[first:last], strict=True))
        yield partial(_digest_and_write, snapshot, write, (begin, end), spans, range(first, last), digests)
        begin, first = end, last


def _digest_and_write(
    snapshot: Snapshot,
    write: _Write,
    piece: tuple[int, int],
    spans: list[tuple[int, int]],
    numbers: range,
    digests: list[str],
) -> None:
    begin, end = piece
    # The last of the spans that begin here may end beyond.
    snapshot.copied.wait(max([end, *(span[1] for span in spans[-1:])]))
    found = write(begin, snapshot.image[begin:end], [snapshot.image[first:last] for first, last in spans])
    for number, text in zip(numbers, found, strict=True):
        digests[number] = text


def make_index(snapshot: Snapshot, layout: Layout, name: StepName, spans: Iterable[str]) -> Index:
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
    )


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


def write_segments(
    image: memoryview,
    layout: Layout,
    segments: list[Segment],
    writer: FileWriter,
    traits: Traits,
    pool: WorkerPool,
) -> None:
    """**Blocks.** Writes the file that a layout describes, except for its last sync.

    A piece that is page-aligned in both the image and the file is written from there; others are gathered first.
    """
    lies_alike = len(segments) == 1 and (segments[0].image_begin - segments[0].begin) % ALIGNMENT_BYTES == 0
    # The header is gathered in any case, by one thread.
    piece_bytes = choose_piece_bytes(traits, layout.size_bytes, 0 if lies_alike else _GATHERED_BYTES)
    pool.run(_gathered_pieces(_SegmentWriting(image, layout, writer, piece_bytes), segments, piece_bytes))


def _gathered_pieces(
    gathering: _SegmentWriting, segments: list[Segment], piece_bytes: int
) -> Iterator[Callable[[], None]]:
    size_bytes = gathering.layout.size_bytes
    ahead = 0
    for begin in range(0, size_bytes, piece_bytes):
        end = min(begin + piece_bytes, size_bytes)
        while ahead < len(segments) and segments[ahead].end <= begin:
            ahead += 1
        last = ahead
        while last < len(segments) and segments[last].begin < end:
            last += 1
        yield partial(gathering.write_piece, begin, end, segments[ahead:last])


class _SegmentWriting:
    """**Thread-safe.** One file in progress."""

    def __init__(self, image: memoryview, layout: Layout, writer: FileWriter, piece_bytes: int) -> None:
        self.layout = layout
        self._image = image
        self._image_address = _address_of(image)
        self._writer = writer
        self._scratch_bytes = min(piece_bytes, round_up(layout.size_bytes))
        self._scratches: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    def write_piece(self, begin: int, end: int, segments: list[Segment]) -> None:
        first = segments[0] if segments else None
        if first is not None and first.begin <= begin and end <= first.end:
            image_begin = first.image_begin + begin - first.begin
            if image_begin % ALIGNMENT_BYTES == 0:
                self._writer.write_at(begin, self._image[image_begin : image_begin + end - begin])
                return
        scratch = self._take_scratch()
        try:
            self._gather(scratch, begin, end, segments)
            padded_bytes = -(-(end - begin) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._writer.write_at(begin, memoryview(scratch)[:padded_bytes])
        finally:
            self._scratches.put(scratch)

    def _gather(self, scratch: mmap.mmap, begin: int, end: int, segments: list[Segment]) -> None:
        header = self.layout.header[begin:end]
        scratch[: len(header)] = header
        address = _address_of(scratch) - begin
        for segment in segments:
            first, last = max(segment.begin, begin), min(segment.end, end)
            # Unlike an assignment of views, this lets the other threads work.
            ctypes.memmove(
                address + first, self._image_address + segment.image_begin + first - segment.begin, last - first
            )
        # What was in it before must not be read.
        padding_bytes = -(end - begin) % ALIGNMENT_BYTES
        scratch[end - begin : end - begin + padding_bytes] = bytes(padding_bytes)

    def _take_scratch(self) -> mmap.mmap:
        try:
            return self._scratches.get_nowait()
        except queue.Empty:
            return mmap.mmap(-1, self._scratch_bytes)


def _address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
