"""Captures objects as named leaves: plain values at once, arrays are named and stay live until they are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice, repeat
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, Final

from msgspec.structs import replace

from holdfast.errors import HoldfastError, UnsupportedValueError
from holdfast.format.codecs import name_of
from holdfast.format.encoding import MAX_DEPTH, Encoder, escape, unsupported
from holdfast.format.records import ALONE, Worker
from holdfast.format.scalars import ENCODERS, Node, tagged
from holdfast.process.latch import gc_paused
from holdfast.state.adapters import Adapter, CaptureContext, Readable
from holdfast.state.array_look import look_at, split_rows
from holdfast.state.capture_cache import (
    LEAST_PARTS,
    CachedTree,
    CaptureCache,
    TreeParts,
    TreeShape,
    find_origins,
    find_pattern,
    list_branches,
    take,
    try_renew,
)
from holdfast.state.leaves import ArrayBackend, ArraySpec, Captured, Cutting, Sharding, versions_of
from holdfast.state.registry import (
    NodeParts,
    adapter_of,
    backend_of_type,
    find_stateful,
    is_code,
    is_made_of_tensors,
    is_per_worker,
    list_members,
    name_live,
    node_parts,
    sharder_of_type,
)
from holdfast.state.shard_ownership import CapturedLeaf, KnownArrays, ShardOwnership


def capture_objects(
    objects: Mapping[str, object],
    captures: CaptureCache | None = None,
    hold: Callable[[object, Adapter], bool] | None = None,
    worker: Worker = ALONE,
    check_replicas: bool = False,
    holders: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Captured:
    """Captures the state of all objects as it is now; in a job of several workers, the part that this worker writes.

    First `prepare_for_checkpoint` is called on every object that has it, also on those within dicts, lists, tuples and
    dataclasses, then the states are read. Plain values are written down at once; later changes to them are not
    captured. Arrays are only named: copy them before they change. Random generators are read last, since reading other
    objects may draw. With several workers these are read in the order of their paths: some can only be read together.

    Args:
        objects: The objects by name.
        captures: The results of earlier captures of the same objects, or None to look at each leaf again.
        hold: Called for each object with an adapter; returns True if its next step will wait. Then the arrays that
            nothing but that step changes are noted as held.
        worker: This worker.
        check_replicas: True to note the arrays that other workers hold too, so that they can be compared.
        holders: The ranks of the workers that have an object, for objects that not all workers have.

    Raises:
        UnsupportedValueError: If something cannot be stored; the error has its path.
    """
    with gc_paused():
        for name, root in objects.items():
            for path, obj, adapter in find_stateful(root, escape(name)):
                (adapter or _ANY).check(obj, path)
                (adapter or _ANY).prepare(obj)
        context = CaptureContext(objects, list_members)
        sharing = ShardOwnership(
            worker, check_replicas=check_replicas, groups=None if captures is None else captures.groups
        )
        capturing = _Capturing(context, captures, sharing)
        if not worker.is_alone:
            capturing.read_in_order()
        skeletons: dict[str, Node] = {}
        for name, obj in objects.items():
            sharing.holders = holders.get(name, range(worker.world_size))
            skeletons[name] = capturing.encode(obj, escape(name))
        stepped: list[Any] = []
        for _, obj in context.members if hold is not None else ():
            adapter = adapter_of(obj)
            if hold is not None and adapter is not None and hold(obj, adapter):
                stepped += adapter.stepped_arrays(obj)
        captured = capturing.captured(skeletons)
        return replace(captured, held=versions_of(captured, capturing.find_held(stepped))) if stepped else captured


def check_capture(
    objects: Mapping[str, object], captures: CaptureCache, worker: Worker, holders: Mapping[str, Sequence[int]]
) -> Captured:
    """Checks that `capture_objects` can capture the objects, as far as that shows without changing them.

    Nothing is prepared. An object is skipped if reading its state may change it, or if it is not ready to be read yet,
    such as a lazy module without its shapes.

    Args:
        objects: The objects by name.
        captures: As in `capture_objects`, which is quicker after this.
        worker: As there.
        holders: As there.

    Returns:
        What was captured of the others; `UnsupportedValueError` if something cannot be stored.
    """
    with gc_paused():
        sharing = ShardOwnership(worker, groups=captures.groups)
        trial = _Trial(CaptureContext(objects, list_members), captures, sharing)
        for name, obj in objects.items():
            sharing.holders = holders.get(name, range(worker.world_size))
            trial.encode(obj, escape(name))
        return trial.captured({})


_ANY = Adapter()
_arrays: Final = attrgetter("arrays")
_CONTAINERS: Final = frozenset({dict, list})


class _Capturing(Encoder):
    """Encodes values, and adds arrays and objects with state."""

    def __init__(self, context: CaptureContext, captures: CaptureCache | None, sharing: ShardOwnership) -> None:
        super().__init__()
        self._sharing = sharing
        self._context = context
        self._cache = captures
        self._columns = Captured([], [], [], [], [], {})
        self._backends: dict[type, ArrayBackend] = {}
        self._names: set[str] = set()
        self._known = KnownArrays(sharing.worker)
        # Whether it writes what a codec has made.
        self._is_coding = False
        # How many nodes of a framework's trees it is in.
        self._nodes_open = 0
        # For each leaf's array its origin: an array within a tree, and which part of it.
        self._origins: list[tuple[Any, Cutting] | None] = []
        # For each replica the array within a tree.
        self._replicated: list[Any] = []
        # Whether the tree that it is in is to be remembered as a whole, and whether a name was taken already.
        self._is_remembering = False
        self._has_renamed = False
        # By the identity of an object, its state that was read ahead; and what is left to encode at the end.
        self._states: dict[int, Any] = {}
        self._left: list[Callable[[], None]] = []

    def read_in_order(self) -> None:
        """Reads the states of the objects that are not read last, in the order of their paths."""
        for path, value in sorted(self._context.members, key=itemgetter(0)):
            adapter = adapter_of(value)
            if adapter is not None and not adapter.last and id(value) not in self._states:
                self._states[id(value)] = self._state_of(value, adapter, path)

    def captured(self, skeletons: dict[str, Node]) -> Captured:
        """Encodes what was left to the end, and returns all that was captured; nothing of it is held."""
        for encode in self._left:
            encode()
        columns = self._columns
        sharing = self._sharing
        return Captured(
            columns.names,
            columns.specs,
            columns.arrays,
            columns.addresses,
            columns.backends,
            skeletons,
            {},
            tuple(sharing.boxes),
            tuple(sharing.elsewhere),
            sharing.worker,
            tuple(sharing.replicas),
            loose=frozenset(sharing.loose),
            own=frozenset(name for name, obj in self._context.objects.items() if is_per_worker(obj)),
            compared=tuple(sharing.compared) if sharing.checks_replicas else (),
            strides=tuple(sharing.strides),
            quantizers=tuple(sharing.quantizers),
        )

    def find_held(self, arrays: list[Any]) -> set[int]:
        """See `KnownArrays.find_held`."""
        return self._known.find_held(arrays)

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """Returns the node of a value; arrays are handled first, because there may be very many."""
        cls = type(value)
        backend = self._backends.get(cls)
        if backend is None:
            sharing = self._sharing
            if (cls is dict or cls is list) and self._cache is not None and not self._is_remembering:
                return self._encode_tree(self._cache, value, path, depth)
            if cls in ENCODERS:
                return super().encode(value, path, depth)
            sharder = sharder_of_type(cls)
            if sharder is not None:
                return self._encode_shared(value, sharder.look(value, path, sharing.worker), path)
            backend = backend_of_type(cls)
            if backend is None:
                return super().encode(value, path, depth)
            if sharing.worker.is_alone:
                self._backends[cls] = backend
            elif not sharing.is_own:
                return self._encode_shared(value, sharing.look(value, backend, path), path)
        return {"$": "array", "k": backend.name, "v": self._leaf(value, backend, path)}

    def _encode_shared(self, value: Any, sharding: Sharding, path: str) -> Node:
        """Returns the node of an array that other workers may hold in part or in full."""
        sharing = self._sharing
        if sharing.is_own and any(local.holders is not None for local in sharding.boxes):
            raise unsupported(path, "a sharded array within PerWorker", "A shared array cannot belong to one worker.")
        if sharding.is_abstract:
            raise unsupported(path, "a shape without values", "Use it to restore, or put an array in its place.")
        backend = sharding.backend
        known = self._known.find(value, (backend.name, sharding.memory))
        if known is None:
            leaf = self._unique(path)
            self._names.add(leaf)
            first, replica = len(self._columns.names), len(sharing.replicas)
            for name, spec, array, cutting in sharing.choose(leaf, sharding, path):
                self._add(name, spec, array, backend.address(array), backend, (value, cutting))
            written = CapturedLeaf(leaf, range(first, len(self._columns.names)), range(replica, len(sharing.replicas)))
            self._known.leaves[backend.name, sharding.memory] = known = written
        elif known.is_own:
            raise _in_both(path, known.leaf)
        else:
            sharing.note_alias(path, known.replicas)
        self._known.note(value, known)
        self._replicated += [value] * (len(sharing.replicas) - len(self._replicated))
        return {"$": "array", "k": backend.name, "v": known.leaf}

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """Returns the node of an object with state."""
        adapter = adapter_of(value)
        if adapter is not None and self._is_coding:
            raise unsupported(
                path,
                f"an object with state ({type(value).__qualname__}) in a codec's result",
                "Let the codec return the object's state, or give the outer object state_dict and load_state_dict.",
            )
        if adapter is None:
            if is_made_of_tensors(type(value)):
                return self._encode_subclass(value, path, depth)
            node = None if self._is_coding else node_parts(value)
            return None if node is None else self._encode_node(type(value), node, path, depth)
        sharing = self._sharing
        outer = sharing.scope
        node = tagged("object", None, adapter.kind)

        def encode() -> None:
            within, sharing.scope = sharing.scope, outer
            if not sharing.worker.is_alone:
                sharing.is_own = sharing.is_own or adapter.is_per_worker
            try:
                is_read = id(value) in self._states
                state = self._states.pop(id(value)) if is_read else self._state_of(value, adapter, path)
                if not sharing.worker.is_alone:
                    # Only now: to be asked for its state may change how an object holds it.
                    sharing.enter(adapter.replication_of(value), path)
                node["v"] = self.encode_apart(state, path, depth)
            finally:
                sharing.scope = within

        if adapter.last:
            self._left.append(encode)
        else:
            encode()
        return node

    def of_program(self, cls: type, value: Any, path: str, depth: int) -> Node | None:
        """Like plain values; a function in a framework's tree node belongs to the program."""
        node = super().of_program(cls, value, path, depth)
        return tagged("live", name_live(value)) if node is None and self._nodes_open and is_code(value) else node

    def coded(self, made: Any, path: str, depth: int) -> Node:
        """Returns the node of a codec's result, with leaves for the arrays in it."""
        outer, self._is_coding = self._is_coding, True
        try:
            return self.encode_apart(made, path, depth)
        finally:
            self._is_coding = outer

    def _encode_node(self, cls: type, node: NodeParts, path: str, depth: int) -> Node:
        """Returns the node of a value that its framework takes apart; functions in it belong to the program."""
        self.count(len(node.parts), path)
        self._nodes_open += 1
        try:
            # Its parts may be made for this, and be gone when the next ones are.
            parts = {
                name: self.encode_apart(part, f"{path}/{escape(name)}", depth) for name, part in node.parts.items()
            }
        finally:
            self._nodes_open -= 1
        return tagged("pytree", parts, name_of(cls))

    def _encode_subclass(self, value: Any, path: str, depth: int) -> Node:
        """Returns the node of a tensor that consists of other tensors, each of which has a leaf."""
        cls = type(value)
        shape, strides = list(value.shape), list(value.stride())
        if any(type(number) is not int for number in (*shape, *strides)):
            what = f"a tensor of type {cls.__module__}.{cls.__qualname__}, whose shape does not consist of numbers,"
            raise unsupported(path, what, "Store the plain tensors that it consists of.")
        names, context = value.__tensor_flatten__()
        self.count(len(names) + len(shape) + len(strides), path)
        tensors = {name: self.encode(getattr(value, name), f"{path}/{escape(name)}", depth) for name in names}
        node = self.plain().encode(context, path, depth)
        payload = {"tensors": tensors, "context": node, "shape": shape, "strides": strides}
        return tagged("tensor_subclass", payload, name_of(cls))

    def _state_of(self, value: Any, adapter: Adapter, path: str) -> Any:
        try:
            return adapter.state_of(value, self._context)
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:
            raise UnsupportedValueError(
                f"{path}: the state of {type(value).__qualname__} could not be read: {error!r}",
                path=path,
                hint="See the cause above: it was raised by the object itself.",
            ) from error

    def _encode_tree(self, cache: CaptureCache, value: Any, path: str, depth: int) -> Node:
        """Returns the node of a dict or a list: the cached one if all is unchanged; else caches it, if possible."""
        parts = value.values() if type(value) is dict else value
        is_small = len(value) < LEAST_PARTS and _CONTAINERS.isdisjoint(map(type, parts))
        if is_small or (id(value), depth) in self._written or depth > MAX_DEPTH:
            return super().encode(value, path, depth)
        found = cache.try_take(path, value)
        node = None if found is None else self._try_replay(*found, path, depth)
        if node is not None:
            return node
        branch = cache.try_plan(path, value, depth)
        if branch is None:
            return super().encode(value, path, depth)
        contents = TreeParts()
        self._is_remembering = True
        try:
            if not take(branch, value, contents) or len(contents.arrays) + len(contents.scalars) < LEAST_PARTS:
                return super().encode(value, path, depth)
            recording = _Recording(self, cache, branch, contents)
            node = super().encode(value, path, depth)
            recording.keep(path, depth)
        finally:
            self._is_remembering = False
        return node

    def _try_replay(self, cached: CachedTree, contents: TreeParts, path: str, depth: int) -> Node | None:
        """Adds a tree with such contents exactly as it was captured before; returns None if that would be wrong."""
        sharing, columns = self._sharing, self._columns
        containers = contents.containers
        if cached.context != self._conditions(depth) or len(set(map(id, containers))) < len(containers):
            return None
        look = look_at(contents.arrays)
        if look is None or look.marks != cached.marks or find_pattern(look.keys) != cached.pattern:
            return None
        if not self._names.isdisjoint(cached.taken) or not self._known.are_new(look.keys):
            return None
        nodes = try_renew(cached, contents)
        if nodes is None:
            return None
        self.count(cached.sizes[0], path)
        cached.scalars, cached.nodes = contents.scalars, nodes
        self._known.take(contents.arrays, cached.written_from(len(columns.names), len(sharing.replicas)), look.keys)
        self._names |= cached.taken
        self._origins += [None] * len(cached.names)
        self._replicated += [None] * len(cached.replicas)
        arrays, addresses = cached.find_arrays(look)
        columns.add(cached.names, cached.specs, arrays, addresses, cached.backends)
        cached.add_to(sharing, look)
        keys = zip(map(id, containers), (depth + inner for inner in cached.depths), strict=True)
        self._written.update(zip(keys, zip(containers, nodes, cached.sizes, strict=True), strict=True))
        return nodes[0]

    def _conditions(self, depth: int) -> tuple[object, ...]:
        """Returns the conditions on which the capture of a tree depends, besides the tree."""
        of = self._sharing
        return depth, of.worker, of.is_own, of.holders, of.is_trained, of.trained, of.renewed

    def encode_list(self, value: Collection[Any], path: str, depth: int) -> list[Node]:
        """See `Encoder`. The rows of a long sequence, such as a replay buffer's, are encoded all at once."""
        is_shared = not (self._sharing.worker.is_alone or self._sharing.is_own)
        if len(value) < LEAST_PARTS or is_shared or self._is_remembering or depth >= MAX_DEPTH:
            return super().encode_list(value, path, depth)
        rows = split_rows(value)
        self.count(rows.total, path)
        paths, nodes = rows.list_paths(path), rows.values.copy()
        for cls, places, values in rows.list_groups():
            backend = None if cls in ENCODERS or sharder_of_type(cls) is not None else backend_of_type(cls)
            at = list(map(paths.__getitem__, places))
            leaves = None if backend is None else self._try_leaves(values, backend, at)
            if backend is None or leaves is None:
                for place, one in zip(places, values, strict=True):
                    nodes[place] = self.encode(one, paths[place], depth + rows.depth)
                continue
            for place, leaf in zip(places, leaves, strict=True):
                nodes[place] = {"$": "array", "k": backend.name, "v": leaf}
        return rows.join(nodes)

    def _leaf(self, array: Any, backend: ArrayBackend, path: str) -> str:
        """Returns the leaf of an array."""
        spec, memory = backend.spec(array, path), (backend.name, backend.alias_key(array))
        known = self._known.find(array, memory)
        if known is not None and not known.is_own:
            raise _in_both(path, known.leaf)
        if known is None:
            leaf = self._unique(path)
            place, replica = len(self._columns.names), len(self._sharing.replicas)
            known = CapturedLeaf(leaf, range(place, place + 1), range(replica, replica), is_own=True)
            self._known.leaves[memory] = known
            self._add(leaf, spec, array, backend.address(array), backend, (array, (0, ())))
            self._sharing.note_form(leaf, spec)
        self._known.note(array, known)
        return known.leaf

    def _try_leaves(self, arrays: Sequence[Any], backend: ArrayBackend, paths: Sequence[str]) -> Sequence[str] | None:
        """Does what `_leaf` does for many arrays; returns None if one is not plain, or a name or memory was met
        before."""
        facts = backend.describe(arrays)
        leaves = names = list(map(self._own_name, paths)) if self._sharing.is_own else paths
        if facts.problems or facts.forms or 0 in facts.addresses:
            return None
        if not self._names.isdisjoint(names) or not self._known.are_new(facts.keys):
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
        columns, replica = self._columns, len(self._sharing.replicas)
        places = range(len(columns.names), len(columns.names) + len(names))
        ranges = map(range, places, range(places.start + 1, places.stop + 1))
        written = map(CapturedLeaf, names, ranges, repeat(range(replica, replica)), repeat(True))
        self._known.take(arrays, list(written), addresses)
        self._names.update(names)
        self._origins += [None] * len(names)
        columns.add(names, specs, arrays, addresses, [backend] * len(names))
        return leaves

    def _own_name(self, path: str) -> str:
        return f"{path}~w{self._sharing.worker.rank}"

    def _unique(self, path: str) -> str:
        """Returns a leaf's name: its path, if that is not taken."""
        # What each worker has of its own must not be taken for one leaf.
        name = path = self._own_name(path) if self._sharing.is_own else path
        number = 2
        # Keys such as 1 and "1" give one path. `~2` is not an escape, so no path contains it otherwise.
        while name in self._names:
            self._has_renamed = True
            name = f"{path}~{number}"
            number += 1
        if name == "__metadata__":
            raise unsupported(path, "an array of that name", "The name belongs to the file format; choose another.")
        return name

    def _add(
        self,
        name: str,
        spec: ArraySpec,
        array: Any,
        address: int | None,
        backend: ArrayBackend,
        origin: tuple[Any, Cutting],
    ) -> None:
        self._names.add(name)
        self._origins.append(origin)
        columns = self._columns
        columns.names.append(name)
        columns.specs.append(spec)
        columns.arrays.append(array)
        columns.addresses.append(address)
        columns.backends.append(backend)


