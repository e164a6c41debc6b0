"""Finds the adapter or array library of an object by its type, and the objects in a tree of values."""

from __future__ import annotations

import collections
import dataclasses
import enum
import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, cast

from holdfast.errors import UsageError
from holdfast.format.codecs import (
    codec_for,
    is_namedtuple,
    is_plain_dataclass,
    is_tensor_subclass,
    name_of,
    type_named,
)
from holdfast.format.encoding import escape, path_part
from holdfast.format.scalars import ENCODERS
from holdfast.state.adapters import Adapter, Readable, StateDictAdapter
from holdfast.state.leaves import ArrayBackend, Sharder

INTEGRATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "numpy": "holdfast.state.numpy_arrays",
        "numpy.random": "holdfast.state.numpy_random",
        "torch": "holdfast.integrations.torch",
        # It takes torch a second to import this, and most programs do without.
        "torch.distributed.tensor": "holdfast.integrations.torch.meshes",
        "jax": "holdfast.integrations.jax.arrays",
        "jaxlib": "holdfast.integrations.jax.arrays",
        "flax.nnx": "holdfast.integrations.jax.nnx",
    }
)
"""For each known package, or a part of one, the module that registers its kinds. The module is imported when an object
of that package is found, so the package itself is in memory already.
"""

_NODE_LIBRARIES: Final[Mapping[str, str]] = MappingProxyType({"jax": "holdfast.integrations.jax.nodes"})
"""For each package that has a registry of tree nodes, the module that takes such nodes apart."""


class NodeParts(NamedTuple):
    """A value of a class that the program, or a library, has registered with its framework as a node of trees.

    Attributes:
        parts: Its children, by name: they change in training. The rest of it belongs to the program.
        join: Creates such a value from other children, with the same names; the rest is taken from this one.
    """

    parts: dict[str, Any]
    join: Callable[[Mapping[str, Any]], Any]


_adapters: dict[type, Adapter] = {}
_backends: dict[type, ArrayBackend] = {}
_backends_by_name: dict[str, ArrayBackend] = {}
_found: dict[type, Adapter | ArrayBackend | None] = {}
_node_readers: list[Callable[[object], NodeParts | None]] = []
_sharders: dict[type, Sharder] = {}
_found_sharders: dict[type, Sharder | None] = {}

_STATE_DICT = StateDictAdapter()


def register_adapter(cls: type, adapter: Adapter) -> None:
    """Registers an adapter for a class and its subclasses, replacing an earlier one."""
    _adapters[cls] = adapter
    _found.clear()


def register_backend(cls: type, backend: ArrayBackend) -> None:
    """Registers a backend for a class of arrays and its subclasses."""
    _backends[cls] = backend
    _backends_by_name[backend.name] = backend
    _found.clear()


def immutable_types() -> tuple[type, ...]:
    """Returns the classes of immutable arrays, of the libraries in use."""
    return tuple(cls for cls, backend in _backends.items() if backend.is_immutable)


def register_sharder(cls: type, sharder: Sharder) -> None:
    """Registers a sharder for a class of sharded arrays and its subclasses."""
    _sharders[cls] = sharder
    _found_sharders.clear()
    _found.clear()


def register_nodes(read: Callable[[object], NodeParts | None]) -> None:
    """Registers what takes apart the values that a framework knows as nodes of trees."""
    _node_readers.append(read)


def node_parts(value: object) -> NodeParts | None:
    """Returns the parts of a value whose class was registered with a framework as a node of trees; None for any other.

    Python's own containers are not such nodes, nor are namedtuples, arrays, and objects that have an adapter.
    """
    cls = type(value)
    if cls in ENCODERS or cls in _PLAIN_CONTAINERS or is_namedtuple(cls):
        return None
    for package, module in _NODE_LIBRARIES.items():
        if package in sys.modules:
            importlib.import_module(module)
    if not _node_readers or isinstance(value, type) or _handler(cls) is not None or sharder_of_type(cls) is not None:
        return None
    return next((found for read in _node_readers if (found := read(value)) is not None), None)


