"""The leaves of one capture: finds arrays that were met before, names new ones, and has what each adds to the index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.errors import UnsupportedValueError
from holdfast.format.encoding import unsupported
from holdfast.format.index import BoxRecord, ElsewhereRecord
from holdfast.format.records import Worker
from holdfast.format.scalars import Node
from holdfast.format.shapes import Box, StridesRecord
from holdfast.state.describe import ArrayLook
from holdfast.state.leaves import (
    ArrayBackend,
    ArraySpec,
    Captured,
    Cutting,
    Facts,
    Replica,
    Sharding,
    Skeleton,
    find_addresses,
    list_whole,
    part_of,
)
from holdfast.state.own import HeldReplica, ShardOwnership
from holdfast.state.registry import backend_of, backend_of_type, is_made_of_tensors, parts_of, sharder_of_type

_TOGETHER: Final = 32
"""Fewer arrays are entered one by one, which takes no longer."""

_places: Final = attrgetter("arrays")
_strides: Final = attrgetter("strides")


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


class LeafOrigin(NamedTuple):
    """The origin of a leaf's array.

    Attributes:
        base: The number of a base of a tree's arrays.
        cuts: Boxes to cut from it, one from the other; none for the base itself.
    """

    base: int
    cuts: tuple[Box, ...]

    def find(self, bases: Sequence[Any]) -> Any:
        """Returns the array of the leaf."""
        found = bases[self.base]
        for box in self.cuts:
            found = part_of(found, box)
        return found


class LeafEntries(msgspec.Struct):
    """Everything that the arrays of one tree have added to a table, without the arrays.

    Attributes:
        begins: The places in the columns and among the replicas at which `written` begins.
        written: The result for each array.
        taken: All names that they took.
        names, specs, backends: Of their leaves.
        numbers: For each leaf, the number of its array's base.
        cut: By number, the leaves whose arrays are not their bases, but cut from them.
        boxes, elsewhere, strides, loose: The entries in a `ShardOwnership`.
        replicas: Those there, each with its library and the origin of its array; None for a second name.
    """

    begins: tuple[int, int]
    written: list[CapturedLeaf]
    taken: frozenset[str]
    names: list[str]
    specs: list[ArraySpec]
    backends: list[ArrayBackend]
    numbers: list[int]
    cut: dict[int, LeafOrigin]
    boxes: list[BoxRecord]
    elsewhere: list[ElsewhereRecord]
    strides: list[StridesRecord]
    loose: list[str]
    replicas: list[tuple[Replica, ArrayBackend | None, LeafOrigin]]

    def move(self, begins: tuple[int, int]) -> None:
        """Lets the leaves and the replicas begin at those places."""
        if begins != self.begins:
            columns, replicas = begins[0] - self.begins[0], begins[1] - self.begins[1]
            self.begins = begins
            self.written = [
                CapturedLeaf(leaf, _shift(arrays, columns), _shift(copies, replicas), is_own)
                for leaf, arrays, copies, is_own in self.written
            ]


class KnownArrays:
    """The arrays that a capture has met, each with its leaf, by where their memory begins: see `Facts.keys`.

    Two are the same only if they begin with the same memory, so that only such ones are compared in full.

    Attributes:
        firsts: The first array at each place, which is kept, or another one might get the place of one that is gone.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.firsts: dict[int, tuple[Any, CapturedLeaf]] = {}
        self._others: dict[Hashable, tuple[Any, CapturedLeaf]] = {}

    def enter(self, keys: Sequence[int], arrays: Sequence[Any], written: Sequence[CapturedLeaf]) -> None:
        """Enters many arrays, whose places are all new; but several of them may begin at one."""
        added = dict(zip(keys, zip(arrays, written, strict=True), strict=True))
        if len(added) == len(keys):
            self.firsts.update(added)
            return
        for key, array, leaf in zip(keys, arrays, written, strict=True):
            memory = self.identify(array)[1]
            if self.find(key, memory) is None:
                self.note(key, memory, array, leaf)

    def note(self, key: int, memory: Hashable, array: Any, written: CapturedLeaf) -> None:
        """Enters an array that is not known yet."""
        if self.firsts.setdefault(key, (array, written))[1] is not written:
            self._others[memory] = array, written

    def are_new(self, keys: Iterable[int]) -> bool:
        """Returns True if no memory that begins at one of these places was met before."""
        return self.firsts.keys().isdisjoint(keys)

    def find(self, key: int, memory: Hashable) -> CapturedLeaf | None:
        """Returns the result for the memory of an array, if it was met before."""
        first = self.firsts.get(key)
        if first is None:
            return None
        other = self._others.get(memory)
        if other is not None:
            return other[1]
        return first[1] if self.identify(first[0])[1] == memory else None

    def identify(self, array: Any) -> tuple[int, tuple[str, Hashable]]:
        """Returns where an array begins, and its library and memory."""
        sharder = sharder_of_type(type(array))
        if sharder is not None:
            (look,) = sharder.look([array], str, self._worker)
            return look.key, (look.backend.name, look.memory)
        backend = backend_of(array)
        assert backend is not None  # It was found to be an array.
        facts = backend.describe([array])
        return facts.keys[0], (backend.name, facts.memory(0))

    def by_identity(self) -> dict[int, CapturedLeaf]:
        """Returns the results for all arrays that were met, by their identities."""
        return {id(array): leaf for array, leaf in chain(self.firsts.values(), self._others.values())}


