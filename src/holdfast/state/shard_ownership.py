"""Decides what this worker writes of the arrays of a job of several, and what it leaves to others.

All holders of a box decide by the same rule, each on its own and box by box: if one of them has more or fewer arrays
than the others, the rest is not affected. There is no communication, and nothing is counted up. An array that was met
before keeps its leaf: `KnownArrays`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias

import xxhash
from msgspec.structs import replace

from holdfast.errors import UnsupportedValueError
from holdfast.format.dtypes import ITEM_BYTES, QUANTIZED_TYPES, QuantizerRecord
from holdfast.format.index import BoxRecord, ElsewhereRecord
from holdfast.format.records import Worker
from holdfast.format.shapes import Box, StridesRecord, shift, split_box, whole_box
from holdfast.state.adapters import Replication
from holdfast.state.array_look import look_at
from holdfast.state.leaves import ArrayBackend, ArraySpec, Cutting, LocalBox, Replica, Sharding, part_of, spec_of
from holdfast.state.registry import backend_of, is_made_of_tensors, parts_of, sharder_of_type

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


class ShardOwnership:
    """Decides for one capture, array by array, and collects the records for the index.

    Attributes:
        worker: This worker.
        holders: The ranks of all that hold the plain arrays of the current object.
        is_own: True if the current object differs per worker, and so is written by this one alone.
        boxes: The boxes that arrays are, if not whole leaves.
        elsewhere: The leaves that other workers write in part or in full.
        loose: The leaves of which this worker cannot know who else holds them, or whether all is held.
        replicas: The boxes that others hold too.
        compared: For each of these its array, with the library; None for a second name of one.
        cuttings: For each of these, how its array comes from what this worker holds in one piece.
        checks_replicas: True if their values are compared.
        trained: By library and memory, the arrays of the current object that training keeps equal on all workers; None
            for all of its state.
        is_trained: True if these can only differ by a mistake.
        renewed: By library and memory, those of its arrays that may differ.
        strides: The leaves that are not in row-major order here.
        quantizers: Those of quantized leaves.
    """

    def __init__(self, worker: Worker, *, check_replicas: bool = False, groups: MemoryGroups | None = None) -> None:
        """Takes `groups` over from an earlier capture."""
        self.worker = worker
        self._groups: MemoryGroups = {} if groups is None else groups
        self.checks_replicas = check_replicas and not worker.is_alone
        self.holders: Sequence[int] = range(worker.world_size)
        self.is_own = False
        self.boxes: list[BoxRecord] = []
        self.elsewhere: list[ElsewhereRecord] = []
        self.loose: set[str] = set()
        self.replicas: list[Replica] = []
        self.strides: list[StridesRecord] = []
        self.quantizers: list[QuantizerRecord] = []
        self.compared: list[tuple[ArrayBackend, Any] | None] = []
        self.cuttings: list[Cutting] = []
        self.trained: frozenset[tuple[str, Hashable]] | None = None
        self.renewed: frozenset[tuple[str, Hashable]] = frozenset()
        self.is_trained = False

    def lists(self) -> tuple[list[Any], ...]:
        """Returns the lists that grow with each array, for the index."""
        return self.boxes, self.elsewhere, self.replicas, self.strides, self.quantizers

    @property
    def scope(self) -> tuple[Any, ...]:
        """The attributes that belong to the current object alone."""
        return self.is_own, self.holders, self.trained, self.renewed, self.is_trained

    @scope.setter
    def scope(self, values: tuple[Any, ...]) -> None:
        self.is_own, self.holders, self.trained, self.renewed, self.is_trained = values

    def enter(self, replication: Replication, path: str) -> None:
        """Sets `holders` and `trained` for the object at a path."""
        self.holders = replication.holders or self.holders
        self.is_trained = self.is_trained or replication.is_trained
        if replication.trained is not None:
            self.trained = self._find_memory(replication.trained, f"{path} trained")
            self.renewed = self._find_memory(replication.renewed, f"{path} renewed")

    def _find_memory(self, arrays: Sequence[Any], group: str) -> frozenset[tuple[str, Hashable]]:
        """Returns the memory of the plain ones among some arrays; if that has not changed, the previous set."""
        plain = [array for array in arrays if sharder_of_type(type(array)) is None and backend_of(array) is not None]
        look = look_at(plain)
        now = None if look is None else (look.keys, look.marks)
        known = self._groups.get(group)
        if known is not None and now is not None and known[0] == now:
            return known[1]
        backends = map(backend_of, plain)
        found = frozenset(
            (backend.name, backend.alias_key(array))
            for array, backend in zip(plain, backends, strict=True)
            if backend is not None
        )
        self._groups[group] = now, found
        return found

    def look(self, array: Any, backend: ArrayBackend, path: str) -> Sharding:
        """Returns the sharding of a plain array, which each holder has whole."""
        spec = backend.spec(array, path)
        local = LocalBox(whole_box(spec.shape), array, None)
        memory = backend.alias_key(array)
        may_differ = self.trained is not None and (backend.name, memory) not in self.trained
        return Sharding(spec, backend, (local,), memory, may_differ=may_differ)

    def choose(self, leaf: str, sharding: Sharding, path: str) -> Iterator[tuple[str, ArraySpec, Any, Cutting]]:
        """Returns the arrays that this worker writes of a leaf, each with a name of its own.

        Each comes with how it is cut from what this worker holds in one piece.

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
        workers = sharding.workers or len(self.holders)
        if sharding.is_by_hand or (not self.is_own and workers < self.worker.world_size):
            self.loose.add(leaf)
        others: set[int] = set()
        is_complete = bool(sharding.boxes)
        written = written_elements = 0
        for local in sharding.boxes:
            if not local.box.elements and 0 not in spec.shape:
                is_complete = False
                continue
            holders = (self.worker.rank,) if self.is_own else local.holders or self.holders
            item_bytes = ITEM_BYTES[spec.dtype]
            # What is not the same with all comes from one of them, and not each array from another.
            is_together = sharding.may_differ and local.box.elements * item_bytes < 2 * PART_BYTES
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
                self.replicas.append(
                    Replica(
                        leaf,
                        spec,
                        local.box,
                        holders,
                        may_differ=sharding.may_differ,
                        is_trained=self.is_trained,
                        is_renewed=(sharding.backend.name, sharding.memory) in self.renewed,
                    )
                )
                self.compared.append((sharding.backend, local.array))
                self.cuttings.append(local.cutting)
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

    def note_alias(self, path: str, replicas: range) -> None:
        """Records that an array appears at another path: on the other workers it must be there as well.

        Args:
            path: That path.
            replicas: The replicas of its leaf.
        """
        # An object that differs per worker concerns only this worker.
        if not self.is_own:
            leaves = {id(replica.holders): replica for replica in self.replicas[replicas.start : replicas.stop]}
            self.replicas += [replace(leaf, leaf=path, same_as=leaf.leaf) for leaf in leaves.values()]
            self.compared += [None] * len(leaves)
            self.cuttings += [(0, ())] * len(leaves)


