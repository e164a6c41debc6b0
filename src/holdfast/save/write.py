"""A snapshot to receipts: writes one worker's data file and index, with digests taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from holdfast.format.digests import SPAN_BYTES, digest, span_count
from holdfast.format.index import Index, LeafRecord, encode_index
from holdfast.format.manifest import WorkerRecord
from holdfast.format.names import StepName, data_name, index_name
from holdfast.save.handoffs import Receipts, Snapshot
from holdfast.storage.crew import Crew
from holdfast.storage.protocol import FileWriter, Storage

PIECE_BYTES: Final = 8 << 20
"""One write. Larger ones gain nothing on the disks that were measured, smaller ones lose."""


def write(snapshot: Snapshot, storage: Storage, name: StepName, crew: Crew) -> Receipts:
    """**Blocks.** Writes the snapshot of a job of one worker into a new directory and makes it last.

    A crash anywhere in here leaves a directory without a manifest, which no reader takes for a checkpoint and the next
    save of the run sweeps away.

    Raises:
        StorageError: If the place fails; what was written stays as debris.
    """
    storage.make_directory(name.directory)
    data_path = f"{name.directory}/{data_name(0, 1)}"
    digests = _write_data(snapshot, storage.open_writer(data_path, snapshot.layout.size_bytes), crew)
    index = encode_index(_make_index(snapshot, name, digests))
    storage.write(f"{name.directory}/{index_name(0, 1)}", index)
    # Without this the files may be nameless after a power cut although their bytes are there.
    storage.sync_directory(name.directory)
    return Receipts((WorkerRecord(len(index), digest(index), snapshot.layout.size_bytes),))


def _write_data(snapshot: Snapshot, writer: FileWriter, crew: Crew) -> list[list[str]]:
    """Writes the data file; gives for each array, in the order of the file, the digests of its spans."""
    places = snapshot.layout.places
    digests = [[""] * span_count(place.end - place.begin, SPAN_BYTES) for place in places]
    try:
        crew.run(_pieces(snapshot, writer, digests))
        writer.finish()
    finally:
        writer.abandon()
    return digests


def _pieces(snapshot: Snapshot, writer: FileWriter, digests: list[list[str]]) -> Iterator[Callable[[], None]]:
    """One job for each piece of the file: it takes the digests of the spans that begin there, and writes it.

    Both take the piece while it is in the processor's cache, and both let the other threads run.
    """
    spans = _spans(snapshot)
    ahead = next(spans, None)
    image = snapshot.image
    for begin in range(0, len(image), PIECE_BYTES):
        end = min(begin + PIECE_BYTES, len(image))
        own: list[tuple[int, int, int, int]] = []
        while ahead is not None and ahead[2] < end:
            own.append(ahead)
            ahead = next(spans, None)
        yield partial(_write_piece, image, writer, begin, end, own, digests)


def _spans(snapshot: Snapshot) -> Iterator[tuple[int, int, int, int]]:
    """Each span as the array's number, its own number in the array, where it begins and where it ends."""
    for number, place in enumerate(snapshot.layout.places):
        for span, begin in enumerate(range(place.begin, place.end, SPAN_BYTES)):
            yield number, span, begin, min(begin + SPAN_BYTES, place.end)


def _write_piece(
    image: memoryview,
    writer: FileWriter,
    begin: int,
    end: int,
    spans: list[tuple[int, int, int, int]],
    digests: list[list[str]],
) -> None:
    for number, span, span_begin, span_end in spans:
        digests[number][span] = digest(image[span_begin:span_end])
    writer.write_at(begin, image[begin:end])


def _make_index(snapshot: Snapshot, name: StepName, digests: list[list[str]]) -> Index:
    layout = snapshot.layout
    return Index(
        step=name.step,
        generation=name.generation,
        attempt=name.attempt,
        rank=0,
        world_size=1,
        data_bytes=layout.size_bytes,
        header_bytes=len(layout.header),
        header_digest=digest(layout.header),
        span_bytes=SPAN_BYTES,
        leaves=tuple(
            LeafRecord(place.name, place.dtype, place.shape, place.begin, place.end, "".join(spans))
            for place, spans in zip(layout.places, digests, strict=True)
        ),
        objects=snapshot.objects,
    )