class LeafTable:
    """The leaves of one capture.

    Attributes:
        sharing: Decides which worker writes what.
        names: The names that are taken.
        notes_each: True while each array is entered by itself, because its tree is to be remembered.
    """

    def __init__(self, sharing: ShardOwnership) -> None:
        self.sharing = sharing
        self.names: set[str] = set()
        self._known = KnownArrays(sharing.worker)
        self.notes_each = False
        self._columns = Captured([], [], [], [], [], {})
        # For each leaf's array the array of the program that it comes from, and how; None for those of `replay`.
        self._origins: list[tuple[Any, Cutting] | None] = []
        # Since `mark`: by its identity the result for each array that was entered by itself; the new leaves; and
        # whether one's name was taken already.
        self._noted: dict[int, CapturedLeaf] = {}
        self._new: set[str] = set()
        self._has_renamed = False

    def add(self, arrays: Sequence[Any], path_of: Callable[[int], str]) -> list[Node]:
        """Returns the nodes of arrays of one library, or of one kind of sharded ones."""
        sharing, cls = self.sharing, type(arrays[0])
        sharder, backend = sharder_of_type(cls), backend_of_type(cls)
        if sharder is not None:
            return self._add_shared(arrays, sharder.look(arrays, path_of, sharing.worker), path_of)
        assert backend is not None  # They are arrays.
        facts = backend.describe(arrays)
        if not (sharing.worker.is_alone or sharing.scope.is_own):
            return self._add_shared(arrays, list_whole(arrays, backend, facts, path_of), path_of)
        is_many = len(arrays) >= _TOGETHER and not self.notes_each
        leaves = self._try_add(arrays, backend, facts, path_of) if is_many else None
        if leaves is None:
            leaves = [self._add_own(array, backend, facts, row, path_of(row)) for row, array in enumerate(arrays)]
        return [{"$": "array", "k": backend.name, "v": leaf} for leaf in leaves]

    def _try_add(
        self, arrays: Sequence[Any], backend: ArrayBackend, facts: Facts, path_of: Callable[[int], str]
    ) -> Sequence[str] | None:
        """Enters many arrays of this worker alone at once; returns None if one is not plain, or a name or memory was
        met before."""
        is_usual = not (facts.problems or facts.forms or facts.unfillable) and 0 not in facts.addresses
        if not is_usual or set(map(_strides, facts.specs)) != {None}:
            return None
        paths = list(map(path_of, range(len(arrays))))
        leaves = names = list(map(self._own_name, paths)) if self.sharing.scope.is_own else paths
        if len(set(names)) < len(names) or not self.names.isdisjoint(names) or not self._known.are_new(facts.keys):
            return None
        specs: Sequence[ArraySpec] = facts.specs
        addresses: Sequence[int] = facts.addresses
        # One may be among them twice, such as an observation in its own row and in the one before.
        if len(set(addresses)) < len(arrays):
            keys = list(map(facts.memory, range(len(arrays))))
            firsts = dict(zip(reversed(keys), reversed(range(len(arrays))), strict=True))
            leaves = [names[firsts[key]] for key in keys]
            numbers = sorted(firsts.values())
            names, arrays, specs, addresses = (
                list(map(column.__getitem__, numbers)) for column in (names, arrays, specs, addresses)
            )
        begin, replica = len(self._columns.names), len(self.sharing.replicas)
        ranges = map(range, range(begin, begin + len(names)), range(begin + 1, begin + len(names) + 1))
        written = map(CapturedLeaf, names, ranges, repeat(range(replica, replica)), repeat(True))
        self._known.enter(addresses, arrays, list(written))
        self.names.update(names)
        self._origins += [None] * len(names)
        self._columns.add(names, specs, arrays, addresses, [backend] * len(names))
        return leaves

    def _add_own(self, array: Any, backend: ArrayBackend, facts: Facts, row: int, path: str) -> str:
        """Returns the leaf of an array of this worker alone."""
        if row in facts.problems:
            facts.check(row, path)
        spec, key, sharing, columns = facts.specs[row], facts.keys[row], self.sharing, self._columns
        is_met = key in self._known.firsts
        memory = (backend.name, facts.memory(row)) if is_met else None
        known = self._known.find(key, memory) if is_met else None
        if known is not None and not known.is_own:
            raise _in_both(path, known.leaf)
        if known is None:
            leaf, place, replica = self._unique(path), len(columns.names), len(sharing.replicas)
            known = CapturedLeaf(leaf, range(place, place + 1), range(replica, replica), is_own=True)
            if is_met:
                self._known.note(key, memory, array, known)
            else:
                self._known.firsts[key] = array, known
            self._origins.append((array, (0, ())))
            columns.names.append(leaf)
            columns.specs.append(spec)
            columns.arrays.append(array)
            columns.addresses.append(facts.addresses[row] or None)
            columns.backends.append(backend)
            sharing.note_form(leaf, spec)
        self._noted[id(array)] = known
        return known.leaf

    def _add_shared(
        self, arrays: Sequence[Any], shardings: Sequence[Sharding], path_of: Callable[[int], str]
    ) -> list[Node]:
        """Returns the nodes of arrays that other workers may hold in part or in full."""
        sharing, columns, nodes = self.sharing, self._columns, list[Node]()
        begin = len(columns.names)
        for row, (value, sharding) in enumerate(zip(arrays, shardings, strict=True)):
            path = path_of(row)
            if sharing.scope.is_own and any(local.holders is not None for local in sharding.boxes):
                hint = "A shared array cannot belong to one worker."
                raise unsupported(path, "a sharded array within PerWorker", hint)
            if sharding.is_abstract:
                raise unsupported(path, "a shape without values", "Use it to restore, or put an array in its place.")
            memory = sharding.backend.name, sharding.memory
            known = self._known.find(sharding.key, memory)
            if known is None:
                leaf = self._unique(path)
                first, replica = len(columns.names), len(sharing.replicas)
                for name, spec, array, cutting in sharing.choose(leaf, sharding, path, value):
                    self.names.add(name)
                    self._origins.append((value, cutting))
                    columns.add([name], [spec], [array], [None], [sharding.backend])
                copies = range(replica, len(sharing.replicas))
                known = CapturedLeaf(leaf, range(first, len(columns.names)), copies)
                self._known.note(sharding.key, memory, value, known)
            elif known.is_own:
                raise _in_both(path, known.leaf)
            else:
                sharing.note_alias(path, known.replicas, value)
            self._noted[id(value)] = known
            nodes.append({"$": "array", "k": sharding.backend.name, "v": known.leaf})
        if len(columns.names) > begin:
            columns.addresses[begin:] = find_addresses(columns.backends[begin:], columns.arrays[begin:])
        return nodes

    def _own_name(self, path: str) -> str:
        return f"{path}~w{self.sharing.worker.rank}"

    def _unique(self, path: str) -> str:
        """Takes a name for a leaf: its path, if that is not taken."""
        # What each worker has of its own must not be taken for one leaf.
        name = path = self._own_name(path) if self.sharing.scope.is_own else path
        number = 2
        # Keys such as 1 and "1" give one path. `~2` is not an escape, so no path contains it otherwise.
        while name in self.names:
            self._has_renamed = True
            name = f"{path}~{number}"
            number += 1
        if name == "__metadata__":
            raise unsupported(path, "an array of that name", "The name belongs to the file format; choose another.")
        self.names.add(name)
        self._new.add(name)
        return name

    def find_held(self, arrays: list[Any]) -> set[int]:
        """Returns the leaves whose memory one of the arrays shows in the same form, by number."""
        known = self._known.by_identity()
        found: list[CapturedLeaf | None] = list(map(known.get, map(id, arrays)))
        others = [array for array, written in zip(arrays, found, strict=True) if written is None]
        while others:
            array = others.pop()
            if is_made_of_tensors(type(array)):
                others += [part for _, part in parts_of(array)]
            elif sharder_of_type(type(array)) is not None or backend_of(array) is not None:
                found.append(self._known.find(*self._known.identify(array)))
        return set(chain.from_iterable(map(_places, filter(None, found))))

    def mark(self) -> tuple[int, ...]:
        """Returns what `entries_since` needs to find what was added from now on."""
        self._noted, self._new, self._has_renamed = {}, set(), False
        return (len(self._columns.names), *map(len, self.sharing.lists()))

    def entries_since(self, mark: tuple[int, ...], arrays: Sequence[Any], look: ArrayLook) -> LeafEntries | None:
        """Returns what the arrays of a tree have added; None if one was met before, or is unusual."""
        sharing, columns = self.sharing, self._columns
        first, box, elsewhere, replica, strides, quantizers = mark
        if self._has_renamed or len(sharing.quantizers) > quantizers:
            return None
        written = list(filter(None, map(self._noted.get, map(id, arrays))))
        if len(written) < len(arrays) or not self._new.issuperset(one.leaf for one in written):
            return None
        numbers = dict(zip(map(id, reversed(arrays)), reversed(look.firsts), strict=True))
        held = sharing.replicas[replica:]
        origins = list(_find_origins(self._origins[first:], numbers))
        compared = list(_find_origins((one.origin for one in held), numbers))
        if len(origins) < len(columns.names) - first or len(compared) < len(held):
            return None
        return LeafEntries(
            begins=(first, replica),
            written=written,
            taken=frozenset(self._new.union(columns.names[first:])),
            names=columns.names[first:],
            specs=columns.specs[first:],
            backends=columns.backends[first:],
            numbers=[origin.base for origin in origins],
            cut={number: origin for number, origin in enumerate(origins) if origin.cuts},
            boxes=sharing.boxes[box:],
            elsewhere=sharing.elsewhere[elsewhere:],
            strides=sharing.strides[strides:],
            loose=list(self._new & sharing.loose),
            replicas=[
                (one.record, None if one.held is None else one.held[0], origin)
                for one, origin in zip(held, compared, strict=True)
            ],
        )

    def try_replay(self, entries: LeafEntries, arrays: Sequence[Any], look: ArrayLook) -> bool:
        """Adds such arrays exactly as they were added before; returns False if that would be wrong."""
        if not self.names.isdisjoint(entries.taken) or not self._known.are_new(look.keys):
            return False
        sharing, bases = self.sharing, look.bases
        entries.move((len(self._columns.names), len(sharing.replicas)))
        self._known.enter(look.keys, arrays, entries.written)
        self.names |= entries.taken
        self._origins += [None] * len(entries.names)
        found = list(map(bases.__getitem__, entries.numbers))
        addresses: list[int | None] = list(map(look.addresses.__getitem__, entries.numbers))
        if 0 in addresses:
            addresses = [address or None for address in addresses]
        if entries.cut:
            cut = {number: origin.find(bases) for number, origin in entries.cut.items()}
            those = find_addresses([entries.backends[number] for number in cut], list(cut.values()))
            for (number, array), address in zip(cut.items(), those, strict=True):
                found[number], addresses[number] = array, address
        self._columns.add(entries.names, entries.specs, found, addresses, entries.backends)
        sharing.boxes += entries.boxes
        sharing.elsewhere += entries.elsewhere
        sharing.strides += entries.strides
        sharing.loose.update(entries.loose)
        needs_arrays = sharing.checks_replicas
        sharing.replicas += [
            HeldReplica(record, (backend, origin.find(bases)) if needs_arrays and backend is not None else None, None)
            for record, backend, origin in entries.replicas
        ]
        return True

    def captured(self, skeletons: dict[str, Skeleton], own: Collection[str]) -> Captured:
        """Returns all that was captured; nothing of it is held. `own` names the objects that differ per worker."""
        columns, sharing = self._columns, self.sharing
        return Captured(
            columns.names,
            columns.specs,
            columns.arrays,
            columns.addresses,
            columns.backends,
            skeletons,
            boxes=tuple(sharing.boxes),
            elsewhere=tuple(sharing.elsewhere),
            worker=sharing.worker,
            replicas=tuple(one.record for one in sharing.replicas),
            loose=frozenset(sharing.loose),
            own=frozenset(own),
            compared=tuple(one.held for one in sharing.replicas) if sharing.checks_replicas else (),
            strides=tuple(sharing.strides),
            quantizers=tuple(sharing.quantizers),
        )


def _shift(places: range, by: int) -> range:
    return range(places.start + by, places.stop + by)


def _find_origins(values: Iterable[tuple[Any, Cutting] | None], numbers: dict[int, int]) -> Iterator[LeafOrigin]:
    """Returns the origins of arrays from a tree's, whose first bases have those numbers; fewer if one has another."""
    for one in values:
        first = None if one is None else numbers.get(id(one[0]))
        if one is None or first is None:
            return
        piece, cuts = one[1]
        yield LeafOrigin(first + piece, cuts)


def _in_both(path: str, other: str) -> UnsupportedValueError:
    what = f"an array that is also {other}, one of the two within PerWorker,"
    return unsupported(path, what, "Keep it in only one of the two: a shared array cannot belong to one worker.")
