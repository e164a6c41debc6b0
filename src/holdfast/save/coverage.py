"""Whether shards that were made by hand cover their leaves, of all workers together.

What a worker writes of such a leaf only its user knows. So each tells a digest of which shards it has, and when any of
them is new, the leader reads the indexes, which are durable by then, and looks at them as `verify` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from holdfast.format.boxes import Box, whole_box
from holdfast.format.digests import digest
from holdfast.format.index import MAX_INDEX_BYTES, Index, decode_index
from holdfast.format.names import StepName, index_name, join
from holdfast.format.shards import find_cover_problem
from holdfast.save.handoffs import Snapshot
from holdfast.storage.protocol import Storage

COVER_HINT: Final = (
    "All Shards of a leaf together hold each of its elements once: look at global_shape and offsets, and whether all "
    "workers save. What is not the same leaf everywhere needs a name of its own on each worker, or hf.PerWorker."
)


def digest_shards(snapshot: Snapshot) -> str:
    """**Pure.** Which shards a worker has that were made by hand, whatever their values; empty if it has none."""
    if not snapshot.by_hand:
        return ""
    parts = {part.name: part for part in snapshot.boxes}
    shards = []
    for place in snapshot.layout.places:
        part = parts.get(place.name)
        leaf = place.name if part is None else part.leaf or part.name
        if leaf in snapshot.by_hand:
            shape = place.shape if part is None else part.global_shape
            box = whole_box(shape) if part is None else Box(part.offsets, place.shape)
            shards.append((leaf, place.dtype, shape, box.offsets, box.shape))
    # What it writes nothing of counts as well: the index says what it is.
    others = [(leaf.name, leaf.dtype, leaf.shape) for leaf in snapshot.elsewhere if leaf.name in snapshot.by_hand]
    return digest(msgspec.msgpack.encode((sorted(snapshot.by_hand), shards, others)))


class Coverage:
    """What the leader knows of the shards of all workers. Not thread-safe."""

    def __init__(self) -> None:
        self._covering: Sequence[str] = ()

    def find_problem(self, storage: Storage, name: StepName, digests: Sequence[str]) -> str:
        """**Blocks.** What is wrong with the shards of a step whose files are all written; empty if nothing is.

        Nothing is read if no worker has any, or all have those that were found to be well before. Where the same box
        stands with two workers it is read each time: their values are to be the same.

        Args:
            storage: Where the run lies.
            name: The step.
            digests: What `digest_shards` gave on each worker, in order of rank.

        Raises:
            DamageError: If an index is not as it was written.
            StorageError: If the place fails.
        """
        if not any(digests) or digests == self._covering:
            return ""
        self._covering = ()
        boxes: set[tuple[str, Box]] = set()
        count = 0

        def read() -> Iterator[Index]:
            nonlocal count
            for rank in range(len(digests)):
                path = join(name.directory, index_name(rank, len(digests)))
                index = decode_index(storage.read(path, MAX_INDEX_BYTES), path=path)
                stored = [(each.leaf, each.box) for each in index.stored_boxes() if each.box.elements]
                boxes.update(stored)
                count += len(stored)
                yield index

        problem = find_cover_problem(read())
        if not problem and count == len(boxes):
            self._covering = digests
        return problem
