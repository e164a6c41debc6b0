"""What of Keras' objects is kept: variables by their place and name, and the attributes of objects that change."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from holdfast.state.adapters import OWNED, Adapter, CaptureContext, Loading, StateAdapter
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import backend_of, register_adapter

SMALL_ELEMENTS: Final = 65_536
"""Variables of at most so many elements are cheap to copy: counters, learning rates, seeds, metrics."""

_SKIPPED: Final = frozenset({"_model", "model", "params", "validation_data"})
"""What Keras itself gives to each callback."""

_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes)


class Variables:
    """Variables of a model, its optimizer or its metrics, by place and name, as one object to keep.

    Keras numbers the names of what a process makes (`dense_1`), so that these numbers say nothing and are left out.
    """

    def __init__(self, model: Any, variables: Iterable[Any]) -> None:
        self._model = model
        self._variables = {_name(number, variable): variable for number, variable in enumerate(variables)}

    def read(self) -> dict[str, Any]:
        """The live arrays, those of the step that has ended last."""
        pending = _find_pending(self._model)
        return {
            name: pending[id(variable)] if id(variable) in pending else _live_array(variable)
            for name, variable in self._variables.items()
        }

    def write(self, live: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Gives the variables what was read for them, but where the live arrays hold it already."""
        for name, variable in self._variables.items():
            if arrays[name] is not live[name]:
                variable.assign(arrays[name])


def list_buffers(model: Any) -> list[Any]:
    """With torch, the buffers of modules of its own, each once.

    The layers of a model that Keras has put together are no children of it for torch.
    """
    found = {id(one): one for layer in model._flatten_layers() for one in layer.buffers()}
    return list(found.values())


def _name(number: int, variable: Any) -> str:
    path = str(variable.path or variable.name)
    return f"{number}." + re.sub(r"_\d+(?=[._]|$)", "", path.replace("/", "."))


def _find_pending(model: Any) -> dict[int, Any]:
    """With JAX, by a variable's identity, what the variable holds once the trainer puts its state back."""
    state = getattr(model, "_jax_state", None)
    if not state or getattr(model, "_jax_state_synced", True):
        return {}
    owners = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": model.optimizer.variables if model.optimizer is not None else [],
        "metrics_variables": model.metrics_variables,
    }
    return {
        id(variable): array
        for group, variables in owners.items()
        for variable, array in zip(variables, state.get(group) or [], strict=False)
    }


def _live_array(variable: Any) -> Any:
    return variable.value.detach() if keras.backend.backend() == "torch" else variable.value


class _VariablesAdapter(Adapter):
    kind = "keras.variables"

    def state_of(self, obj: Variables, context: CaptureContext) -> Any:
        return obj.read()

    def begin_load(self, obj: Variables, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        live = obj.read()
        value = loading.value(stored, live, rules=OWNED)
        return lambda: obj.write(live, loading.complete(value))


class Kept:
    """A tree of values that one function makes and another one takes, as one object to keep."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self.write = read, write


register_adapter(Variables, _VariablesAdapter())
# What is in it depends on how far training is, so there is nothing to hold against.
register_adapter(
    Kept, StateAdapter("keras.fit", lambda obj: obj.read(), lambda obj, state: obj.write(state), compare=False)
)


def copy_small(variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The small ones among the variables, each with a copy of its value."""
    return [
        (variable, np.array(keras.ops.convert_to_numpy(variable.value)))
        for variable in variables
        if math.prod(variable.shape) <= SMALL_ELEMENTS
    ]


def put_back(copies: Iterable[tuple[Any, Any]]) -> None:
    """Gives variables the values of `copy_small` again."""
    for variable, value in copies:
        variable.assign(value)


class Attributes:
    """The attributes of an object that have changed since training began, as far as they can be stored."""

    def __init__(self, obj: Any) -> None:
        """Notes what they are now."""
        self.obj = obj
        self._began = self._list()

    def read(self) -> dict[str, Any]:
        """Those that have changed; lists and dicts are copied, and arrays are not."""
        began = self._began
        return {
            name: value for name, value in self._list().items() if name not in began or not _is_same(value, began[name])
        }

    def write(self, values: Mapping[str, Any]) -> None:
        """Puts them back."""
        for name, value in values.items():
            setattr(self.obj, name, copy.copy(value))

    def _list(self) -> dict[str, Any]:
        found = {}
        for name, value in vars(self.obj).items():
            if name not in _SKIPPED:
                kept = _copy_plain(value)
                if kept is not _NO_VALUE:
                    found[name] = kept
        return found


_NO_VALUE: Final = object()


def _copy_plain(value: Any) -> Any:
    """A value with its lists and dicts copied, if it is made of plain values and arrays alone; else `_NO_VALUE`."""
    if type(value) in _SCALARS or isinstance(value, np.generic):
        return value
    if type(value) in (list, tuple):
        parts = [_copy_plain(part) for part in value]
        return _NO_VALUE if any(part is _NO_VALUE for part in parts) else type(value)(parts)
    if type(value) is dict:
        if not all(type(key) in (str, int) for key in value):
            return _NO_VALUE
        named = {key: _copy_plain(part) for key, part in value.items()}
        return _NO_VALUE if any(part is _NO_VALUE for part in named.values()) else named
    is_array = backend_of(value) is not None and getattr(value, "dtype", None) != np.dtype(object)
    if not is_array:
        return _NO_VALUE
    # An array that is changed where it is would else seem to be as it was.
    return value.copy() if isinstance(value, np.ndarray) and value.size <= SMALL_ELEMENTS else value


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values of `_copy_plain` are equal, type by type."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(part, other[key]) for key, part in value.items())
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    return bool(value == other) if isinstance(value, (*_SCALARS, np.generic)) else False


class CallbackStates:
    """The state of the callbacks of one `fit`: their attributes that change, and where a `CSVLogger` writes."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._attributes = [Attributes(callback) for callback in callbacks]

    def read(self) -> list[dict[str, Any]]:
        """What each of them has come to, with the name of its class."""
        return [
            {"kind": type(one.obj).__name__, "attributes": one.read(), "written_bytes": _count_written(one.obj)}
            for one in self._attributes
        ]

    def write(self, states: Iterable[Mapping[str, Any]]) -> list[str]:
        """Puts the states back, each into the callback of that class which comes next.

        Returns:
            The classes of those for which there is no callback any more.
        """
        left, missing = list(self._attributes), []
        for state in states:
            found = next((one for one in left if type(one.obj).__name__ == state["kind"]), None)
            if found is None:
                missing += [state["kind"]] if state["attributes"] else []
                continue
            left.remove(found)
            found.write(state["attributes"])
            _cut_file(found.obj, state["written_bytes"])
        return missing


def _count_written(callback: Any) -> int | None:
    file = callback.csv_file if isinstance(callback, keras.callbacks.CSVLogger) else None
    if file is None or file.closed:
        return None
    file.flush()
    return int(file.tell())


def _cut_file(callback: Any, written_bytes: int | None) -> None:
    """Takes the rows of epochs that will be trained again from a log."""
    if written_bytes is None or not isinstance(callback, keras.callbacks.CSVLogger):
        return
    file = callback.csv_file
    if file is not None and not file.closed and file.seek(0, 2) > written_bytes:
        file.truncate(written_bytes)
        file.seek(0, 2)
