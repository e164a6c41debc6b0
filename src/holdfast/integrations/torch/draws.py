"""Random generators, and the counts and generators of samplers: the order of an epoch is drawn from these."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

_COUNTERS: Final = ("epoch", "seed", "initial_seed")
"""Attributes by which samplers choose the order of an epoch."""


def read_parts(loader: Any) -> list[dict[str, Any]]:
    """Returns the counts of a loader and its samplers, and the states of their own generators."""
    states = []
    for part in _list_parts(loader):
        state = {name: getattr(part, name) for name in _COUNTERS if type(getattr(part, name, None)) is int}
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            state["generator"] = generator.get_state().numpy().tobytes()
        states.append(state)
    return states


def write_parts(loader: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Restores what `read_parts` returned."""
    for part, state in zip(_list_parts(loader), states, strict=False):
        for name, value in state.items():
            if name != "generator":
                setattr(part, name, value)
                continue
            if not isinstance(part.generator, torch.Generator):
                part.generator = torch.Generator()
            part.generator.set_state(_tensor_of(value))


def _list_parts(loader: Any) -> list[Any]:
    """Returns the loader and all samplers under it, in an order that is the same in the next process."""
    parts, found = [loader], {id(loader)}
    for part in parts:
        for value in (getattr(part, "batch_sampler", None), getattr(part, "sampler", None)):
            if isinstance(value, Sampler | BatchSampler) and id(value) not in found:
                found.add(id(value))
                parts.append(value)
    return parts


def read_generators() -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy and torch (CPU), as plain values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, np.array(words, np.uint32).tobytes(), gauss],
        "numpy": [numpy_state[0], numpy_state[1].tobytes(), *numpy_state[2:]],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }


def write_generators(state: Mapping[str, Any]) -> None:
    """Puts back what `read_generators` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor_of(state["torch"]))


def _tensor_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
