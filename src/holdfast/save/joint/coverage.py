"""Checks that all workers together have all objects, and all boxes of their leaves. Pure, except `Coverage`.

When the managers are created, workers exchange the names of their objects. Pipeline stages have objects with different
names: then each object is held by the workers that name it. A worker whose names are only a part of another's has no
stage of its own, and lacks what the other has: it counts as one that should hold that, so the save fails, and names it.

Which workers hold an array is compared leaf by leaf; see `save/joint/replicas.py`. An object without arrays, such as a
counter, has no leaf. So for these, workers are compared only if they have the same objects with arrays.

Only the user knows which part of its leaf a hand-made shard is. And if only some workers have a leaf, others may have
another one of the same name: a copy, or another stage of the model. Such leaves are *loose*. Each worker reports a
digest of its boxes of them; if any of these is new, the leader reads the indexes, durable by then, and checks them like
`verify`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec

from holdfast.cluster.peers import make_sendable
from holdfast.cluster.protocol import name_ranks
from holdfast.errors import UsageError
from holdfast.format.digests import digest
from holdfast.format.index import MAX_INDEX_BYTES, Index
from holdfast.format.index_checks import decode_index, find_cover_problem
from holdfast.format.names import StepName, index_name, join
from holdfast.format.shapes import Box, whole_box
from holdfast.save.image import Snapshot
from holdfast.state.leaves import Skeleton
from holdfast.storage.protocol import Storage

_COVER_HINT: Final = (
    "The boxes of a leaf must cover each of its elements exactly once. Check global_shape and offsets of the "
    "Shard, and whether all workers save. A leaf that differs between workers (pipeline stages, for example) "
    "needs its own name on each worker or in each stage, or holdfast.PerWorker."
)

_VALUES_HINT: Final = (
    "If these are different things (pipeline stages, for example), give them different names: "
    "Checkpoint(**{f'stage{number}': model}). If they are copies, they must stay equal (same initial values, and "
    "an all_reduce of the gradients): find out why they differ."
)


def digest_shards(snapshot: Snapshot) -> str:
    """**Pure.** Returns a digest of the boxes of a worker's loose leaves, without their values; or empty."""
    state = snapshot.state
    if not state.loose:
        return ""
    parts = {part.name: part for part in state.boxes}
    shards = []
    for place in snapshot.layout.places:
        part = parts.get(place.name)
        leaf = place.name if part is None else part.leaf or part.name
        if leaf in state.loose:
            shape = place.shape if part is None else part.global_shape
            box = whole_box(shape) if part is None else Box(part.offsets, place.shape)
            shards.append((leaf, place.dtype, shape, box.offsets, box.shape))
    # What it writes nothing of counts as well: the index says what it is.
    others = [(leaf.name, leaf.dtype, leaf.shape) for leaf in state.elsewhere if leaf.name in state.loose]
    return digest(msgspec.msgpack.encode((sorted(state.loose), sorted(shards), others)))


