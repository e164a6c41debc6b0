"""Objects to named leaves: plain values are taken at once, arrays are named and stay live until they are copied."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from holdfast.errors import HoldfastError, UnsupportedValueError
from holdfast.format.codecs import name_of
from holdfast.format.encoding import MAX_DEPTH, Encoder, escape, unsupported
from holdfast.format.records import ALONE, Worker
from holdfast.format.scalars import ENCODERS, Node, tagged
from holdfast.state.adapters import Adapter, CaptureContext, Readable
from holdfast.state.leaves import ArrayBackend, ArraySpec, Captured, Sharding
from holdfast.state.registry import (
    NodeParts,
    adapter_of,
    backend_of,
    backend_of_type,
    find_stateful,
    is_made_of_tensors,
    list_members,
    node_parts,
    parts_of,
    sharder_of_type,
)
from holdfast.state.shard_ownership import ShardOwnership

LEAST_ARRAYS: Final = 32
"""Smaller containers are looked at array by array, which takes no longer."""


class CachedContainer(msgspec.Struct, frozen=True):
    """A container of nothing but arrays of one library, as it looked when its state was last taken.

    It is a dict or a list of arrays, or of dicts of arrays, as optimizers have for each parameter. It holds none of the
    arrays, so it keeps nothing alive.

    Attributes:
        keys: Its keys, as `keys_of` gives them.
        count: How many values it has, those of its dicts among them.
        types: The arrays' classes.
        backend: Their library.
        fingerprint: What `ArrayBackend.fingerprint` said of them.
        names: Their leaves' names.
        specs: What they are.
        addresses: Where they lie.
        memories: What tells their memory from any other.
        node: What the container was written as.
    """

    keys: object
    count: int
    types: frozenset[type]
    backend: ArrayBackend
    fingerprint: object
    names: list[str]
    specs: list[ArraySpec]
    addresses: list[int]
    memories: list[Hashable]
    node: Node

    def try_arrays(self, container: dict[Any, Any] | list[Any]) -> list[Any] | None:
        """The arrays of a container that looks just like this one did, or None."""
        if keys_of(container) != self.keys:
            return None
        arrays = arrays_of(container)
        if not self.types.issuperset(map(type, arrays)) or try_fingerprint(self.backend, arrays) != self.fingerprint:
            return None
        return arrays


def keys_of(container: dict[Any, Any] | list[Any]) -> object:
    """**Pure.** What a container's parts are called, and those of the dicts in it: equal for two only if all are."""
    outer = list(container) if isinstance(container, dict) else len(container)
    parts = _parts_of(container)
    if dict not in set(map(type, parts)):
        return outer
    return outer, [list(part) if type(part) is dict else None for part in parts]


def arrays_of(container: dict[Any, Any] | list[Any]) -> list[Any]:
    """**Pure.** The parts of a container; where one is a dict, its parts."""
    parts = _parts_of(container)
    if dict not in set(map(type, parts)):
        return list(parts)
    return [leaf for part in parts for leaf in (part.values() if type(part) is dict else (part,))]


def dicts_in(container: dict[Any, Any] | list[Any], node: Node) -> Iterator[Node]:
    """**Pure.** The nodes of the dicts in a container, whose own node is given."""
    nodes = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (own for part, own in zip(_parts_of(container), nodes, strict=True) if type(part) is dict)


def _parts_of(container: dict[Any, Any] | list[Any]) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container


def try_fingerprint(backend: ArrayBackend, arrays: Sequence[Any]) -> object:
    """What the library says of the arrays, or None where it has nothing to say."""
    try:
        return backend.fingerprint(arrays)
    except Exception:  # noqa: BLE001  Whatever is wrong with an array comes out when it is looked at by itself.
        return None


