"""What another number of workers is told of the checkpoint that it has restored."""

from __future__ import annotations

from holdfast.catalog import read_index
from holdfast.errors import DamageError, StorageError
from holdfast.events import Sink, Warned
from holdfast.format.workers import Worker
from holdfast.restore.records import OpenedStep
from holdfast.state.apart import PositionRecord, find_apart, list_positions
from holdfast.storage.protocol import Storage


def warn_if_apart(storage: Storage, opened: OpenedStep, worker: Worker, emit: Sink) -> None:
    """**Blocks.** Warns if those that saved were at different places of the data that they divided.

    Each worker looks at some of them, beside the first: all workers together at all. Where no position is stored,
    nothing is read.

    Args:
        storage: Where the run lies.
        opened: The checkpoint's records.
        worker: Which worker this is.
        emit: Told of it.
    """
    manifest = opened.manifest
    known = {index.rank: list_positions(index.objects) for index in opened.indexes}
    if not any(known.values()):
        return
    positions: list[list[PositionRecord]] = [[] for _ in range(manifest.world_size)]
    try:
        for rank in {0, *range(worker.rank, manifest.world_size, worker.world_size)}:
            stored = known.get(rank)
            if stored is None:
                stored = list_positions(read_index(storage, opened.directory, manifest, rank).objects)
            positions[rank] = stored
    except (DamageError, StorageError) as error:
        # Nothing else of it was needed here, and what was is restored.
        text = f"whether all workers had saved at the same place of the data cannot be seen: {error.message}"
        emit(Warned(step=manifest.step, text=text))
        return
    text = find_apart(positions)
    if text:
        emit(Warned(step=manifest.step, text=text))