_PLAIN_CONTAINERS: Final = frozenset(
    {dict, list, tuple, set, frozenset, slice, collections.OrderedDict, collections.defaultdict, collections.Counter}
    | {collections.deque}
)


def sharder_of_type(cls: type) -> Sharder | None:
    """Returns the sharder of a type of sharded arrays, or None."""
    try:
        return _found_sharders[cls]
    except KeyError:
        pass
    _load_integrations_of(cls)
    found = next((_sharders[ancestor] for ancestor in cls.__mro__ if ancestor in _sharders), None)
    _found_sharders[cls] = found
    return found


def adapter_of(obj: object) -> Adapter | None:
    """Returns the adapter of an object, or None if it is a plain value, an array, or unknown.

    An object of an unregistered class is supported if it has both `state_dict` and `load_state_dict`.
    """
    found = _handler(type(obj))
    if isinstance(found, Adapter):
        return found
    if found is not None or isinstance(obj, type):
        return None
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        # What accelerate makes of a loader says that it is of the loader's class.
        claimed = _handler(obj.__class__) if obj.__class__ is not type(obj) else None
        return claimed if isinstance(claimed, Adapter) and claimed.knows_wrappers else _STATE_DICT
    return None


def backend_of(obj: object) -> ArrayBackend | None:
    """Returns the library of an array, or None if the object is not an array."""
    return backend_of_type(type(obj))


def backend_of_type(cls: type) -> ArrayBackend | None:
    """Returns the library of a type of arrays, or None."""
    found = _handler(cls)
    return None if found is None or isinstance(found, Adapter) else found


def group_by_library(values: Sequence[Any]) -> list[tuple[ArrayBackend | Sharder | None, Sequence[int]]]:
    """Returns each library, or kind of sharded arrays, with the places of its arrays; None for other values."""
    kinds = list(map(type, values))
    handlers = {cls: sharder_of_type(cls) or backend_of_type(cls) for cls in dict.fromkeys(kinds)}
    if len(set(map(id, handlers.values()))) == 1:
        return [(handlers[kinds[0]], range(len(kinds)))]
    groups: dict[int, list[int]] = {}
    for place, cls in enumerate(kinds):
        groups.setdefault(id(handlers[cls]), []).append(place)
    return [(handlers[kinds[places[0]]], places) for places in groups.values()]


def is_array_type(cls: type) -> bool:
    """Returns True for a type of plain or sharded arrays."""
    return backend_of_type(cls) is not None or sharder_of_type(cls) is not None


def is_made_of_tensors(cls: type) -> bool:
    """Returns True if values of a type have no memory of their own, but consist of tensors; not for sharded arrays."""
    return is_tensor_subclass(cls) and sharder_of_type(cls) is None


def backend_named(name: str) -> ArrayBackend:
    """Returns the array library with that name, as stored in a checkpoint.

    Raises:
        UsageError: If this process does not have it in memory.
    """
    if name not in _backends_by_name and (name == "numpy" or name in sys.modules) and name in INTEGRATIONS:
        importlib.import_module(INTEGRATIONS[name])
    backend = _backends_by_name.get(name)
    if backend is None:
        raise UsageError(
            f"the checkpoint contains arrays of {name!r}, which this process has not imported",
            hint=f"Import {name} before restoring." if name in INTEGRATIONS else "Install a version that knows it.",
        )
    return backend


def load_integrations() -> None:
    """Imports the integration of every known package that this process has imported."""
    for package, module in INTEGRATIONS.items():
        if package in sys.modules:
            importlib.import_module(module)


def _handler(cls: type) -> Adapter | ArrayBackend | None:
    try:
        return _found[cls]
    except KeyError:
        pass
    _load_integrations_of(cls)
    found: Adapter | ArrayBackend | None = None
    for ancestor in cls.__mro__:
        found = _adapters.get(ancestor) or _backends.get(ancestor)
        if found is not None:
            break
    if found is not None and not isinstance(found, Adapter) and is_made_of_tensors(cls):
        # It has no values of its own: each of the tensors that it is made of is an array.
        found = None
    _found[cls] = found
    return found


