"""Whether shards that were made by hand cover their leaves, of all workers together.

What a worker writes of such a leaf only its user knows. So each sends one number, however many shards it has, and the
numbers of all add up to zero if every element is written once. If they do not, the leader reads the indexes, which are
durable by then, and finds out which leaf it is, if it is one: the same box may stand in two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.format.boxes import Box, whole_box
from holdfast.format.digests import digest
from holdfast.format.index import MAX_INDEX_BYTES, decode_index
from holdfast.format.names import StepName, index_name, join
from holdfast.format.shards import find_cover_problem
from holdfast.save.handoffs import Snapshot
from holdfast.storage.protocol import Storage

_PRIME: Final = (1 << 61) - 1

COVER_HINT: Final = (
    "All Shards of a leaf together hold each of its elements once: look at global_shape and offsets, and whether all "
    "workers save."
)


def weigh_shards(snapshot: Snapshot) -> int:
    """**Pure.** What this worker adds to a sum over all of them, which is zero if every element is written once.

    It counts the elements, each for a number that depends on the leaf and the place, and takes all of the leaf away
    where the first element is written. So a gap does not go unseen since another part is written twice.
    """
    if not snapshot.by_hand:
        return 0
    parts = {part.name: part for part in snapshot.boxes}
    total = 0
    for place in snapshot.layout.places:
        part = parts.get(place.name)
        leaf = place.name if part is None else part.leaf or part.name
        if leaf not in snapshot.by_hand:
            continue
        whole = whole_box(place.shape if part is None else part.global_shape)
        box = whole if part is None else Box(part.offsets, place.shape)
        weight = _weigh(box)
        if box.elements and not any(box.offsets):
            weight -= _weigh(whole)
        total += weight * _number(f"{leaf}\n{place.dtype} {whole.shape}")
    return total % _PRIME


def _weigh(box: Box) -> int:
    """The sum, over all elements of a box, of a number that depends on the place of the element.

    For the element at (i, k, ...) that is a**i * b**k * ..., with a number for each dimension: such sums are quick.
    """
    weight = 1
    for dimension, (begin, end) in enumerate(zip(box.offsets, box.ends, strict=True)):
        base = _number(f"dimension {dimension}")
        series = (pow(base, end, _PRIME) - pow(base, begin, _PRIME)) * pow(base - 1, -1, _PRIME)
        weight = weight * series % _PRIME
    return weight


def _number(words: str) -> int:
    """A number that looks like chance, from 2 to less than the prime."""
    return int(digest(words.encode(errors="surrogatepass"))[:16], 16) % (_PRIME - 2) + 2


def find_uncovered(storage: Storage, name: StepName, weights: Sequence[int]) -> str:
    """**Blocks.** What is wrong with the shards of a step whose files are all written; empty if nothing is.

    Args:
        storage: Where the run lies.
        name: The step.
        weights: What `weigh_shards` gave on each worker, in order of rank.

    Raises:
        DamageError: If an index is not as it was written.
        StorageError: If the place fails.
    """
    if sum(weights) % _PRIME == 0:
        return ""
    paths = [join(name.directory, index_name(rank, len(weights))) for rank in range(len(weights))]
    return find_cover_problem(decode_index(storage.read(path, MAX_INDEX_BYTES), path=path) for path in paths)
