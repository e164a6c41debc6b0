"""Objects to named leaves: plain values are taken at once, arrays are named and stay live until they are copied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

from holdfast.errors import HoldfastError, UnsupportedValueError
from holdfast.format.encoding import Encoder, escape, unsupported
from holdfast.format.scalars import ENCODERS, Node, tagged
from holdfast.state.adapters import Adapter, Made
from holdfast.state.collection import no_collection
from holdfast.state.finding import find_stateful
from holdfast.state.leaves import ArrayBackend, ArrayLeaf, Captured
from holdfast.state.registry import adapter_of, backend_of


class Cast:
    """The objects of one capture or one matching, together; a `Scene` for the adapters."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.objects = objects
        self._members: list[tuple[str, object]] | None = None
        self._made: dict[str, Any] = {}

    @property
    def members(self) -> list[tuple[str, object]]:
        """Each object that has an adapter, with its path."""
        if self._members is None:
            self._members = [
                (path, obj)
                for name, root in self.objects.items()
                for path, obj, adapter in find_stateful(root, escape(name))
                if adapter is not None
            ]
        return self._members

    def once(self, key: str, make: Callable[[], Made]) -> Made:
        """What `make` returned at the first call with that key."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])


def capture_objects(objects: Mapping[str, object]) -> Captured:
    """Takes the state of all objects, as it is now.

    First `prepare_for_checkpoint` is called on every object that has it, also on those within dicts, lists, tuples
    and dataclasses, then the states are read. Plain values are written down at once; later changes to them are not
    seen. Arrays are only named: copy them before anything changes them.

    Raises:
        UnsupportedValueError: If something cannot be stored; its path says where it stands.
    """
    with no_collection():
        for name, root in objects.items():
            for _, obj, adapter in find_stateful(root, escape(name)):
                (adapter or _ANY).prepare(obj)
        capturing = _Capturing(Cast(objects))
        skeletons = {name: capturing.encode(obj, escape(name)) for name, obj in objects.items()}
        return Captured(tuple(capturing.leaves), skeletons)


_ANY = Adapter()


class _Capturing(Encoder):
    """Encodes values, and adds arrays and objects with state."""

    def __init__(self, scene: Cast) -> None:
        super().__init__()
        self.leaves: list[ArrayLeaf] = []
        self._scene = scene
        self._backends: dict[type, ArrayBackend] = {}
        self._names: set[str] = set()
        self._by_memory: dict[str, dict[Hashable, str]] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        """The node of a value; arrays are looked for first, since there may be very many."""
        backend = self._backends.get(type(value))
        if backend is None:
            if type(value) in ENCODERS or (backend := backend_of(value)) is None:
                return super().encode(value, path, depth)
            self._backends[type(value)] = backend
        return {"$": "array", "k": backend.name, "v": self._leaf(value, backend, path)}

    def special(self, value: Any, path: str, depth: int) -> Node | None:
        """The node of an object with state."""
        adapter = adapter_of(value)
        if adapter is None:
            return None
        try:
            state = adapter.state_of(value, self._scene)
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:
            raise UnsupportedValueError(
                f"{path}: the state of {type(value).__qualname__} could not be read: {error!r}",
                path=path,
                hint="See the cause above: it was raised by the object itself.",
            ) from error
        return tagged("object", self.encode_apart(state, path, depth), adapter.kind)

    def _leaf(self, array: Any, backend: ArrayBackend, path: str) -> str:
        spec = backend.spec(array, path)
        memory = backend.alias_key(array)
        by_memory = self._by_memory.setdefault(backend.name, {})
        name = by_memory.get(memory)
        if name is None:
            name = path
            number = 2
            # Keys such as 1 and "1" give one path. `~2` is no escape, so a name with it is nobody's path.
            while name in self._names:
                name = f"{path}~{number}"
                number += 1
            if name == "__metadata__":
                raise unsupported(path, "an array of that name", "The name belongs to the file format; take another.")
            self._names.add(name)
            by_memory[memory] = name
            self.leaves.append(ArrayLeaf(name, spec, array, backend))
        return name