def _load_integrations_of(cls: type) -> None:
    for ancestor in cls.__mro__:
        own = str(getattr(ancestor, "__module__", ""))
        for package, module in INTEGRATIONS.items():
            # A class may name any module as its own: only what is in memory already counts.
            if package in sys.modules and (own == package or own.startswith(f"{package}.")):
                # Also if it is already in `sys.modules`: another thread may be importing it, and is waited for.
                importlib.import_module(module)


_Trail: TypeAlias = tuple[Any, Hashable, int] | None
"""The way to a value: that of its container, and its key and number there. A path is created only if needed."""


def find_stateful(root: object, path: str) -> Iterator[tuple[str, object, Adapter | None]]:
    """Yields objects in a tree of values: those with an adapter, and those that only need to be prepared."""
    for trail, value, handler in _walk(root, is_sought=lambda _: False):
        yield _path(path, trail), value, cast("Adapter | None", handler)


def list_members(objects: Mapping[str, object]) -> list[tuple[str, Any, Adapter]]:
    """Returns the objects with state, also those in trees, each with its path and adapter."""
    return [
        (path, obj, adapter)
        for name, root in objects.items()
        for path, obj, adapter in find_stateful(root, escape(name))
        if adapter is not None
    ]


def list_shared(objects: Mapping[str, object]) -> list[str]:
    """Returns the names of the objects that do not differ per worker."""
    return [name for name, obj in objects.items() if not is_per_worker(obj)]


def is_per_worker(obj: object) -> bool:
    """Returns True if an object differs per worker, as random generators and `PerWorker` do."""
    adapter = adapter_of(obj)
    return adapter is not None and adapter.is_per_worker


def is_code(value: object) -> bool:
    """**Pure.** Returns True if a value belongs to the program, not to its state: a callable, or without attributes."""
    return callable(value) or not (getattr(value, "__dict__", None) or getattr(type(value), "__slots__", None))


