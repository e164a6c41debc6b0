"""Random generators, those and the counts of samplers, and streams: the order of an epoch follows from these."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeGuard

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from holdfast.format.digests import derive
from holdfast.state.data.attributes import (
    RANDOM,
    Attributes,
    is_random,
    read_python,
    register_generator,
    write_python,
)
from holdfast.state.data.replay import Watched

_COUNTERS: Final = ("epoch", "seed", "initial_seed")
"""Attributes by which samplers choose the order of an epoch. A program may set them before anything is noted."""

_SKIPPED: Final = frozenset({"dataset", "data_source", "_iterator", "_IterableDataset_len_called"})
"""Attributes that lead to the data, or that a loader itself changes."""

_LOOKED_AT: Final = 64
"""A list or dict of more entries contains samples, and neither samplers nor generators."""

_OWN: Final = "_kept_draws"
_STATE: Final = "loader"
_MOST_SEEDS: Final = 2
"""How many numbers torch's loaders draw when they begin: a seed for the workers, and one that they share."""

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


def write_parts(
    loader: Any, states: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]], *, begins_again: bool = False
) -> None:
    """Restores what `read_parts` returned; also in the form of a list, as it was stored before.

    Args:
        loader: A torch loader.
        states: What `read_parts` returned.
        begins_again: True to delete the attributes that samplers have made since `note_parts`, unless they are in it.
    """
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
        if begins_again:
            attributes.forget_new(state)


