"""Random generators, those and the counts of samplers, and streams: the order of an epoch follows from these."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from holdfast.integrations.attributes import (
    RANDOM,
    Attributes,
    is_random,
    read_python,
    register_generator,
    write_python,
)

_COUNTERS: Final = ("epoch", "seed", "initial_seed")
"""Attributes by which samplers choose the order of an epoch. A program may set them before anything is noted."""

_SKIPPED: Final = frozenset({"dataset", "data_source", "_iterator", "_IterableDataset_len_called"})
"""Attributes that lead to the data, or that a loader itself changes."""

_LOOKED_AT: Final = 64
"""A list or dict of more entries contains samples, and neither samplers nor generators."""

_LIBRARY: Final = "datasets."
"""The module of Hugging Face's streams and of all that they consist of."""


def note_parts(loader: Any) -> None:
    """Notes how a loader and its samplers look before they are used: `read_parts` returns what has changed since.

    Args:
        loader: A torch loader. The notes are kept in it.
    """
    _look_at(loader)


def read_parts(loader: Any) -> dict[str, dict[str, Any]]:
    """Returns what a loader and its samplers draw the order of their epochs from, as plain values.

    These are the states of random generators, and plain attributes that have changed since `note_parts`: counters, say,
    or lists that each epoch shuffles. Attributes that have not changed, such as a batch size, are the program's own.
    It includes all samplers under the loader; a sampler may have others as attributes of any name. So it does a stream.
    Nothing is drawn.
    """
    parts = {}
    for path, attributes in _look_at(loader).items():
        counters = {name: getattr(attributes.obj, name, None) for name in _COUNTERS}
        known = {name: value for name, value in counters.items() if type(value) is int}
        parts[path] = copy.deepcopy({**known, **attributes.read()})
    return parts


def write_parts(loader: Any, states: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
    """Restores what `read_parts` returned; also in the form of a list, as it was stored before."""
    noted = _look_at(loader)
    if not isinstance(states, Mapping):
        named = [path for path in noted if {*path.split(".")} <= {"", "batch_sampler", "sampler"}]
        kept = (path for path in named if isinstance(noted[path].obj, DataLoader | Sampler | BatchSampler))
        states = {path: _convert(state) for path, state in zip(kept, states, strict=False)}
    for path, attributes in noted.items():
        state = states.get(path, {})
        if RANDOM in (state.get("generator") or ()) and getattr(attributes.obj, "generator", None) is None:
            attributes.obj.generator = torch.Generator()
        attributes.write(state)


def _convert(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {RANDOM: value} if name == "generator" else value for name, value in state.items()}


def _look_at(loader: Any) -> dict[str, Attributes]:
    """Returns the loader and the samplers under it by their paths; parts that are new are noted as they are now."""
    if not hasattr(loader, "__dict__"):
        return {}  # Lightning takes a list for a loader.
    noted: dict[str, Attributes] = vars(loader).setdefault("_noted_parts", {})
    parts = _list_parts(loader)
    for path, part in parts:
        if path not in noted:
            noted[path] = Attributes(part, _SKIPPED)
        noted[path].obj = part  # The program may have put another one there.
    return {path: noted[path] for path, _ in parts}


def _list_parts(loader: Any) -> list[tuple[str, Any]]:
    """Returns the loader and all samplers under it, with paths that are the same in the next process."""
    parts, seen = [("", loader)], {id(loader)}
    for path, part in parts:
        for name, value in _list_members(part):
            if id(value) not in seen and (_is_sampler(value) or _holds_parts(value)):
                seen.add(id(value))
                is_row = isinstance(value, list | tuple | dict)
                parts.append((f"{path}.{name}", SimpleNamespace(**dict(_list_members(value))) if is_row else value))
    return parts


def _list_members(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, DataLoader):
        return ((name, getattr(part, name)) for name in ("batch_sampler", "sampler", "dataset"))
    if isinstance(part, list | tuple | dict):
        items = part.items() if isinstance(part, dict) else enumerate(part)
        return ((str(name), value) for name, value in items)
    return iter(getattr(part, "__dict__", {}).items())


def _holds_parts(value: Any) -> bool:
    """Returns True for a list, tuple or dict of samplers or generators."""
    return (
        isinstance(value, list | tuple | dict)
        and len(value) <= _LOOKED_AT
        and any(is_random(each) or _is_sampler(each) for _, each in _list_members(value))
    )


def _is_sampler(value: Any) -> bool:
    """Returns True for a sampler of any class, since torch asks only that it can be iterated; and for a stream.

    A stream of `datasets` is none: it draws from nothing that changes.
    """
    if isinstance(value, Sampler | BatchSampler):
        return True
    cls = type(value)
    if isinstance(value, Dataset | DataLoader):
        return isinstance(value, IterableDataset) and not cls.__module__.startswith(_LIBRARY)
    return hasattr(cls, "__iter__") and not hasattr(cls, "__getitem__") and hasattr(value, "__dict__")


def read_generators() -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy and torch (CPU), as plain values."""
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "python": read_python(random),
        "numpy": [numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def write_generators(state: Mapping[str, Any]) -> None:
    """Puts back what `read_generators` returned."""
    write_python(random, state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor_of(state["torch"]))


def _tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


register_generator(
    torch.Generator,
    lambda generator: generator.get_state().numpy().tobytes(),
    lambda generator, state: generator.set_state(_tensor_of(state)),
)


def has_state(obj: object) -> bool:
    """Returns True if an object has a position that can be read and restored."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def walk_stream(dataset: Any) -> Iterator[Any]:
    """Yields a stream and what it reads from, as far as these are streams too, or parts of those of `datasets`."""
    parts, seen = [dataset], {id(dataset)}
    for part in parts:
        yield part
        for value in getattr(part, "__dict__", {}).values():
            for each in value if isinstance(value, list | tuple) else (value,):
                is_known = isinstance(each, IterableDataset) or type(each).__module__.startswith(_LIBRARY)
                if is_known and id(each) not in seen:
                    seen.add(id(each))
                    parts.append(each)
