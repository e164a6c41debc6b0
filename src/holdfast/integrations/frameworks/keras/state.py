"""The state of Keras' objects that is saved: variables by their position and name, and attributes that change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import keras
import numpy as np
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import global_seed_generator

from holdfast.errors import UsageError
from holdfast.format.decoding import find_tags
from holdfast.state.adapters import OWNED, Adapter, CaptureContext, Loading, Oversights, StateAdapter
from holdfast.state.data.attributes import SMALL_ELEMENTS, Attributes
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import register_adapter

_LIBRARIES: Final = {"torch": "torch", "jax": "jax", "tensorflow": "numpy"}
"""By backend, the library of the arrays that `_live_array` returns."""


class Variables:
    """Variables of a model, its optimizer or its metrics, by position and name, as one object to save.

    Keras numbers the names of the objects of a process (`dense_1`), so these numbers mean nothing and are left out.
    """

    def __init__(self, model: Any, variables: Iterable[Any], *, is_trained: bool = True) -> None:
        """`is_trained` says that a value that is not finite is a sign of bad training; a sum of losses may have one."""
        self._model, self.is_trained = model, is_trained
        self._variables = {_name(number, variable): variable for number, variable in enumerate(variables)}

    def read(self) -> dict[str, Any]:
        """Returns the live arrays, as of the last complete step."""
        pending = _find_pending(self._model)
        return {
            name: pending[id(variable)] if id(variable) in pending else _live_array(variable)
            for name, variable in self._variables.items()
        }

    def list_parameters(self) -> list[Any]:
        """Returns the parameters of torch that the variables are; none with JAX, whose fit empties them meanwhile."""
        if keras.backend.backend() != "torch":
            return []
        return [variable.value for variable in self._variables.values()]

    def write(self, live: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Assigns the restored values to the variables, except where the live arrays already hold them."""
        for name, variable in self._variables.items():
            if arrays[name] is not live[name]:
                variable.assign(arrays[name])


def list_buffers(model: Any) -> list[Any]:
    """With torch, returns the buffers of the model's own torch modules, each once.

    For torch, the layers of a model that Keras built are not its children.
    """
    found = {id(one): one for layer in model._flatten_layers() for one in layer.buffers()}
    return list(found.values())