class _Recording:
    """Remembers a tree, together with everything that its capture adds from the creation of this object to `keep`."""

    def __init__(self, capturing: _Capturing, cache: CaptureCache, branch: TreeShape, contents: TreeParts) -> None:
        self._capturing, self._cache = capturing, cache
        self._branch, self._contents = branch, contents
        self._before = self._count()
        capturing._has_renamed = False

    def _count(self) -> list[int]:
        capturing = self._capturing
        return list(map(len, (capturing._columns.names, capturing._known.leaves, *capturing._sharing.lists())))

    def keep(self, path: str, depth: int) -> None:
        """Remembers it, unless a part of it was met before, or is unusual."""
        capturing, contents, branch = self._capturing, self._contents, self._branch
        sharing, columns = capturing._sharing, capturing._columns
        first, first_leaf, box, elsewhere, replica, strides, quantizers = self._before
        look = look_at(contents.arrays)
        if look is None or capturing._has_renamed or len(sharing.quantizers) > quantizers:
            return
        branches = list_branches(branch)
        nested = zip(contents.containers, branches, strict=True)
        found = [capturing._written.get((id(value), depth + inner.depth)) for value, inner in nested]
        looked_at = [capturing._known.looked_at.get(id(array)) for array in contents.arrays]
        written = [one[1] for one in looked_at if one is not None]
        leaves = {one.leaf for one in islice(capturing._known.leaves.values(), first_leaf, None)}
        firsts = look.list_firsts()
        origins = find_origins(capturing._origins[first:], contents.arrays, firsts)
        replicated = zip(capturing._replicated[replica:], sharing.cuttings[replica:], strict=True)
        compared = find_origins(replicated, contents.arrays, firsts)
        is_whole = len(set(map(id, contents.containers))) == len(contents.containers)
        if not is_whole or None in looked_at or None in found or origins is None or compared is None:
            return
        if not leaves.issuperset(one.leaf for one in written):
            return
        kinds = [None if one is None else one[0] for one in sharing.compared[replica:]]
        addresses = columns.addresses[first:]
        self._cache.trees[path] = CachedTree(
            context=capturing._conditions(depth),
            branch=branch,
            depths=[inner.depth for inner in branches],
            scalars=contents.scalars,
            marks=look.marks,
            pattern=find_pattern(look.keys),
            begins=(first, replica),
            written=written,
            taken=frozenset(leaves.union(columns.names[first:])),
            names=columns.names[first:],
            specs=columns.specs[first:],
            backends=columns.backends[first:],
            numbers=[origin.base for origin in origins],
            cut={number: origin for number, origin in enumerate(origins) if origin.cuts},
            has_address=None if None not in addresses else [address is not None for address in addresses],
            boxes=sharing.boxes[box:],
            elsewhere=sharing.elsewhere[elsewhere:],
            replicas=sharing.replicas[replica:],
            strides=sharing.strides[strides:],
            loose=[leaf for leaf in leaves if leaf in sharing.loose],
            compared=[None if kind is None else (kind, one) for kind, one in zip(kinds, compared, strict=True)],
            nodes=[one[1] for one in found if one is not None],
            sizes=[one[2] for one in found if one is not None],
        )


class _Trial(_Capturing):
    """Encodes what can be read without a change to any object, to check whether that is possible."""

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """Like a capture; an object that is skipped gets an empty node."""
        is_left_out = (adapter_of(value) or _ANY).readable(value) is not Readable.ALWAYS
        return "" if is_left_out and not self._is_coding else super().special(value, path, depth)


def _in_both(path: str, other: str) -> UnsupportedValueError:
    what = f"an array that is also {other}, one of the two within PerWorker,"
    return unsupported(path, what, "Keep it in only one of the two: a shared array cannot belong to one worker.")
