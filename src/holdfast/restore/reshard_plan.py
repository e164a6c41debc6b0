"""Assigns stored arrays to live ones, if both may be boxes of leaves. It does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from holdfast.errors import DamageError
from holdfast.format.index import Index, StoredBox
from holdfast.format.shapes import Box, find_overlap, intersect, shift, whole_box
from holdfast.state.leaves import ArraySpec, Target, part_of, spec_of


class Share(msgspec.Struct, frozen=True):
    """The part of a stored array that one target takes.

    Attributes:
        target: The target.
        inner: The part of the stored array.
        at: Its offsets in the target's array.
    """

    target: Target
    inner: Box
    at: Box


@dataclass(slots=True)
class Order:
    """A plan of reads of one file.

    Attributes:
        whole: By the name of a stored array, the target that takes all of it.
        shares: By the number of a stored array in its index, what is taken of it otherwise.
    """

    whole: dict[str, Target] = field(default_factory=dict)
    shares: dict[int, list[Share]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.whole or self.shares)


class Assignment:
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
        wanted, record = target.box, stored.record
        common = wanted if stored.box == wanted else intersect(stored.box, wanted)
        if common is None:
            return
        self._left[id(target)] -= common.elements
        self._open -= not self._left[id(target)]
        self._taken.setdefault(id(target), []).append(common)
        at = shift(common, wanted.offsets)
        if common == stored.box and record.name not in order.whole:
            order.whole[record.name] = target if common == wanted else _part(target, record.name, at)
            return
        if target.address is None:
            # It is gathered on its way: no more of it at a time than what comes from one array.
            target, at = _part(target, record.name, at), whole_box(at.shape)
        order.shares.setdefault(number, []).append(Share(target, shift(common, stored.box.offsets), at))

    def _check(self, stored: StoredBox, path: str) -> None:
        spec = self._leaves[stored.leaf]
        if (stored.dtype, stored.global_shape) != (spec.dtype, spec.shape):
            here = f"{stored.dtype} {list(stored.global_shape)}"
            there = f"{spec.dtype} {list(spec.shape)}"
            raise self._make_damage(stored, path, f" is {here} here, but {there} on another worker")

    def _make_damage(self, stored: StoredBox, path: str, what: str) -> DamageError:
        return DamageError(f"{path}: {stored.leaf!r}{what}", step=self._step, path=path, tensor=stored.leaf)

    def check_complete(self) -> None:
        """Raises `DamageError` unless every target is served, each of its elements once."""
        for leaf, targets in self._targets.items():
            for target in targets:
                taken, left = self._taken.get(id(target), []), self._left[id(target)]
                overlap = find_overlap(taken) if len(taken) > 1 else None
                if overlap is not None:
                    text = f"{leaf!r}: {taken[overlap[0]]} and {taken[overlap[1]]} overlap, but are stored separately"
                elif left:
                    text = f"{leaf!r}: no worker has {left} of the elements of {target.box}"
                else:
                    continue
                raise DamageError(text, step=self._step, tensor=leaf)


def _part(target: Target, name: str, box: Box) -> Target:
    view = part_of(target.array, box)
    spec = spec_of(target.spec.dtype, box.shape)
    return Target(name, spec, view, target.backend, (), target.backend.address(view))
