"""Captures objects as named leaves: plain values at once, arrays are named and stay live until they are copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
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
from holdfast.state.capture_cache import (
    LEAST_PARTS,
    CachedTree,
    CaptureCache,
    TreeParts,
    find_pattern,
    list_branches,
    take,
    try_renew,
)
from holdfast.state.describe import are_nodes, look_at, split_rows
from holdfast.state.leaf_table import LeafTable
from holdfast.state.leaves import (
    Captured,
    versions_of,
)
from holdfast.state.own import Scope, ShardOwnership
from holdfast.state.registry import (
    NodeParts,
    adapter_of,
    backend_of_type,
    find_stateful,
    group_by_library,
    is_code,
    is_made_of_tensors,
    is_per_worker,
    list_members,
    name_live,
    node_parts,
    sharder_of_type,
)


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
            sharing.scope = Scope(holders.get(name, range(worker.world_size)))
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
            sharing.scope = Scope(holders.get(name, range(worker.world_size)))
            trial.encode(obj, escape(name))
        return trial.captured({})


_ANY = Adapter()
_CONTAINERS: Final = frozenset({dict, list})


class _Capturing(Encoder):
    """Encodes values, and adds arrays and objects with state."""

    def __init__(self, context: CaptureContext, captures: CaptureCache | None, sharing: ShardOwnership) -> None:
        super().__init__()
        self._leaves = LeafTable(sharing)
        self._sharing = sharing
        self._context = context
        self._cache = captures
        # Whether it writes what a codec has made.
        self._is_coding = False
        # How many nodes of a framework's trees it is in.
        self._nodes_open = 0
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
        self._left.clear()  # They refer to this: arrays would stay until the next garbage collection.
        own = [name for name, obj in self._context.objects.items() if is_per_worker(obj)]
        return self._leaves.captured(skeletons, own)

    def find_held(self, arrays: list[Any]) -> set[int]:
        """See `LeafTable.find_held`."""
        return self._leaves.find_held(arrays)

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """Returns the node of a value."""
        cls = type(value)
        if (cls is dict or cls is list) and self._cache is not None and not self._leaves.notes_each:
            return self._encode_tree(self._cache, value, path, depth)
        if cls not in ENCODERS and (backend_of_type(cls) or sharder_of_type(cls)):
            return self._leaves.add([value], lambda _: path)[0]
        return super().encode(value, path, depth)

    def parts(self, values: Sequence[Any], path_of: Callable[[int], str], depth: int) -> list[Node]:
        """Returns the nodes of the parts of one container; arrays that follow each other are looked at together."""
        kinds = set(map(type, values))
        if len(kinds) == 1 and are_nodes(next(iter(kinds)), values):
            return list(values)
        are_arrays = {cls: cls not in ENCODERS and (backend_of_type(cls) or sharder_of_type(cls)) for cls in kinds}
        if not any(are_arrays.values()):
            return super().parts(values, path_of, depth)
        nodes: list[Node] = list(values)
        run: list[int] = []
        others = [place for place, value in enumerate(values) if not are_arrays[type(value)]]
        first = 0
        for place in [*others, len(nodes)]:
            run += range(first, place)
            first = place + 1
            cls = type(values[place]) if place < len(nodes) else None
            # Arrays within a container come after those that are before it.
            if run and (cls is None or cls not in ENCODERS):
                arrays, paths = [nodes[at] for at in run], list(map(path_of, run))
                for _, own in group_by_library(arrays):
                    made = self._leaves.add([arrays[row] for row in own], [paths[row] for row in own].__getitem__)
                    for row, node in zip(own, made, strict=True):
                        nodes[run[row]] = node
                run = []
            if cls is not None and cls is not bool:
                nodes[place] = self.encode(values[place], path_of(place), depth)
        return nodes

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
            if not sharing.worker.is_alone and adapter.is_per_worker:
                sharing.scope = outer._replace(is_own=True)
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
        if not take(branch, value, contents) or len(contents.arrays) + len(contents.scalars) < LEAST_PARTS:
            return super().encode(value, path, depth)
        leaves, mark = self._leaves, self._leaves.mark()
        leaves.notes_each = True
        try:
            node = super().encode(value, path, depth)
        finally:
            leaves.notes_each = False
        look = look_at(contents.arrays)
        entries = None if look is None else leaves.entries_since(mark, contents.arrays, look)
        branches = list_branches(branch)
        nested = zip(contents.containers, branches, strict=True)
        written = [self._written.get((id(one), depth + inner.depth)) for one, inner in nested]
        is_whole = len(set(map(id, contents.containers))) == len(contents.containers)
        if look is not None and entries is not None and None not in written and is_whole:
            cache.trees[path] = CachedTree(
                conditions=self._conditions(depth),
                branch=branch,
                depths=[inner.depth for inner in branches],
                scalars=contents.scalars,
                marks=look.marks,
                pattern=find_pattern(look.keys),
                nodes=[one[1] for one in written if one is not None],
                sizes=[one[2] for one in written if one is not None],
                entries=entries,
            )
        return node

    def _try_replay(self, cached: CachedTree, contents: TreeParts, path: str, depth: int) -> Node | None:
        """Adds a tree with such contents exactly as it was captured before; returns None if that would be wrong."""
        containers = contents.containers
        if cached.conditions != self._conditions(depth) or len(set(map(id, containers))) < len(containers):
            return None
        look = look_at(contents.arrays)
        if look is None or look.marks != cached.marks or find_pattern(look.keys) != cached.pattern:
            return None
        nodes = try_renew(cached, contents)
        if nodes is None or not self._leaves.try_replay(cached.entries, contents.arrays, look):
            return None
        self.count(cached.sizes[0], path)
        cached.scalars, cached.nodes = contents.scalars, nodes
        keys = zip(map(id, containers), (depth + inner for inner in cached.depths), strict=True)
        self._written.update(zip(keys, zip(containers, nodes, cached.sizes, strict=True), strict=True))
        return nodes[0]

    def _conditions(self, depth: int) -> tuple[object, ...]:
        """Returns the conditions on which the capture of a tree depends, besides the tree."""
        return depth, self._sharing.worker, self._sharing.scope

    def encode_list(self, value: Collection[Any], path: str, depth: int) -> list[Node]:
        """See `Encoder`. The rows of a long sequence, such as a replay buffer's, are encoded all at once."""
        if len(value) < LEAST_PARTS or self._leaves.notes_each or depth >= MAX_DEPTH:
            return super().encode_list(value, path, depth)
        rows = split_rows(value)
        self.count(rows.total, path)
        return rows.join(self.parts(rows.values, rows.name_paths(path), depth + rows.depth))


class _Trial(_Capturing):
    """Encodes what can be read without a change to any object, to check whether that is possible."""

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """Like a capture; an object that is skipped gets an empty node."""
        is_left_out = (adapter_of(value) or _ANY).readable(value) is not Readable.ALWAYS
        return "" if is_left_out and not self._is_coding else super().special(value, path, depth)
