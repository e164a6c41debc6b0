"""The random generators that a whole process shares, as one object with state."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from holdfast.errors import UsageError
from holdfast.format.digests import derive, digest
from holdfast.format.records import Worker
from holdfast.state.adapters import Loading, StateAdapter
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import INTEGRATIONS, load_integrations, register_adapter


class RandomSource(msgspec.Struct, frozen=True):
    """One random generator that a whole process shares.

    Attributes:
        read: Returns its state as a tree of values, or None while the process does not use it.
        write: Takes such a tree.
        seed: Takes a number from 0 up to 2**64, exclusive, and sets the state that follows from it.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    seed: Callable[[int], object]


_sources: dict[str, RandomSource] = {}
_ON_CPU: Final = frozenset({"python", "numpy", "torch"})


def register_random_source(name: str, source: RandomSource) -> None:
    """Adds a generator to those that `RNG` and `undisturbed` handle, or replaces one."""
    _sources[name] = source


class RNG:
    """The state of the random generators that the whole process shares: Python's, NumPy's, and those of frameworks.

    Add it to a checkpoint (`Checkpoint(..., rng=RNG())`). NumPy and frameworks are included if the process has imported
    them. A stored generator that this process cannot have (of a missing device) is skipped.

    In a job of several workers each has its own generators. If the number of workers has changed since the save, they
    are reseeded from the saved state, differently on each worker; an event says so.
    """

    def __repr__(self) -> str:
        return f"RNG({', '.join(_sources)})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of every generator in use."""
        load_integrations()
        states = ((name, source.read()) for name, source in _sources.items())
        return {name: state for name, state in states if state is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores generators. Those that `state` does not name are left unchanged.

        Raises:
            UsageError: If it names a generator of a framework that this process has not imported.
        """
        check_known(state)
        for name, value in state.items():
            _sources[name].write(value)


def check_known(state: Mapping[str, Any]) -> None:
    """Checks that every generator in a state is one that this process may have.

    Raises:
        UsageError: If one belongs to a framework that the process has not imported.
    """
    load_integrations()
    for name in state:
        if name not in _sources:
            package = name.partition(".")[0]
            raise UsageError(
                f"the random state of {name!r} is stored, but this process has no such generator",
                hint=f"Import {package} before restoring." if package in INTEGRATIONS else "Register the source.",
            )


class _RNGAdapter(StateAdapter):
    is_per_worker = True

    def begin_anew(self, obj: Any, stored: Skeleton, worker: Worker) -> Callable[[], None] | None:
        saved = digest(json.dumps(stored, sort_keys=True).encode())
        return lambda: _seed_all(derive(int(saved[:16], 16), worker.world_size, worker.rank))

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        check_known(loading.children(stored))
        return super().begin_load(obj, stored, loading)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restores the process's generators after the block."""
    rng = RNG()
    state = rng.state_dict()
    try:
        yield
    finally:
        rng.load_state_dict(state)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """In the block, the generators on the CPU continue from a number; those before are restored after it."""
    states = [(source, source.read()) for name, source in _sources.items() if name in _ON_CPU]
    used = [(source, state) for source, state in states if state is not None]
    for place, (source, _) in enumerate(used):
        source.seed(derive(number, place))
    try:
        yield
    finally:
        for source, state in used:
            source.write(state)


def digest_generators() -> int:
    """Returns a number that follows from the states of the generators on the CPU."""
    ahead: list[Any] = [source.read() for name, source in _sources.items() if name in _ON_CPU]
    contents = []
    while ahead:
        value = ahead.pop()
        if isinstance(value, dict):
            ahead += value.values()
        elif hasattr(value, "tobytes") or hasattr(value, "numpy"):
            contents.append((value if hasattr(value, "tobytes") else value.numpy()).tobytes())
        else:
            contents.append(repr(value).encode())
    return int(digest(b"".join(contents))[:16], 16)


def _seed_all(number: int) -> None:
    load_integrations()
    for name, source in _sources.items():
        if source.read() is not None:
            source.seed(derive(number, int(digest(name.encode())[:16], 16)))


def _seed_numpy(number: int) -> None:
    import numpy as np

    np.random.seed([number & 0xFFFFFFFF, number >> 32])


def _read_numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _write_numpy(state: Any) -> None:
    import numpy as np

    np.random.set_state(state)


register_random_source("python", RandomSource(random.getstate, random.setstate, random.seed))
register_random_source("numpy", RandomSource(_read_numpy, _write_numpy, _seed_numpy))

register_adapter(
    RNG,
    # Which generators there are depends on what the process has imported so far, so there is nothing to hold against.
    _RNGAdapter("rng", RNG.state_dict, RNG.load_state_dict, last=True, compare=False),
)
register_adapter(
    random.Random,
    StateAdapter("python.random", lambda obj: obj.getstate(), lambda obj, state: obj.setstate(state), last=True),
)