class FurtherOptimizers:
    """The optimizers that a model has beside the one of `compile`, such as those of the two parts of a GAN.

    Only one that has stepped is read: an optimizer that came with a part of the model, and is not used, may be large.
    Keras creates most of an optimizer's variables at its first step, so restored values may have to wait until then.
    """

    def __init__(self, model: Any) -> None:
        """Finds them, and notes how far each has come."""
        known = {id(model.optimizer), id(getattr(model.optimizer, "inner_optimizer", None))}
        self._optimizers: dict[str, Any] = {}
        for number, layer in enumerate(model._flatten_layers()):
            for name, value in vars(layer).items():
                for path, found in _find_optimizers(value, f"{number}.{name}"):
                    if id(found) not in known:
                        known.add(id(found))
                        self._optimizers[path] = found
        self._began = {path: _count_steps(one) for path, one in self._optimizers.items()}

    def list_variables(self) -> list[Any]:
        """Returns the variables that exist."""
        return [variable for one in self._optimizers.values() for variable in one.variables]

    def read(self) -> dict[str, dict[str, Any]]:
        """Returns the live arrays of each optimizer that has stepped, by its place in the model."""
        return {
            path: {_name(number, variable): _live_array(variable) for number, variable in enumerate(one.variables)}
            for path, one in self._optimizers.items()
            if _count_steps(one) != self._began[path]
        }

    def write(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores them.

        Raises:
            UsageError: If an optimizer is missing, or has other variables.
        """
        for path, state in states.items():
            optimizer = self._optimizers.get(path)
            if optimizer is None:
                raise UsageError(
                    f"the checkpoint has an optimizer at {path.partition('.')[2]}, and the model has none there",
                    hint="Resume with the same optimizers.",
                )
            if not _assign(optimizer, state, path):
                _assign_once_built(optimizer, state, path)


def _find_optimizers(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield path, value
    elif isinstance(value, list | tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(part, keras.optimizers.Optimizer):
                yield f"{path}.{key}", part


def _count_steps(optimizer: Any) -> int:
    return int(keras.ops.convert_to_numpy(optimizer.iterations.value))


def _assign(optimizer: Any, state: Mapping[str, Any], path: str) -> bool:
    """Assigns what exists. Returns False if there is more, which the optimizer has yet to create."""
    variables = {_name(number, variable): variable for number, variable in enumerate(optimizer.variables)}
    if optimizer.built and not state.keys() <= variables.keys():
        missing = min(state.keys() - variables.keys())
        raise UsageError(
            f"the checkpoint has {missing} of the optimizer at {path.partition('.')[2]}, which it does not have here",
            hint="Resume with the same optimizers and the same trainable variables.",
        )
    for name, variable in variables.items():
        if name in state:
            variable.assign(state[name])
    return state.keys() <= variables.keys()


def _assign_once_built(optimizer: Any, state: Mapping[str, Any], path: str) -> None:
    def build(variables: Any) -> None:
        del optimizer.build
        with _outside_of_graphs():
            optimizer.build(variables)
            _assign(optimizer, state, path)

    optimizer.build = build


def _outside_of_graphs() -> AbstractContextManager[Any]:
    """TensorFlow traces the first step more than once: what an assignment does in a trace is gone with it."""
    if keras.backend.backend() != "tensorflow":
        return nullcontext()
    import tensorflow as tf

    lifted: AbstractContextManager[Any] = tf.init_scope()
    return lifted


def _name(number: int, variable: Any) -> str:
    path = str(variable.path or variable.name)
    return f"{number}." + re.sub(r"_\d+(?=[._]|$)", "", path.replace("/", "."))


def _find_pending(model: Any) -> dict[int, Any]:
    """With JAX, returns by a variable's identity what the variable will hold once the trainer writes its state back."""
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
    match keras.backend.backend():
        case "torch":
            return variable.value.detach()
        case "tensorflow":
            # Not a copy, and not writable: TensorFlow gives a variable other memory as long as its own is read.
            return np.asarray(variable.value.read_value())
        case _:
            return variable.value


def read_global_seed() -> list[int] | None:
    """Returns the state of the generator that random functions of Keras use without a seed; None if none did."""
    found = get_global_attribute("global_seed_generator")
    return None if found is None else [int(value) for value in keras.ops.convert_to_numpy(found.state)]


def write_global_seed(state: list[int] | None) -> None:
    """Restores it."""
    if state is not None:
        global_seed_generator().state.assign(state)


class _VariablesAdapter(Adapter):
    kind = "keras.variables"

    def state_of(self, obj: Variables, context: CaptureContext) -> Any:
        return obj.read()

    def begin_load(self, obj: Variables, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        _check_backend(stored)
        live = obj.read()
        value = loading.value(stored, live, rules=OWNED)
        return lambda: obj.write(live, loading.complete(value))

    def list_trained(self, obj: Variables) -> Iterable[str]:
        """See `Adapter`: all of a model, as what Keras does not train depends on what it trains."""
        return ("",) if obj.is_trained else ()

    def oversights_of(self, obj: Variables) -> Oversights:
        """See `Adapter`: an optimizer of torch may train these."""
        return Oversights(holds=obj.list_parameters())


def _check_backend(stored: Skeleton) -> None:
    """Raises `UsageError` if the variables were saved with another backend."""
    backend = keras.backend.backend()
    libraries = {library for tag, library in find_tags(stored) if tag == "array"}
    saved = next((name for name, library in _LIBRARIES.items() if library in libraries), backend)
    if _LIBRARIES[backend] not in libraries and saved != backend:
        raise UsageError(
            f"the run was saved with the {saved} backend of Keras, and this process uses {backend}, which shuffles "
            "the data and draws random numbers differently",
            hint=f"Set KERAS_BACKEND={saved} to resume it. To train on with {backend}, begin a new run with the "
            'weights and optimizer of this one: see "Another backend" on the page "Coming from Keras 3".',
        )


class Kept:
    """A tree of values that one function reads and another one writes, as one object to save."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self.write = read, write


register_adapter(Variables, _VariablesAdapter())
# What is in it depends on how far training is, so there is nothing to hold against.
register_adapter(
    Kept, StateAdapter("keras.fit", lambda obj: obj.read(), lambda obj, state: obj.write(state), compare=False)
)


def copy_small(variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Returns the small ones of the variables, each with a copy of its value."""
    return [
        (variable, np.array(keras.ops.convert_to_numpy(variable.value)))
        for variable in variables
        if math.prod(variable.shape) <= SMALL_ELEMENTS
    ]


def put_back(copies: Iterable[tuple[Any, Any]]) -> None:
    """Restores the values of `copy_small`."""
    for variable, value in copies:
        variable.assign(value)


class CallbackStates:
    """The state of the callbacks of one `fit`: their attributes that change, and the position of a `CSVLogger`."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._attributes = [Attributes(callback) for callback in callbacks]

    def read(self) -> list[dict[str, Any]]:
        """Returns the state of each of them, with the name of its class."""
        return [
            {"kind": type(one.obj).__name__, "attributes": one.read(), "written_bytes": _count_written(one.obj)}
            for one in self._attributes
        ]

    def write(self, states: Iterable[Mapping[str, Any]]) -> list[str]:
        """Restores the states, each into the next callback of that class.

        Returns:
            The classes for which there is no callback any more.
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
    """Removes the rows of epochs that will be trained again from a log."""
    if written_bytes is None or not isinstance(callback, keras.callbacks.CSVLogger):
        return
    file = callback.csv_file
    if file is None or file.closed:
        return
    if file.seek(0, 2) > written_bytes:
        file.truncate(written_bytes)
    # It has looked for the line of names before the rows were taken away.
    callback.append_header = file.seek(0, 2) == 0
