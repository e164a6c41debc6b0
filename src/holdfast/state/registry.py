"""Which adapter or array library serves an object: looked up by the classes that its type derives from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from holdfast.errors import UsageError
from holdfast.format.codecs import is_tensor_subclass
from holdfast.state.adapters import Adapter, CaptureContext, Loading, Rules, StateAdapter, StateDictAdapter
from holdfast.state.leaves import ArrayBackend, Sharder

__all__ = [
    "INTEGRATIONS",
    "Adapter",
    "CaptureContext",
    "Loading",
    "Rules",
    "StateAdapter",
    "StateDictAdapter",
    "adapter_of",
    "backend_named",
    "backend_of",
    "backend_of_type",
    "is_made_of_tensors",
    "load_integrations",
    "register_adapter",
    "register_backend",
    "register_sharder",
    "sharder_of_type",
]

INTEGRATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "numpy": "holdfast.state.numpy_arrays",
        "numpy.random": "holdfast.state.numpy_random",
        "torch": "holdfast.integrations.torch",
        # It takes torch a second to import this, and most programs do without.
        "torch.distributed.tensor": "holdfast.integrations.torch.meshes",
        "jax": "holdfast.integrations.jax.arrays",
        "jaxlib": "holdfast.integrations.jax.arrays",
    }
)
"""For each package that holdfast knows, or a part of one, the module that registers its kinds. The module is imported
when an object of that package is met, so the package itself is in memory already."""

_adapters: dict[type, Adapter] = {}
_backends: dict[type, ArrayBackend] = {}
_backends_by_name: dict[str, ArrayBackend] = {}
_found: dict[type, Adapter | ArrayBackend | None] = {}
_sharders: dict[type, Sharder] = {}
_found_sharders: dict[type, Sharder | None] = {}

_STATE_DICT = StateDictAdapter()


def register_adapter(cls: type, adapter: Adapter) -> None:
    """Makes an adapter serve a class and those that derive from it, in place of an earlier one."""
    _adapters[cls] = adapter
    _found.clear()


def register_backend(cls: type, backend: ArrayBackend) -> None:
    """Makes a backend serve a class of arrays and those that derive from it."""
    _backends[cls] = backend
    _backends_by_name[backend.name] = backend
    _found.clear()


def immutable_types() -> tuple[type, ...]:
    """The classes of arrays that cannot be changed, of the libraries that are in use."""
    return tuple(cls for cls, backend in _backends.items() if backend.is_immutable)


def register_sharder(cls: type, sharder: Sharder) -> None:
    """Makes a sharder serve a class of sharded arrays and those that derive from it."""
    _sharders[cls] = sharder
    _found_sharders.clear()
    _found.clear()


def sharder_of_type(cls: type) -> Sharder | None:
    """What looks at sharded arrays of a type, or None if it is no type of such."""
    try:
        return _found_sharders[cls]
    except KeyError:
        pass
    _load_integrations_of(cls)
    found = next((_sharders[ancestor] for ancestor in cls.__mro__ if ancestor in _sharders), None)
    _found_sharders[cls] = found
    return found


def adapter_of(obj: object) -> Adapter | None:
    """What reads and puts back the state of an object, or None if it is a plain value, an array, or unknown.

    An object of no registered class is served if it has both `state_dict` and `load_state_dict`.
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
    """The library of an array, or None if the object is no array."""
    return backend_of_type(type(obj))


def backend_of_type(cls: type) -> ArrayBackend | None:
    """The library of arrays of a type, or None if it is no type of arrays."""
    found = _handler(cls)
    return None if found is None or isinstance(found, Adapter) else found


def is_made_of_tensors(cls: type) -> bool:
    """Whether values of a type have no memory of their own, but consist of tensors; not if they are sharded arrays."""
    return is_tensor_subclass(cls) and sharder_of_type(cls) is None


def backend_named(name: str) -> ArrayBackend:
    """The array library of that name, as stored in a checkpoint.

    Raises:
        UsageError: If it is not one that this process has in memory.
    """
    if name not in _backends_by_name and (name == "numpy" or name in sys.modules) and name in INTEGRATIONS:
        importlib.import_module(INTEGRATIONS[name])
    backend = _backends_by_name.get(name)
    if backend is None:
        raise UsageError(
            f"the checkpoint holds arrays of {name!r}, which this process has not imported",
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
                # Also where it stands in `sys.modules`: another thread may be importing it, and is waited for.
                importlib.import_module(module)