def name_live(value: object) -> str:
    """**Pure.** Returns the text in a checkpoint that represents a value of the program, for people to read."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def may_change_when_read(root: object) -> bool:
    """Returns True if reading the state of an object, or of one in a tree of values, may change it."""
    found = find_stateful(root, "")
    return any(adapter is not None and adapter.readable(part) is Readable.WHEN_SAVED for _, part, adapter in found)


def check_objects(objects: Mapping[str, object]) -> None:
    """Checks that no object is a wrapper whose state on each worker is a different part, without a description.

    Raises:
        UnsupportedValueError: If one is; the error says what to use instead.
    """
    for name, root in objects.items():
        for path, obj, adapter in find_stateful(root, escape(name)):
            (adapter or Adapter()).check(obj, path)


def state_paths(live: object, path: str, *, only_objects: bool = False) -> list[str]:
    """Returns the paths of objects with state in a live value, and of its arrays."""
    found = _walk(live, is_sought=lambda _: not only_objects)
    return [_path(path, trail) for trail, _, handler in found if handler is not None]


def find_array(live: object) -> object:
    """Returns the first plain array in a value, or None."""
    return next((value for _, value, _ in _walk(live) if backend_of_type(type(value)) is not None), None)


def holds_state(live: object) -> bool:
    """Returns True if a live value is or contains arrays or objects with state."""
    return any(handler is not None for _, _, handler in _walk(live))


def list_unmade(root: object, path: str) -> Iterator[tuple[str, object]]:
    """Yields what a restart cannot make by itself, with its path: objects with state, values of types that are not
    registered (each type once, and only with the root's path), and the root if it is an array that can be changed."""
    library = backend_of(root)
    if library is not None and not library.is_immutable:
        yield path, root
    typed: dict[type, object] = {}
    for trail, value, adapter in _walk(root, is_sought=lambda _: False, typed=typed):
        if adapter is not None:
            yield _path(path, trail), value
    for cls, value in typed.items():
        is_named = is_namedtuple(cls) or is_plain_dataclass(cls) or issubclass(cls, enum.Enum)
        if is_named and type_named(name_of(cls)) is None and codec_for(cls) is None:
            yield path, value


def list_arrays(root: object, path: str) -> list[tuple[str, object]]:
    """Returns the arrays in a tree of values, each once and with its path; not those inside objects with state."""
    found = {id(value): (trail, value) for trail, value, one in _walk(root) if not isinstance(one, Adapter | None)}
    return [(_path(path, trail), value) for trail, value in found.values()]


def immutable_arrays_in(root: object) -> list[object]:
    """Returns the immutable arrays in a tree of values, each once; not those inside objects with state."""
    found = (
        value
        for _, value, handler in _walk(root, is_sought=lambda library: getattr(library, "is_immutable", False))
        if not isinstance(handler, Adapter | None)
    )
    return list({id(value): value for value in found}.values())


def parts_of(value: object) -> list[tuple[Hashable, Any]]:
    """Returns the parts of a container of values, each with its key, index or field; nothing for other values."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, collections.deque)):
        names = getattr(value, "_fields", None)
        return list(zip(names or range(len(value)), value, strict=True))
    node = node_parts(value)
    if node is not None:
        return list(node.parts.items())
    if is_plain_dataclass(type(value)):
        fields = dataclasses.fields(cast(Any, value))
        return [(field.name, getattr(value, field.name, None)) for field in fields]
    if is_made_of_tensors(type(value)):
        return [(name, getattr(value, name)) for name in cast(Any, value).__tensor_flatten__()[0]]
    return []


def _walk(
    root: object,
    *,
    is_sought: Callable[[ArrayBackend | Sharder], bool] = lambda _: True,
    typed: dict[type, object] | None = None,
) -> Iterator[tuple[_Trail, object, Adapter | ArrayBackend | Sharder | None]]:
    """Yields objects with state, those that need to be prepared (with None), and arrays, in order.

    Each container is searched once, where it first appears.

    Args:
        root: Where to begin.
        is_sought: Returns whether to yield the arrays of a library.
        typed: Filled with a value of each other class, besides the plain containers.
    """
    # By identity. The containers are kept, or another one might get the identity of one that is gone.
    seen: dict[int, object] = {}
    skipped: set[type] = set(ENCODERS)
    ahead: list[tuple[_Trail, Any]] = [(None, root)]
    while ahead:
        trail, value = ahead.pop()
        cls = type(value)
        if cls in ENCODERS or id(value) in seen:
            continue
        is_plain = cls in _PLAIN_CONTAINERS
        library = None if is_plain else backend_of_type(cls) or sharder_of_type(cls)
        if library is not None:
            if is_sought(library):
                yield trail, value, library
            continue
        adapter = None if is_plain else adapter_of(value)
        if adapter is not None:
            yield trail, value, adapter
            continue
        seen[id(value)] = value
        if typed is not None and not is_plain:
            typed[cls] = value
        if not (is_plain or isinstance(value, type)) and callable(getattr(value, "prepare_for_checkpoint", None)):
            yield trail, value, None
        # Most parts are values or arrays, of which there may be very many.
        if isinstance(value, dict):
            types = set(map(type, value.values()))
        elif isinstance(value, (list, tuple, collections.deque)):
            types = set(map(type, value))
        else:
            types = {type(part) for _, part in parts_of(value)}
        others = types - skipped
        if others:
            others = {one for one in others if (library := backend_of_type(one)) is None or is_sought(library)}
            skipped |= types - others
        if others:
            parts = enumerate(parts_of(value))
            ahead += reversed([((trail, key, i), part) for i, (key, part) in parts if type(part) in others])


def _path(root: str, trail: _Trail) -> str:
    parts = []
    while trail is not None:
        trail, key, index = trail
        parts.append(path_part(key, index))
    return "/".join([root, *reversed(parts)])
