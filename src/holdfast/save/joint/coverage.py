"""Whether the boxes of leaves that no worker can know all of cover these leaves, of all workers together.

Of a shard that was made by hand only its user knows which part of its leaf it is. And where a leaf lies with some of
the workers only, others may have one of that name too: a copy, or another stage of the model. Such leaves are *loose*.
Each worker tells a digest of which boxes of them it has; when any of these is new, the leader reads the indexes, which
are durable by then, and looks at them as `verify` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from holdfast.errors import UsageError
from holdfast.format.boxes import Box, whole_box
from holdfast.format.digests import digest
from holdfast.format.index import MAX_INDEX_BYTES, Index
from holdfast.format.index_checks import decode_index, find_cover_problem
from holdfast.format.names import StepName, index_name, join
from holdfast.save.records import Snapshot
from holdfast.storage.protocol import Storage

_COVER_HINT: Final = (
    "All boxes of a leaf together hold each of its elements once. Of a Shard, look at global_shape and offsets, and "
    "whether all workers save. What is not the same leaf everywhere, as in the stages of a pipeline, needs a name of "
    "its own on each worker or in each stage, or hf.PerWorker."
)

_VALUES_HINT: Final = (
    "If these are different things, as in the stages of a pipeline, give them different names: "
    "Checkpoint(**{f'stage{number}': model}). If they are copies, they have to be kept equal, as by the same start and "
    "an all_reduce of the gradients: find out why they differ."
)


def digest_shards(snapshot: Snapshot) -> str:
    """**Pure.** Which boxes a worker has of its loose leaves, whatever their values; empty if it has no such leaves."""
    if not snapshot.loose:
        return ""
    parts = {part.name: part for part in snapshot.boxes}
    shards = []
    for place in snapshot.layout.places:
        part = parts.get(place.name)
        leaf = place.name if part is None else part.leaf or part.name
        if leaf in snapshot.loose:
            shape = place.shape if part is None else part.global_shape
            box = whole_box(shape) if part is None else Box(part.offsets, place.shape)
            shards.append((leaf, place.dtype, shape, box.offsets, box.shape))
    # What it writes nothing of counts as well: the index says what it is.
    others = [(leaf.name, leaf.dtype, leaf.shape) for leaf in snapshot.elsewhere if leaf.name in snapshot.loose]
    return digest(msgspec.msgpack.encode((sorted(snapshot.loose), sorted(shards), others)))


class Coverage:
    """What the leader knows of the loose leaves of all workers. Not thread-safe."""

    def __init__(self) -> None:
        # What was found to be well, so that boxes stand twice only with workers that say the same of all of them.
        self._covering: Sequence[str] = ()

    def check(self, storage: Storage, name: StepName, shards: Sequence[str], values: Sequence[str]) -> None:
        """**Blocks.** Makes sure that the boxes of a step, whose files are all written, make up its leaves.

        Nothing is read if no worker has loose leaves, or all have those boxes that were found to be well before, and
        with the same values where they are the same boxes. Where workers have some of their boxes in common, and not
        all, indexes are read each time.

        Args:
            storage: Where the run lies.
            name: The step.
            shards: What `digest_shards` gave on each worker, in order of rank.
            values: What `save.write.writer.digest_loose` gave.

        Raises:
            UsageError: If something is missing, or stands twice with different values; it names the leaf and ranks.
            DamageError: If an index is not as it was written.
            StorageError: If the place fails.
        """
        if not any(shards):
            return
        # Who has the same boxes must have the same in them.
        if shards == self._covering and len(set(zip(shards, values, strict=True))) == len(set(shards)):
            return
        self._covering = ()
        first: dict[tuple[str, Box], tuple[int, str]] = {}
        have_twins = True
        differ = False

        def read() -> Iterator[Index]:
            nonlocal have_twins, differ
            for rank in range(len(shards)):
                path = join(name.directory, index_name(rank, len(shards)))
                index = decode_index(storage.read(path, MAX_INDEX_BYTES), path=path)
                for stored in index.stored_boxes():
                    if stored.box.elements:
                        other, spans = first.setdefault((stored.leaf, stored.box), (rank, stored.record.spans))
                        have_twins = have_twins and shards[other] == shards[rank] != ""
                        differ = differ or spans != stored.record.spans
                yield index

        problem = find_cover_problem(read())
        if problem:
            raise UsageError(problem, hint=_VALUES_HINT if differ else _COVER_HINT)
        if have_twins:
            self._covering = shards
