"""The place in any iterable that gives the same again when it is begun the same: a list, a stream, a pipeline."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from holdfast.errors import UsageError
from holdfast.format.digests import derive
from holdfast.state.data.replay import describe_reading, read_past
from holdfast.state.rng import RNG, digest_generators, seeded, undisturbed

_METHODS: Final = (("state_dict", "load_state_dict"), ("get_state", "set_state"))

_QUICKER: Final = (
    "A torch DataLoader of a dataset with indices, a holdfast.ResumableDataLoader, and an iterable with state_dict and "
    "load_state_dict continue at once"
)


class _OwnState(NamedTuple):
    """Reads and restores a state that an iterable, or its iterator, has of its own."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


class ReadPlace:
    """How many batches training has taken in a pass through an iterable, and the way back there.

    If the iterable or its iterator has a state of its own, that is stored. Otherwise the generators of the process, and
    those of the iterable, are stored as they were when the pass began: a restart begins the pass with them again, reads
    what was trained, and then puts the generators of the process back. If a later batch than the first one draws from
    those on the CPU, they are seeded for each batch, and restored after it: training draws from them as well.

    Attributes:
        caveat: What a restart has to do; empty if there is nothing to say.
        remark: Always empty: what has changed in the data is not known here.
        resumes: True if the next pass begins at the restored batch.
        lookahead: How many of the batches that were taken are not trained yet.
    """

    remark = ""

    def __init__(self, data: Any) -> None:
        """Follows an iterable, or a function that returns one.

        Raises:
            UsageError: If it can be iterated only once, or not at all.
        """
        kind, name = type(data), getattr(data, "__name__", type(data).__name__)
        if hasattr(kind, "__next__"):
            raise UsageError(
                f"run.batches needs data that can be iterated again from its beginning, got the iterator {name}",
                hint="Pass the DataLoader, dataset or list itself, not iter(...), enumerate(...) or zip(...) of it. Of "
                "a generator pass the function: run.batches(read), not run.batches(read()).",
            )
        is_iterable = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
        if not is_iterable and not callable(data):
            raise UsageError(f"run.batches needs an iterable, such as a DataLoader or a list, got {name}")
        self._data, self._name = data, name
        # The state of a stream of `datasets` leaves out what is in its shuffle buffer.
        self._keeps_own = not kind.__module__.startswith("datasets.") and _find_state(data) is not None
        self._own = _find_state(data) if self._keeps_own else None
        self._states: list[Any] = []
        self._attributes = _note_attributes(data) if is_iterable and not self._keeps_own else None
        self.caveat = "" if self._keeps_own or kind in (list, tuple, range) else describe_reading(name, _QUICKER)
        self.resumes, self.lookahead = False, 0
        self._taken = 0
        # How many passes have begun, including those of earlier processes, and how many iterators were made for them.
        self._begun = self._made = 0
        # True if batches draw from the generators of the process; None before that is known.
        self._draws: bool | None = False if kind in (list, tuple, range) else None
        self._begin: dict[str, Any] | None = None
        self._restored: Mapping[str, Any] | None = None

    def outline(self) -> Mapping[str, Any]:
        """See `LoaderPlace`."""
        taken = self._taken - self.lookahead if self._restored is None else self._restored["taken"]
        return {"taken": max(taken, 0), "total": _length_of(self._data)}

    def describe(self) -> object:
        """See `LoaderPlace`."""
        return [_length_of(self._data)]

    def state_dict(self) -> dict[str, Any]:
        """See `LoaderPlace`."""
        if self._restored is not None:
            return dict(self._restored)  # Nothing was taken since it was restored.
        state = {"begin": self._begin, "taken": self.outline()["taken"], "stream": None, "draws": self._draws}
        state |= {"parts": self._read_parts(), "begun": self._begun}
        if self._own is not None and (self._keeps_own or self._begin is not None):
            state["stream"] = self._states[0] if self.lookahead and self._states else self._own.read()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `LoaderPlace`."""
        self._restored, self._begin, self.resumes = state, None, state["begin"] is not None
        self._draws, self._begun = state["draws"], state["begun"] - self.resumes
        if self.resumes:
            return
        if self._attributes is not None:
            self._attributes.write(state["parts"])
        if self._keeps_own and self._own is not None and state["stream"] is not None:
            self._own.write(state["stream"])

    def forget(self) -> None:
        """See `LoaderPlace`."""
        self._begin, self.resumes = None, False
        if self._restored is not None:
            self._restored = {**self._restored, "begin": None, "taken": 0}
            self.load_state_dict(self._restored)

    def start(self) -> Iterator[Any]:
        """See `LoaderPlace`."""
        state, self._restored = self._restored if self.resumes else None, None
        self.resumes, self._states = False, []
        if state is None:
            self._taken = 0
            generators = {"generators": RNG().state_dict(), "key": digest_generators()}
            self._begin = {**generators, "parts": self._read_parts()}
            return self._follow(self._open(None))
        self._begin, self._taken = dict(state["begin"]), state["taken"]
        with undisturbed():
            RNG().load_state_dict(self._begin["generators"])
            if self._attributes is not None:
                self._attributes.write(self._begin["parts"])
            batches, first = self._open(state["stream"]), []
            if self._own is None or state["stream"] is None:
                read_past(map(partial(self._next, batches), range(self._taken)), self._taken, self._name)
            if not self._taken:
                first = [*itertools.islice(batches, 1)]
        return self._follow(itertools.chain(first, batches))

    def _open(self, stream: Any) -> Iterator[Any]:
        """Begins a pass; at a state of its own, if there is one."""
        if self._keeps_own and self._own is not None and stream is not None:
            self._own.write(stream)
        is_function = not hasattr(self._data, "__iter__") and callable(self._data)
        batches: Iterator[Any] = iter(self._data() if is_function else self._data)
        self._begun, self._made = self._begun + 1, self._made + 1
        while self._made < self._begun and type(self._data).__module__.startswith("tensorflow."):
            batches, self._made = iter(self._data), self._made + 1  # A shuffle of tf.data draws a seed for each.
        if not self._keeps_own and (own := _find_state(batches)) is not None:
            self._own, self.caveat = own, ""
            if stream is not None:
                own.write(stream)
        return batches

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in map(partial(self._next, batches), itertools.count(self._taken)):
            self._taken += 1
            yield batch
        self._begin = None

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        """Returns the batch of that number, the first of which may draw the order of the pass."""
        if self.lookahead and self._own is not None:
            self._states = [*self._states, self._own.read()][-self.lookahead :]
        if number == 0 or self._draws is False or self._begin is None:
            return next(batches)
        with seeded(derive(self._begin["key"], number)):
            before = digest_generators() if self._draws is None else 0
            batch = next(batches)
            if self._draws is None:
                self._draws = digest_generators() != before
        return batch

    def _read_parts(self) -> dict[str, Any]:
        return {} if self._attributes is None else copy.deepcopy(self._attributes.read())


def _note_attributes(data: Any) -> Any:
    """Returns the attributes of an object that may change, such as its random generators; None if it has none."""
    if not getattr(data, "__dict__", None):
        return None
    from holdfast.state.data.attributes import Attributes  # It imports NumPy.

    return Attributes(data)


def _find_state(obj: Any) -> _OwnState | None:
    for read, write in _METHODS:
        if callable(getattr(obj, read, None)) and callable(getattr(obj, write, None)):
            return _OwnState(getattr(obj, read), getattr(obj, write))
    return None


def _length_of(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None