CaptureCache: TypeAlias = dict[str, CachedContainer]
"""By path, the long containers of the objects that are captured again and again, as they looked at the last capture."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the collector where many small objects are made at once, all of which stay.

    Each would bring it nearer to looking through the whole process while training waits: with 20,000 arrays that
    doubles the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_objects(
    objects: Mapping[str, object],
    captures: CaptureCache | None = None,
    hold: Callable[[object, Adapter], bool] | None = None,
    worker: Worker = ALONE,
    check_replicas: bool = False,
    holders: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Captured:
    """Takes the state of all objects, as it is now; of a job of several workers, what this one writes of it.

    First `prepare_for_checkpoint` is called on every object that has it, also on those within dicts, lists, tuples
    and dataclasses, then the states are read. Plain values are written down at once; later changes to them are not
    seen. Arrays are only named: copy them before anything changes them.

    Args:
        objects: The objects by name.
        captures: What earlier captures of the same objects have left.
        hold: Asked for each object with an adapter whether its next step will wait; then the arrays that nothing but
            that step changes are noted as held.
        worker: Which worker this is.
        check_replicas: Whether to note the arrays that other workers hold too, so that they can be compared.
        holders: The ranks of the workers that have an object, of those that not all have.

    Raises:
        UnsupportedValueError: If something cannot be stored; its path says where it stands.
    """
    with gc_paused():
        for name, root in objects.items():
            for path, obj, adapter in find_stateful(root, escape(name)):
                (adapter or _ANY).check(obj, path)
                (adapter or _ANY).prepare(obj)
        context = CaptureContext(objects, list_members)
        sharing = ShardOwnership(worker, check_replicas=check_replicas)
        capturing = _Capturing(context, {} if captures is None else captures, sharing)
        skeletons: dict[str, Node] = {}
        for name, obj in objects.items():
            sharing.holders = holders.get(name, range(worker.world_size))
            skeletons[name] = capturing.encode(obj, escape(name))
        for _, obj in context.members if hold is not None else ():
            adapter = adapter_of(obj)
            if hold is not None and adapter is not None and hold(obj, adapter):
                capturing.note_held(adapter.stepped_arrays(obj))
        return capturing.captured(skeletons)


def check_capture(
    objects: Mapping[str, object], captures: CaptureCache, worker: Worker, holders: Mapping[str, Sequence[int]]
) -> None:
    """Makes sure that `capture_objects` can take the state of the objects, as far as that shows without changing them.

    Nothing is prepared. An object is left out if reading its state may change it, or if it is not ready to be read yet,
    such as a lazy module without its shapes.

    Args:
        objects: The objects by name.
        captures: As for `capture_objects`, which is quicker after this.
        worker: As there.
        holders: As there.

    Raises:
        UnsupportedValueError: If something cannot be stored.
    """
    with gc_paused():
        sharing = ShardOwnership(worker)
        trial = _Trial(CaptureContext(objects, list_members), captures, sharing)
        for name, obj in objects.items():
            sharing.holders = holders.get(name, range(worker.world_size))
            trial.encode(obj, escape(name))


def check_objects(objects: Mapping[str, object]) -> None:
    """Makes sure that no object is a wrapper whose state on each worker is another part, which nothing in it says.

    Raises:
        UnsupportedValueError: If one is; it says what to use in its place.
    """
    for name, root in objects.items():
        for path, obj, adapter in find_stateful(root, escape(name)):
            (adapter or _ANY).check(obj, path)


_ANY = Adapter()


class _Shared(NamedTuple):
    """A leaf of which other workers may have a part, or all: its name, and the places of its arrays, and replicas."""

    name: str
    written: range
    replicas: range


class _Capturing(Encoder):
    """Encodes values, and adds arrays and objects with state."""

    def __init__(self, context: CaptureContext, captures: CaptureCache, sharing: ShardOwnership) -> None:
        super().__init__()
        self._sharing = sharing
        # By library and memory: a leaf that is not simply one array.
        self._shared: dict[Hashable, _Shared] = {}
        # The places of what is held.
        self._held: set[int] = set()
        # What was looked at: another array might get the identity of one that is gone.
        self._kept: list[Sharding] = []
        self._context = context
        self._cache = captures
        self._columns = Captured([], [], [], [], [], {})
        self._backends: dict[type, ArrayBackend] = {}
        self._names: set[str] = set()
        # Whether it writes what a codec has made.
        self._is_coding = False
        # How many nodes of a framework's trees it is in.
        self._nodes_open = 0
        # By library: for each memory, the place of its leaf in the columns.
        self._by_memory: dict[str, dict[Hashable, int]] = {}
        self._memories: list[Hashable] = []
        self._addresses: set[int | None] = set()
        # Containers that were taken whole and are not in `_by_memory` yet, each with the place of its first leaf.
        self._unindexed: list[tuple[int, CachedContainer]] = []

    def captured(self, skeletons: dict[str, Node]) -> Captured:
        """All that was taken."""
        columns = self._columns
        sharing = self._sharing
        return Captured(
            columns.names,
            columns.specs,
            columns.arrays,
            columns.addresses,
            columns.backends,
            skeletons,
            frozenset(self._held),
            tuple(sharing.boxes),
            tuple(sharing.elsewhere),
            sharing.worker,
            tuple(sharing.replicas),
            loose=frozenset(sharing.loose),
            own=frozenset(name for name, obj in self._context.objects.items() if _is_own(obj)),
            compared=tuple(sharing.compared),
            strides=tuple(sharing.strides),
            quantizers=tuple(sharing.quantizers),
        )

    def note_held(self, arrays: list[Any]) -> None:
        """Those leaves are held whose memory one of the arrays shows, as the leaf shows it."""
        for array in arrays:
            if is_made_of_tensors(type(array)):
                self.note_held([part for _, part in parts_of(array)])
                continue
            sharder, backend = sharder_of_type(type(array)), backend_of(array)
            if sharder is not None:
                look = sharder.look(array, "", self._sharing.worker)
                self._hold(self._shared.get((look.backend.name, look.memory)))
            elif backend is not None:
                memory = backend.alias_key(array)
                place = self._find_place(backend, memory, backend.address(array))
                if place is not None:
                    self._held.add(place)
                else:
                    self._hold(self._shared.get((backend.name, memory)))

    def _hold(self, shared: _Shared | None) -> None:
        if shared is not None:
            self._held.update(shared.written)

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """The node of a value; arrays are looked for first, since there may be very many."""
        cls = type(value)
        backend = self._backends.get(cls)
        if backend is None:
            sharing = self._sharing
            is_long = (cls is dict or cls is list) and len(value) >= LEAST_ARRAYS
            if is_long and depth <= MAX_DEPTH and sharing.worker.is_alone:
                return self._encode_long(value, path, depth)
            if cls in ENCODERS:
                return super().encode(value, path, depth)
            sharder = sharder_of_type(cls)
            if sharder is not None:
                return self._encode_shared(sharder.look(value, path, sharing.worker), path)
            backend = backend_of_type(cls)
            if backend is None:
                return super().encode(value, path, depth)
            if sharing.worker.is_alone:
                self._backends[cls] = backend
            elif not sharing.is_own:
                return self._encode_shared(sharing.look(value, backend, path), path)
        return {"$": "array", "k": backend.name, "v": self._leaf(value, backend, path)}

    def _encode_shared(self, sharding: Sharding, path: str) -> Node:
        """The node of an array of which other workers may have a part, or all."""
        if self._sharing.is_own and any(local.holders is not None for local in sharding.boxes):
            raise unsupported(path, "a sharded array within PerWorker", "What workers share is no worker's own.")
        if sharding.is_abstract:
            raise unsupported(path, "a shape without values", "Restore into it, or put an array there.")
        backend = sharding.backend
        known = self._shared.get((backend.name, sharding.memory))
        if known is None:
            own = self._by_memory.get(backend.name, {}).get(sharding.memory)
            if own is not None:
                raise _in_both(path, self._columns.names[own])
            leaf = self._unique(path)
            self._names.add(leaf)
            self._kept.append(sharding)
            first, replica = len(self._columns.names), len(self._sharing.replicas)
            for name, spec, array in self._sharing.choose(leaf, sharding, path):
                self._add(name, spec, array, backend.address(array), backend, sharding.memory)
            written = range(first, len(self._columns.names))
            known = _Shared(leaf, written, range(replica, len(self._sharing.replicas)))
            self._shared[(backend.name, sharding.memory)] = known
        else:
            self._sharing.note_alias(path, known.replicas)
        return {"$": "array", "k": backend.name, "v": known.name}

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """The node of an object with state."""
        adapter = adapter_of(value)
        if adapter is not None and self._is_coding:
            raise unsupported(
                path,
                f"an object with state ({type(value).__qualname__}) in what a codec made",
                "Let the codec return the object's state, or give the outer object state_dict and load_state_dict.",
            )
        if adapter is None:
            if is_made_of_tensors(type(value)):
                return self._encode_subclass(value, path, depth)
            node = None if self._is_coding else node_parts(value)
            return None if node is None else self._encode_node(type(value), node, path, depth)
        sharing = self._sharing
        outer = (sharing.is_own, sharing.holders, sharing.trained, sharing.renewed, sharing.is_trained)
        if not sharing.worker.is_alone:
            sharing.is_own = sharing.is_own or adapter.is_per_worker
        try:
            state = self._state_of(value, adapter, path)
            if not sharing.worker.is_alone:
                # Only now: to be asked for its state may change how an object holds it.
                sharing.enter(adapter.replication_of(value))
            return tagged("object", self.encode_apart(state, path, depth), adapter.kind)
        finally:
            sharing.is_own, sharing.holders, sharing.trained, sharing.renewed, sharing.is_trained = outer

    def of_program(self, cls: type, value: Any, path: str, depth: int) -> Node | None:
        """As for plain values; a function in what a framework takes apart stays the program's."""
        node = super().of_program(cls, value, path, depth)
        return tagged("live", name_live(value)) if node is None and self._nodes_open and is_code(value) else node

    def coded(self, made: Any, path: str, depth: int) -> Node:
        """The node of what a codec has made of a value, with leaves for the arrays in it."""
        outer, self._is_coding = self._is_coding, True
        try:
            return self.encode_apart(made, path, depth)
        finally:
            self._is_coding = outer

    def _encode_node(self, cls: type, node: NodeParts, path: str, depth: int) -> Node:
        """The node of a value that its framework takes apart; functions in it are the program's."""
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
        """The node of a tensor that is made of other tensors, each of which has a leaf."""
        cls = type(value)
        shape, strides = list(value.shape), list(value.stride())
        if any(type(number) is not int for number in (*shape, *strides)):
            what = f"a tensor of type {cls.__module__}.{cls.__qualname__}, whose shape is not made of numbers,"
            raise unsupported(path, what, "Store the plain tensors that it is made of.")
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

    def _encode_long(self, value: dict[Any, Any] | list[Any], path: str, depth: int) -> Node:
        """The node of a long container: as it was, if it looks as it did and its leaves are nobody else's."""
        columns = self._columns
        cached = self._cache.get(path)
        arrays = cached.try_arrays(value) if cached is not None else None
        if (
            cached is not None
            and arrays is not None
            and self._addresses.isdisjoint(cached.addresses)
            and self._names.isdisjoint(cached.names)
        ):
            self.count(cached.count, path)
            self._unindexed.append((len(columns.names), cached))
            self._names.update(cached.names)
            self._addresses.update(cached.addresses)
            self._memories += cached.memories
            columns.names.extend(cached.names)
            columns.specs.extend(cached.specs)
            columns.arrays.extend(arrays)
            columns.addresses.extend(cached.addresses)
            columns.backends.extend([cached.backend] * len(arrays))
            return cached.node
        first = len(columns.names)
        node = super().encode(value, path, depth)
        self._remember_long(value, path, first, node)
        return node

    def _remember_long(self, value: dict[Any, Any] | list[Any], path: str, first: int, node: Node) -> None:
        """Remembers a container if it holds plain arrays of one library, each with a leaf of its own, and no more."""
        columns = self._columns
        addresses = [address for address in columns.addresses[first:] if address is not None]
        self._cache.pop(path, None)
        arrays = arrays_of(value)
        if not len(arrays) == len(addresses) == len(columns.names) - first > 0 or "$" in node:
            return
        dicts = list(dicts_in(value, node))
        if any("$" in own for own in dicts):
            return  # Of keys that are equal, 1 and True say, only text is written alike.
        backends = columns.backends[first:]
        if any(map(operator.is_not, arrays, columns.arrays[first:])) or any(one is not backends[0] for one in backends):
            return
        if any(spec.strides or spec.quantizer for spec in columns.specs[first:]):
            return  # What an index says of such a leaf is noted where it is looked at by itself.
        fingerprint = try_fingerprint(backends[0], arrays)
        if fingerprint is not None:
            self._cache[path] = CachedContainer(
                keys_of(value),
                len(arrays) + len(dicts),
                frozenset(map(type, arrays)),
                backends[0],
                fingerprint,
                columns.names[first:],
                columns.specs[first:],
                addresses,
                self._memories[first:],
                node,
            )

    def _leaf(self, array: Any, backend: ArrayBackend, path: str) -> str:
        spec = backend.spec(array, path)
        memory = backend.alias_key(array)
        address = backend.address(array)
        place = self._find_place(backend, memory, address)
        shared = self._shared.get((backend.name, memory))
        if shared is not None:
            raise _in_both(path, shared.name)
        if place is None:
            name = self._unique(path)
            self._by_memory.setdefault(backend.name, {})[memory] = len(self._columns.names)
            self._add(name, spec, array, address, backend, memory)
            self._sharing.note_form(name, spec)
            return name
        return self._columns.names[place]

    def _unique(self, path: str) -> str:
        """A leaf's name: its path, if that is not taken."""
        # What each worker has of its own must not be taken for one leaf.
        name = path = f"{path}~w{self._sharing.worker.rank}" if self._sharing.is_own else path
        number = 2
        # Keys such as 1 and "1" give one path. `~2` is no escape, so a name with it is nobody's path.
        while name in self._names:
            name = f"{path}~{number}"
            number += 1
        if name == "__metadata__":
            raise unsupported(path, "an array of that name", "The name belongs to the file format; take another.")
        return name

    def _add(
        self, name: str, spec: ArraySpec, array: Any, address: int | None, backend: ArrayBackend, memory: Hashable
    ) -> None:
        columns = self._columns
        self._names.add(name)
        self._addresses.add(address)
        self._memories.append(memory)
        columns.names.append(name)
        columns.specs.append(spec)
        columns.arrays.append(array)
        columns.addresses.append(address)
        columns.backends.append(backend)

    def _find_place(self, backend: ArrayBackend, memory: Hashable, address: int | None) -> int | None:
        """Where in the columns the leaf of that memory stands, if it has one; enters `_unindexed` first, if need be."""
        if self._unindexed and address is not None and address in self._addresses:
            # It may be one of a long container's: those are entered one by one only now, since that is seldom needed.
            for first, cached in self._unindexed:
                places = range(first, first + len(cached.memories))
                self._by_memory.setdefault(cached.backend.name, {}).update(zip(cached.memories, places, strict=True))
            self._unindexed.clear()
        return self._by_memory.get(backend.name, {}).get(memory)


def is_code(value: object) -> bool:
    """**Pure.** Whether a value belongs to the program and not to its state: what is called, or has no attributes."""
    return callable(value) or not (getattr(value, "__dict__", None) or getattr(type(value), "__slots__", None))


def name_live(value: object) -> str:
    """**Pure.** What stands in a checkpoint for a value of the program, for people to read."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


class _Trial(_Capturing):
    """Encodes what can be read without a change to any object, to see whether that can be done."""

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """As in a capture; an object that is left out gets an empty node."""
        is_left_out = (adapter_of(value) or _ANY).readable(value) is not Readable.ALWAYS
        return "" if is_left_out and not self._is_coding else super().special(value, path, depth)


def list_shared(objects: Mapping[str, object]) -> list[str]:
    """The names of the objects that are not this worker's own, as random generators are, and what is `PerWorker`."""
    return [name for name, obj in objects.items() if not _is_own(obj)]


def _is_own(obj: object) -> bool:
    adapter = adapter_of(obj)
    return adapter is not None and adapter.is_per_worker


def _in_both(path: str, other: str) -> UnsupportedValueError:
    what = f"an array that is {other} too, one of the two within PerWorker,"
    return unsupported(path, what, "Keep it in one of the two: what workers share is no worker's own.")