class Coverage:
    """The leader's knowledge of the loose leaves of all workers. Not thread-safe."""

    def __init__(self) -> None:
        # The shards that passed the last check, if boxes occur twice only on workers that have all boxes in common.
        self._covering: Sequence[str] = ()

    def check(self, storage: Storage, name: StepName, shards: Sequence[str], values: Sequence[str]) -> None:
        """**Blocks.** Checks that the boxes of a step, whose files are all written, make up its leaves.

        Nothing is read if no worker has loose leaves, or all have the boxes that were checked before, with equal values
        in equal boxes. If workers have some boxes in common, but not all, indexes are read each time.

        Raises:
            UsageError: If something is missing, or appears twice with different values; with the leaf and ranks.
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


_DIGEST_CHARACTERS: Final = 16

_MOST_NAMES: Final = 100
_MOST_CHARACTERS: Final = 100
"""How many objects, and how much of a name, one worker reports: a record must fit into the store."""

_NAMED_OBJECTS: Final = 3

OBJECTS_HINT: Final = (
    "All workers must name the same objects. If only some workers have an object, such as a log on rank 0, wrap "
    "it in holdfast.PerWorker."
)


class ObjectSetDigest(msgspec.Struct, frozen=True, array_like=True):
    """A digest of the objects of one worker.

    Attributes:
        stage: The digest of the names of those with arrays.
        bare: The names of those without, except per-worker ones.
    """

    stage: str = ""
    bare: tuple[str, ...] = ()


def digest_objects(snapshot: Snapshot) -> ObjectSetDigest:
    """**Pure.** Returns the digest of the objects of a snapshot's worker."""
    full = {name for name, skeleton in snapshot.state.objects.items() if _has_array(skeleton)}
    bare = sorted(map(make_sendable, snapshot.state.objects.keys() - full - snapshot.state.own))
    named = [
        name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}... {_digest([name])}" for name in bare
    ]
    if len(named) > _MOST_NAMES:
        named[_MOST_NAMES:] = [f"{len(named) - _MOST_NAMES} more objects ({_digest(bare)})"]
    return ObjectSetDigest(_digest(sorted(map(make_sendable, full))), tuple(named))


def find_holders(named: Sequence[Collection[str]]) -> dict[str, tuple[int, ...]]:
    """**Pure.** Returns the workers that hold an object, or should, for objects that not all of them have."""
    ranks_by_names: dict[frozenset[str], list[int]] = {}
    for rank, names in enumerate(named):
        ranks_by_names.setdefault(frozenset(names), []).append(rank)
    if len(ranks_by_names) == 1:
        return {}
    naming: dict[str, list[frozenset[str]]] = {}
    for names in ranks_by_names:
        for name in names:
            naming.setdefault(name, []).append(names)
    holders = {name: {rank for names in sets for rank in ranks_by_names[names]} for name, sets in naming.items()}
    for names, ranks in ranks_by_names.items():
        # All that could have them all name the rarest.
        wider = min((naming[name] for name in names), key=len, default=list(ranks_by_names))
        for others in wider:
            if names < others:
                for name in others - names:
                    holders[name].update(ranks)
    return {name: tuple(sorted(ranks)) for name, ranks in holders.items() if len(ranks) < len(named)}


def find_unlike(object_sets: Sequence[ObjectSetDigest]) -> tuple[int, str] | None:
    """**Pure.** Returns a worker whose objects differ from those of the others, and the message; or None."""
    stages: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for rank, object_set in enumerate(object_sets):
        stages.setdefault(object_set.stage, {}).setdefault(object_set.bare, []).append(rank)
    for ranks_by_names in stages.values():
        sides = sorted(ranks_by_names.items(), key=lambda side: (-len(side[1]), side[1]))
        (usual, most), (other, few) = sides[0], sides[-1]
        if usual != other:
            return few[0], _describe_difference(usual, other, most, few)
    return None


def _describe_difference(usual: Sequence[str], other: Sequence[str], most: Sequence[int], few: Sequence[int]) -> str:
    ending = "" if len(most) > 1 else "s"
    who = name_ranks(tuple(most))
    differences = [f"it lacks {name}, which {who} save{ending}" for name in usual if name not in other]
    differences += [f"it saves {name}, which {who} lack{ending}" for name in other if name not in usual]
    more = f"; and {len(differences) - _NAMED_OBJECTS} more objects" if len(differences) > _NAMED_OBJECTS else ""
    also = f"; the same goes for {name_ranks(tuple(few[1:]))}" if len(few) > 1 else ""
    return f"{'; '.join(differences[:_NAMED_OBJECTS])}{more}{also}"


def _has_array(node: Skeleton) -> bool:
    if isinstance(node, dict):
        return node.get("$") == "array" or any(map(_has_array, node.values()))
    return isinstance(node, list) and any(map(_has_array, node))


def _digest(names: Sequence[str]) -> str:
    return digest("\n".join(names).encode())[:_DIGEST_CHARACTERS]