def write_arrays(loader: Any, states: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
    """Restores the arrays alone: those that training changes within an epoch, such as the weights of samples.

    The order of the epoch was drawn from what they had at its beginning, the next one is drawn from what they have now.
    """
    kept = states if isinstance(states, Mapping) else {}
    for path, attributes in _look_at(loader).items():
        for name, value in kept.get(path, {}).items():
            if isinstance(value, np.ndarray | torch.Tensor):
                setattr(attributes.obj, name, copy.deepcopy(value))


def seed_parts(loader: Any, number: int) -> None:
    """Seeds the random generators of a loader and its samplers, each in its own way, and each differently."""
    values = (value for attributes in _look_at(loader).values() for value in vars(attributes.obj).values())
    for place, value in enumerate(values):
        seed = derive(number, place)
        if isinstance(value, torch.Generator):
            value.manual_seed(seed)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = type(value.bit_generator)(seed).state
        elif isinstance(value, np.random.RandomState):
            value.seed(seed >> 32)
        elif isinstance(value, random.Random):
            value.seed(seed)


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
            if id(value) not in seen and (_is_sampler(value) or _holds_parts(value) or _is_record(value)):
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


def _is_record(value: Any) -> bool:
    """Returns True for an object of a dataclass that may change, such as a sampler's count of its epochs."""
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and not params.frozen and hasattr(value, "__dict__") and not isinstance(value, Dataset)


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


class KeptDraws(Watched):
    """The source of the epoch of a loader with a state of its own; the loader is changed in place.

    A loader skips the samples that were trained, in an order that its sampler draws again. So the generators are noted
    when the sampler draws, and are as they were then when it draws for a restored position. What the loader itself
    draws when it begins there, where only a resumed job begins, does not count.

    Attributes:
        draws_along: True if the sampler draws from generators of the whole process while it is iterated.
        loads: How often a position was loaded.
    """

    def __init__(self, loader: Any) -> None:
        """Follows the iterations of a loader from now on."""
        # A loader that is in no cycle ends its workers as soon as it is gone.
        self._loader, self._sampler = weakref.ref(loader), _find_sampler(loader)
        # Not the loader and the samplers with a state of their own: this restores them.
        self._parts = SimpleNamespace(generator=loader.generator, sampler=self._sampler)
        note_parts(self._parts)
        self._begun: dict[str, Any] | None = None
        self._restored: Mapping[str, Any] | None = None
        self._repeated: Mapping[str, Any] | None = None
        self._has_ended = self.draws_along = False
        self.loads = 0
        # torchdata's loader knows by itself whether a stored iteration had ended.
        self._knows_end = hasattr(loader, "next_iter_state")
        _override(
            loader,
            self,
            __iter__=lambda each: _GivenOut(vars(each)[_OWN]),
            _get_iterator=lambda each: vars(each)[_OWN].open(_own_method(each, "_get_iterator")),
        )
        if self._sampler is not None:
            draw: Callable[[Any], Any] = lambda each: vars(each)[_OWN].draw(_own_method(each, "__iter__"))  # noqa: E731
            _override(self._sampler, self, __iter__=draw)
        # One that begins before the run does not know the position that the run restores.
        if (begun := getattr(loader, "_iterator", None)) is not None and not getattr(begun, "_finished", False):
            _override(begun, self, __next__=_take_early)

    @property
    def loader(self) -> Any:
        """The loader."""
        return self._loader()

    @property
    def has_sampler(self) -> bool:
        """True if the loader's own state lacks what its sampler draws."""
        return self._sampler is not None

    def state_dict(self) -> Any:
        """Returns the loader's own state, with what it lacks; a restored one until the loader begins."""
        if self._restored is not None:
            return self._restored
        own, length = self.loader.state_dict(), _count_ordered(self.loader)
        if self._knows_end and not self.has_sampler and self.loader.generator is None and length is None:
            return own
        parts = read_parts(self._parts)
        return {_STATE: own, "draws": self._begun, "parts": parts, "ended": self._has_ended, "length": length}

    def find_difference(self, state: Any) -> str:
        """Returns why the loader cannot go on at a stored position; an empty string if it can."""
        own, live = state[_STATE] if _is_whole(state) else state, self.loader.num_workers
        if self._knows_end and isinstance(own, Mapping) and own:
            stored = own.get("_snapshot", {}).get("_main_snapshot", {}).get("_num_workers", 0)
            if stored != live:
                return f"stored a position of num_workers={stored}, live {live}; create the loader with {stored}"
        length = state.get("length") if _is_whole(state) and not state["ended"] else None
        present = _count_ordered(self.loader)
        if length is None or present is None or length == present:
            return ""
        return (
            f"stored a position within an epoch over {length} samples, live {present}, of which some would come twice "
            "and others not at all; finish the epoch with the data that it began with"
        )

    def load_state_dict(self, state: Any) -> None:
        """Loads the loader's own state, and nothing begins yet."""
        self.loader.load_state_dict(state[_STATE] if _is_whole(state) else state)
        if _is_whole(state):
            write_parts(self._parts, state["parts"])
        self._restored = state
        self._repeated, self.loads = None, self.loads + 1

    def iterate(self) -> Iterator[Any]:
        """Begins an iteration of the loader."""
        self._has_ended = False
        return iter(_own_method(self.loader, "__iter__")())

    def note_end(self) -> None:
        """Called when a loop has asked for a batch after the last one."""
        self._has_ended = True

    def open(self, make: Callable[[], Any]) -> Any:
        """Returns what `make` does: the iterator over an epoch, or over the rest of a restored one."""
        restored, self._restored = self._restored, None
        lacked = restored if _is_whole(restored) else {}
        if restored is None or (lacked.get("ended") and not self._knows_end):
            return make()
        parts, before = read_parts(self._parts), torch.get_rng_state()
        self._repeated = lacked.get("draws")
        try:
            batches = make()
        finally:
            self._repeated = None
        # What an old state lacks, torchdata's own samplers may have restored.
        if lacked:
            write_parts(self._parts, parts)
        _undo_seeds(before)
        return batches

    def draw(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns an iterator of the sampler, drawn again if that is the restored one."""
        repeated, now = self._repeated, read_generators()
        if repeated is None:
            noted = self._begun = {"iter": now, "next": None, "parts": read_parts(self._parts)}
            return self._note_first(begin(), noted)
        write_generators(repeated["iter"])
        write_parts(self._parts, repeated["parts"])
        self._begun = {**repeated}
        indices = begin()
        # Some draw when they are iterated, others with the first index.
        begun = read_parts(self._parts)
        write_generators(now)
        return self._draw_first(indices, repeated, begun)

    def _note_first(self, indices: Iterator[Any], noted: dict[str, Any]) -> Iterator[Any]:
        now = read_generators()
        # A loader may have drawn in between.
        noted["next"] = None if now == noted["iter"] else now
        for index in indices:
            yield index
            break
        now = read_generators()
        for index in indices:
            self.draws_along = self.draws_along or read_generators() != now
            yield index
            break
        yield from indices

    def _draw_first(self, indices: Iterator[Any], drawn: Mapping[str, Any], begun: Mapping[str, Any]) -> Iterator[Any]:
        now = read_generators()
        write_generators(drawn["next"] or drawn["iter"])
        write_parts(self._parts, begun)
        first = list(zip(range(1), indices, strict=False))
        write_generators(now)
        yield from (index for _, index in first)
        yield from indices


def _own_method(self: Any, name: str) -> Callable[[], Any]:
    """Returns a method of the class that a followed object had before."""
    return partial(getattr(type(self).__base__, name), self)


def _take_early(self: Any) -> Any:
    """An iterator from before the run goes on at a position that was loaded, or begins as the run can note it down."""
    draws: KeptDraws = vars(self)[_OWN]
    if "_follower" not in vars(self):
        begins_anew = draws.loads or (draws.has_sampler and not vars(self).get("_num_yielded"))
        vars(self)["_follower"] = iter(draws.loader) if begins_anew else None
    follower = vars(self)["_follower"]
    return _own_method(self, "__next__")() if follower is None else next(follower)


class _GivenOut(Iterator[Any]):
    """The batches of one iteration, as a loop takes them; at a newly loaded position it goes on there."""

    def __init__(self, draws: KeptDraws) -> None:
        self._draws, self._loader = draws, draws.loader
        self._loads, self._batches = draws.loads, draws.iterate()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        if self._loads != self._draws.loads:
            self._loads, self._batches = self._draws.loads, self._draws.iterate()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._draws.note_end()
            raise
        if self._draws.see is not None:
            self._draws.see(batch)
        return batch


def keep_draws(loader: Any) -> KeptDraws:
    """Returns what a loader's epochs are drawn from, and follows it from now on."""
    return vars(loader).get(_OWN) or KeptDraws(loader)


def _is_whole(state: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(state, Mapping) and state.keys() - {"length"} == {_STATE, "draws", "parts", "ended"}


def _count_ordered(loader: Any) -> int | None:
    """Returns of how many samples a loader chooses the order; None if it takes them as they come."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    is_plain = batches is sampler or type(batches).__module__.startswith(("torch.utils.data", "torchdata."))
    if isinstance(loader.dataset, IterableDataset) or (is_plain and type(sampler) is SequentialSampler):
        return None
    with suppress(TypeError, NotImplementedError):
        return len(loader.dataset)
    return None


def _override(obj: Any, draws: KeptDraws, **methods: Callable[[Any], Any]) -> None:
    own = type(obj)
    vars(obj)[_OWN] = draws
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    obj.__class__ = type(own.__name__, (own,), {**names, **methods})


def _find_sampler(loader: Any) -> Any:
    """Returns the sampler whose draws are in no state; None if it draws nothing, or nothing that is not kept."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler).__module__.startswith("torchdata."):
        sampler = getattr(sampler, "sampler", sampler)
    # A class of the program's own may draw in another order than the sampler in it.
    inner = sampler.sampler if type(sampler) is BatchSampler else sampler
    is_kept = type(inner).__module__.startswith("torchdata.") or hasattr(sampler, "load_state_dict")
    draws_none = type(inner) in (SequentialSampler, DistributedSampler) or not hasattr(sampler, "__dict__")
    return None if is_kept or draws_none else sampler


def _undo_seeds(before: torch.Tensor) -> None:
    """Sets torch's generator as it was before a loader began, unless more than its own seeds has changed it.

    A dataset whose state contains that of the generator sets it when it is loaded.
    """
    after, generator = torch.get_rng_state(), torch.Generator()
    generator.set_state(before)
    for _ in range(_MOST_SEEDS):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        if torch.equal(generator.get_state(), after):
            torch.set_rng_state(before)


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