class CapturedLeaf(NamedTuple):
    """The result for one array.

    Attributes:
        leaf: Its leaf.
        arrays, replicas: The places of the leaf's arrays, and of its replicas, among those of the capture.
        is_own: True if no other worker has a part in it.
    """

    leaf: str
    arrays: range
    replicas: range
    is_own: bool = False


class KnownArrays:
    """The arrays that a capture has met, each with its leaf. Many that come at once are entered together.

    Attributes:
        leaves: By library and memory, the result for each array that was looked at by itself.
        looked_at: By the identity of such an array, the array, which keeps its identity so, and the result.
    """

    def __init__(self, worker: Worker) -> None:
        self.leaves: dict[Hashable, CapturedLeaf] = {}
        self.looked_at: dict[int, tuple[Any, CapturedLeaf]] = {}
        self._worker = worker
        # Arrays that came together, with the results for these; those after the first are in `leaves` already.
        self._taken: list[tuple[Sequence[Any], Sequence[CapturedLeaf]]] = []
        self._indexed = 0
        # Where the memory begins of all arrays that were met, but for the last ones.
        self._met: set[int] = set()
        self._not_met: list[Any] = []

    def note(self, array: Any, written: CapturedLeaf) -> None:
        """Notes the result for an array that was looked at by itself."""
        self.looked_at.setdefault(id(array), (array, written))
        self._not_met.append(array)

    def take(self, arrays: Sequence[Any], written: Sequence[CapturedLeaf], keys: Iterable[int]) -> None:
        """Enters many arrays, all of them new; `keys` are as in `ArrayLook`."""
        self._taken.append((arrays, written))
        self._met.update(keys)

    def are_new(self, keys: Sequence[int]) -> bool:
        """Returns True if no memory that begins at one of these addresses was met before."""
        if self._not_met:
            look = look_at(self._not_met)
            if look is None:
                return False
            self._met.update(look.keys)
            self._not_met.clear()
        return self._met.isdisjoint(keys)

    def find(self, array: Any, memory: Hashable) -> CapturedLeaf | None:
        """Returns the result for the memory of an array, if it was met before."""
        if self._indexed < len(self._taken):
            # Those are entered one array at a time only where it may be one of theirs, which is seldom.
            look = look_at([array])
            if look is None or not self._met.isdisjoint(look.keys):
                for own, written in self._taken[self._indexed :]:
                    self.leaves.update(zip(map(self._memory_of, own), written, strict=True))
                self._indexed = len(self._taken)
        return self.leaves.get(memory)

    def find_held(self, arrays: list[Any]) -> set[int]:
        """Returns the leaves whose memory one of the arrays shows in the same form, by number."""
        known = {key: written for key, (_, written) in self.looked_at.items()}
        for own, written in self._taken:
            known.update(zip(map(id, own), written, strict=True))
        found: list[CapturedLeaf | None] = list(map(known.get, map(id, arrays)))
        others = [array for array, written in zip(arrays, found, strict=True) if written is None]
        while others:
            array = others.pop()
            if is_made_of_tensors(type(array)):
                others += [part for _, part in parts_of(array)]
            elif sharder_of_type(type(array)) is not None or backend_of(array) is not None:
                found.append(self.find(array, self._memory_of(array)))
        return set(chain.from_iterable(map(_arrays, filter(None, found))))

    def _memory_of(self, array: Any) -> Hashable:
        """Returns a key of an array's memory that no other memory has while its object is looked at."""
        sharder = sharder_of_type(type(array))
        if sharder is not None:
            look = sharder.look(array, "", self._worker)
            return look.backend.name, look.memory
        backend = backend_of(array)
        assert backend is not None  # It was found to be an array.
        return backend.name, backend.alias_key(array)


_arrays: Final = attrgetter("arrays")
