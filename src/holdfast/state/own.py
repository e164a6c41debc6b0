"""Decides what this worker writes of the arrays of a job of several, and what it leaves to others.

All holders of a box decide by the same rule, each on its own and box by box: if one of them has more or fewer arrays
than the others, the rest is not affected. There is no communication, and nothing is counted up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import xxhash
from msgspec.structs import replace

from holdfast.errors import UnsupportedValueError
from holdfast.format.dtypes import ITEM_BYTES, QUANTIZED_TYPES, QuantizerRecord
from holdfast.format.index import BoxRecord, ElsewhereRecord
from holdfast.format.records import Worker
from holdfast.format.shapes import Box, StridesRecord, shift, split_box, whole_box
from holdfast.state.adapters import Replication
from holdfast.state.describe import look_at
from holdfast.state.leaves import ArrayBackend, ArraySpec, Cutting, Replica, Sharding, part_of, spec_of
from holdfast.state.registry import backend_of, sharder_of_type

MemoryGroups: TypeAlias = dict[str, tuple[object, frozenset[tuple[str, Hashable]]]]
"""By name, the memory of a group of arrays, and what tells whether it is that of the same arrays still."""

MOST_WRITERS: Final = 64
"""How many holders share the writing. With more it would not be faster, and each restore would open more files."""

SMALL_BYTES: Final = 4096
"""Arrays up to this size go to the first holder: twenty thousand such arrays are little to write, and one file to
read."""

PART_BYTES: Final = 256 << 10
"""The smallest part of a box that is shared."""


def plan_parts(leaf: str, box: Box, item_bytes: int, holders: Sequence[int]) -> list[tuple[int, Box]]:
    """**Pure.** Decides who writes a box of a leaf that several workers hold.

    A large box is split into parts that are contiguous in it and as even as possible; the holder of the first part
    depends on the leaf's name, so that many boxes are spread as well.

    Args:
        leaf: The leaf's name.
        box: The box that each of them holds.
        item_bytes: The bytes of one element.
        holders: Their ranks, in the same order on each of them; at least one.

    Returns:
        The parts of the box, in order, each with the worker that writes it.
    """
    if len(holders) == 1:
        return [(holders[0], box)]
    size_bytes = box.elements * item_bytes
    if size_bytes <= SMALL_BYTES:
        return [(holders[0], box)]
    writers = choose_writers(holders)
    parts = split_box(box, max(1, min(len(writers), size_bytes // PART_BYTES)))
    first = xxhash.xxh3_64_intdigest(f"{leaf}\n{box.offsets}".encode(errors="surrogatepass"))
    return [(writers[(first + number) % len(writers)], part) for number, part in enumerate(parts)]


def choose_writers(holders: Sequence[int]) -> Sequence[int]:
    """**Pure.** Returns the holders that write: far from each other, because neighbors share a machine."""
    if len(holders) <= MOST_WRITERS:
        return holders
    return [holders[number * len(holders) // MOST_WRITERS] for number in range(MOST_WRITERS)]


class Scope(NamedTuple):
    """The ranks that hold the current object, and its rules: common to all its arrays.

    Attributes:
        holders: The ranks of all that hold its plain arrays.
        is_own: True if it differs per worker, and so is written by this one alone.
        trained: By library and memory, its arrays that training keeps equal on all workers; None for all of its state.
        is_trained: True if these can only differ by a mistake.
        renewed: By library and memory, those of its arrays that may differ.
    """

    holders: Sequence[int]
    is_own: bool = False
    trained: frozenset[tuple[str, Hashable]] | None = None
    is_trained: bool = False
    renewed: frozenset[tuple[str, Hashable]] = frozenset()


class HeldReplica(NamedTuple):
    """A box that others hold too.

    Attributes:
        record: Its entry in the report.
        held: Its library and its array; None for a second name of one.
        origin: The array of the program that it comes from, and how.
    """

    record: Replica
    held: tuple[ArrayBackend, Any] | None
    origin: tuple[Any, Cutting] | None


class ShardOwnership:
    """Decides for one capture, array by array, and collects the records for the index.

    Attributes:
        worker: This worker.
        scope: What applies to the current object.
        boxes: The boxes that arrays are, if not whole leaves.
        elsewhere: The leaves that other workers write in part or in full.
        loose: The leaves of which this worker cannot know who else holds them, or whether all is held.
        replicas: The boxes that others hold too.
        checks_replicas: True if their values are compared.
        strides: The leaves that are not in row-major order here.
        quantizers: Those of quantized leaves.
    """

    def __init__(self, worker: Worker, *, check_replicas: bool = False, groups: MemoryGroups | None = None) -> None:
        """Takes `groups` over from an earlier capture."""
        self.worker = worker
        self._groups: MemoryGroups = {} if groups is None else groups
        self.checks_replicas = check_replicas and not worker.is_alone
        self.scope = Scope(range(worker.world_size))
        self.boxes: list[BoxRecord] = []
        self.elsewhere: list[ElsewhereRecord] = []
        self.loose: set[str] = set()
        self.replicas: list[HeldReplica] = []
        self.strides: list[StridesRecord] = []
        self.quantizers: list[QuantizerRecord] = []

    def lists(self) -> tuple[list[Any], ...]:
        """Returns the lists that grow with each array, for the index."""
        return self.boxes, self.elsewhere, self.replicas, self.strides, self.quantizers

    def enter(self, replication: Replication, path: str) -> None:
        """Sets what applies to the object at a path."""
        scope = self.scope
        scope = scope._replace(
            holders=replication.holders or scope.holders, is_trained=scope.is_trained or replication.is_trained
        )
        if replication.trained is not None:
            trained = self._find_memory(replication.trained, f"{path} trained")
            scope = scope._replace(trained=trained, renewed=self._find_memory(replication.renewed, f"{path} renewed"))
        self.scope = scope

    def _find_memory(self, arrays: Sequence[Any], group: str) -> frozenset[tuple[str, Hashable]]:
        """Returns the memory of the plain ones among some arrays; if that has not changed, the previous set."""
        plain = [array for array in arrays if sharder_of_type(type(array)) is None and backend_of(array) is not None]
        look = look_at(plain)
        now = None if look is None else (look.keys, look.marks)
        known = self._groups.get(group)
        if known is not None and now is not None and known[0] == now:
            return known[1]
        found: set[tuple[str, Hashable]] = set()
        for backend in {id(one): one for one in map(backend_of, plain) if one is not None}.values():
            facts = backend.describe([array for array in plain if backend_of(array) is backend])
            found.update((backend.name, facts.memory(row)) for row in range(len(facts.specs)))
        self._groups[group] = now, frozenset(found)
        return frozenset(found)

    def choose(
        self, leaf: str, sharding: Sharding, path: str, value: Any
    ) -> Iterator[tuple[str, ArraySpec, Any, Cutting]]:
        """Returns the arrays that this worker writes of a leaf, each with a name of its own.

        Each comes with how it is cut from what this worker holds of `value` in one piece.

        Raises:
            UnsupportedValueError: If other workers would have to write a part, and there are none.
        """
        spec = sharding.spec
        if spec.dtype in QUANTIZED_TYPES and spec.quantizer is None:
            raise UnsupportedValueError(
                f"{path}: a part of a quantized tensor cannot be stored",
                path=path,
                hint="Store its int_repr() as the part, with scale and zero point next to it.",
            )
        self.note_form(leaf, spec)
        scope, memory = self.scope, (sharding.backend.name, sharding.memory)
        is_plain = all(local.holders is None for local in sharding.boxes)
        may_differ = is_plain and scope.trained is not None and memory not in scope.trained
        workers = sharding.workers or len(scope.holders)
        if sharding.is_by_hand or (not scope.is_own and workers < self.worker.world_size):
            self.loose.add(leaf)
        others: set[int] = set()
        is_complete = bool(sharding.boxes)
        written = written_elements = 0
        for local in sharding.boxes:
            if not local.box.elements and 0 not in spec.shape:
                is_complete = False
                continue
            holders = (self.worker.rank,) if scope.is_own else local.holders or scope.holders
            item_bytes = ITEM_BYTES[spec.dtype]
            # What is not the same with all comes from one of them, and not each array from another.
            is_together = may_differ and local.box.elements * item_bytes < 2 * PART_BYTES
            for owner, part in plan_parts(leaf, local.box, item_bytes, holders[:1] if is_together else holders):
                name = f"{leaf}~b{written}" if written else leaf
                if owner != self.worker.rank:
                    others.add(owner)
                    continue
                array, (piece, cuts) = local.array, local.cutting
                if part != local.box:
                    cut = shift(part, local.box.offsets)
                    array, cuts = part_of(array, cut), (*cuts, cut)
                if not part.is_whole(spec.shape):
                    self.boxes.append(BoxRecord(name, leaf if written else "", spec.shape, part.offsets))
                written += 1
                written_elements += part.elements
                yield name, spec_of(spec.dtype, part.shape), array, (piece, cuts)
            if len(holders) > 1:
                record = Replica(
                    leaf,
                    spec,
                    local.box,
                    holders,
                    may_differ=may_differ,
                    is_trained=scope.is_trained,
                    is_renewed=memory in scope.renewed,
                )
                held = sharding.backend, local.array
                self.replicas.append(HeldReplica(record, held, (value, local.cutting)))
        if self.worker.is_alone and written_elements != whole_box(spec.shape).elements:
            raise UnsupportedValueError(
                f"{path}: this worker holds {written_elements} elements of {list(spec.shape)}, and there is no "
                "other worker",
                path=path,
                hint="Save from all workers of the job together: pass their cluster to the manager.",
            )
        if others or not written or not is_complete:
            self.elsewhere.append(ElsewhereRecord(leaf, spec.dtype, spec.shape, tuple(sorted(others))))

    def note_form(self, leaf: str, spec: ArraySpec) -> None:
        """Records a leaf's memory layout, if it is not in row-major order, and its quantizer, if it has one."""
        if spec.strides is not None:
            self.strides.append(StridesRecord(leaf, spec.strides))
        if spec.quantizer is not None:
            self.quantizers.append(QuantizerRecord(leaf, spec.quantizer))

    def note_alias(self, path: str, replicas: range, value: Any) -> None:
        """Records that an array appears at another path: on the other workers it must be there as well.

        Args:
            path: That path.
            replicas: The replicas of its leaf.
            value: The array there.
        """
        # An object that differs per worker concerns only this worker.
        if not self.scope.is_own:
            own = (replica.record for replica in self.replicas[replicas.start : replicas.stop])
            leaves = {id(record.holders): record for record in own}
            self.replicas += [
                HeldReplica(replace(record, leaf=path, same_as=record.leaf), None, (value, (0, ())))
                for record in leaves.values()
            ]
