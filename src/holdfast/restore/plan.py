"""Plans what is read of which file, for live arrays that may be boxes of leaves, as stored ones may be.

It does no I/O by itself: indexes of other workers are read by a function that it is given, and no more of them than
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from holdfast.errors import DamageError
from holdfast.format.index import Index, StoredBox
from holdfast.format.names import MANIFEST_NAME, join
from holdfast.format.records import SHARDS
from holdfast.format.shapes import Box, find_overlap, intersect, shift, whole_box
from holdfast.restore.aliasing import separate
from holdfast.restore.read import Order, Share
from holdfast.restore.records import OpenedStep, Part
from holdfast.state.leaves import ArraySpec, Target, part_of, spec_of


class ReadPlan(msgspec.Struct, frozen=True):
    """The reads that fill some targets.

    Attributes:
        orders: The reads of each file.
        overlapping: The targets that share memory with another one, or with its copies; all of them must be checked
            once they are filled.
    """

    orders: list[tuple[Part, Order]]
    overlapping: list[Target]

    def measure_bytes(self) -> int:
        """Returns the size of the arrays that are read, at least in part."""
        found = ((part.index.leaves, {*order.whole, *order.shares}) for part, order in self.orders)
        return sum(leaves[number].end - leaves[number].begin for leaves, numbers in found for number in numbers)


def plan_reads(
    opened: OpenedStep,
    targets: Sequence[Target],
    leaves: Mapping[str, ArraySpec],
    read_index: Callable[[int], Index],
) -> ReadPlan:
    """Finds out what to read from which file, before anything is read.

    The indexes that are open already come first: with unchanged workers, they have everything that only they held. Then
    come those that they name, and only if something is still missing, the others, the likeliest first.

    Args:
        opened: The step.
        targets: The arrays to fill.
        leaves: The description of each leaf that is stored.
        read_index: Returns the index of a worker, by its rank.

    Raises:
        DamageError: If an index is damaged, or the step lacks something.
    """
    targets, overlapping = separate(targets)
    manifest = opened.manifest
    if SHARDS not in manifest.features and all(target.offsets is None for target in targets):
        wanted = {target.leaf: target for target in targets}
        wholes = (
            (part, {place: wanted[leaf.name] for place, leaf in enumerate(part.index.leaves) if leaf.name in wanted})
            for part in opened.list_parts()
        )
        return ReadPlan([(part, Order(whole)) for part, whole in wholes if whole], overlapping)
    assignment = _Assignment(targets, leaves, step=manifest.step)
    orders: list[tuple[Part, Order]] = []

    def take(indexes: tuple[Index, ...]) -> None:
        for part in OpenedStep(opened.directory, manifest, indexes).list_parts():
            order = assignment.offer(part.index, part.path)
            if order:
                orders.append((part, order))

    take(opened.indexes)
    known = {index.rank for index in opened.indexes}
    for rank in _list_ranks(opened.indexes, assignment, manifest.world_size):
        if assignment.is_complete:
            break
        if rank not in known:
            known.add(rank)
            take((read_index(rank),))
    leaf, problem = assignment.find_problem()
    if problem:
        path = join(opened.directory, MANIFEST_NAME)
        text = f"{opened.directory or path}: {leaf!r}: {problem}"
        raise DamageError(text, step=manifest.step, path=path, tensor=leaf)
    return ReadPlan(orders, overlapping)


def _list_ranks(indexes: Sequence[Index], assignment: _Assignment, world_size: int) -> Iterator[int]:
    """Returns the workers whose indexes to read, the likeliest first.

    Those that are named come first, and then those near the place at which something is missing: if all were read from
    the first on, a job of many workers would read more of indexes than of its state.
    """
    missing = assignment.list_missing()
    hinted = {rank for index in indexes for leaf in index.elsewhere if leaf.name in missing for rank in leaf.ranks}
    yield from sorted(hinted)
    guess = int(assignment.guess_place() * world_size)
    yield from sorted(range(world_size), key=lambda rank: abs(rank - guess))


class _Assignment:
    """Takes indexes one after the other until every target is served."""

    def __init__(self, targets: Iterable[Target], leaves: Mapping[str, ArraySpec], *, step: int) -> None:
        self._leaves = leaves
        self._step = step
        self._targets: dict[str, list[Target]] = {}
        # By the identity of a target, how many of its elements no file has offered yet.
        self._left: dict[int, int] = {}
        self._open = 0
        self._taken: dict[int, list[Box]] = {}
        # Of each box the array that was offered first.
        self._seen: dict[str, dict[Box, StoredBox]] = {}
        for target in targets:
            elements = target.box.elements
            if elements:
                self._targets.setdefault(target.leaf, []).append(target)
                self._left[id(target)] = elements
                self._open += 1

    @property
    def is_complete(self) -> bool:
        """True if every target is served."""
        return not self._open

    def list_missing(self) -> set[str]:
        """Returns the leaves of which a part has not been offered yet."""
        return {leaf for leaf, targets in self._targets.items() if any(self._left[id(target)] for target in targets)}

    def guess_place(self) -> float:
        """Returns where a missing part is in its leaf, from 0 to 1, along the first dimension that is split.

        Workers mostly hold the parts of a leaf in the order of their ranks, so it tells which one to ask first.
        """
        for leaf, targets in self._targets.items():
            for target in targets:
                if self._left[id(target)]:
                    box, shape = target.box, self._leaves[leaf].shape
                    for offset, length, whole in zip(box.offsets, box.shape, shape, strict=True):
                        if length < whole:
                            return (offset + length / 2) / whole
        return 0.0

    def offer(self, index: Index, path: str) -> Order:
        """Returns what is taken of an index; raises `DamageError` for leaves or values that contradict earlier ones."""
        order = Order()
        for number, stored in enumerate(index.stored_boxes()):
            targets = self._targets.get(stored.leaf)
            if not targets:
                continue
            self._check(stored, path)
            first = self._seen.setdefault(stored.leaf, {}).setdefault(stored.box, stored)
            if first.record.spans != stored.record.spans:
                # Which of them is right is unknown, and a mixture of both would not be a valid state.
                what = f"ranks {first.rank} and {stored.rank} have different values for {stored.box}"
                raise self._make_damage(stored, path, f": {what}")
            if first is stored:
                for target in targets:
                    self._assign(order, number, stored, target)
        return order

    def _assign(self, order: Order, number: int, stored: StoredBox, target: Target) -> None:
        wanted = target.box
        common = wanted if stored.box == wanted else intersect(stored.box, wanted)
        if common is None:
            return
        self._left[id(target)] -= common.elements
        self._open -= not self._left[id(target)]
        self._taken.setdefault(id(target), []).append(common)
        at = shift(common, wanted.offsets)
        if common == stored.box and number not in order.whole:
            order.whole[number] = target if common == wanted else _part(target, at)
            return
        if target.address is None:
            # It is gathered on its way: no more of it at a time than what comes from one array.
            target, at = _part(target, at), whole_box(at.shape)
        order.shares.setdefault(number, []).append(Share(target, shift(common, stored.box.offsets), at))

    def _check(self, stored: StoredBox, path: str) -> None:
        spec = self._leaves[stored.leaf]
        if (stored.dtype, stored.global_shape) != (spec.dtype, spec.shape):
            here = f"{stored.dtype} {list(stored.global_shape)}"
            there = f"{spec.dtype} {list(spec.shape)}"
            raise self._make_damage(stored, path, f" is {here} here, but {there} on another worker")

    def _make_damage(self, stored: StoredBox, path: str, what: str) -> DamageError:
        return DamageError(f"{path}: {stored.leaf!r}{what}", step=self._step, path=path, tensor=stored.leaf)

    def find_problem(self) -> tuple[str, str]:
        """Returns a leaf of which not each element is served once, and why; empty texts if there is none."""
        for leaf, targets in self._targets.items():
            for target in targets:
                taken, left = self._taken.get(id(target), []), self._left[id(target)]
                overlap = find_overlap(taken) if len(taken) > 1 else None
                if overlap is not None:
                    return leaf, f"{taken[overlap[0]]} and {taken[overlap[1]]} overlap, but are stored separately"
                if left:
                    return leaf, f"no worker has {left} of the elements of {target.box}"
        return "", ""


def _part(target: Target, box: Box) -> Target:
    """Returns a box of a target as a target of its own; one that is gathered stays so."""
    view = part_of(target.array, box)
    address = None if target.address is None else target.backend.address(view)
    return Target(target.leaf, spec_of(target.spec.dtype, box.shape), view, target.backend, (), address)
