"""Where `fit` stands in its data, and how it takes up the data there without loading again what was trained.

`fit` makes an `EpochIterator` before the first callback is called, and iterates it once an epoch. The order of an epoch
is drawn when its iterator is made, from the generators that the process shares. So what they were then, and how many
batches were taken since, say where the data is: they are set back, the order is drawn once more, and the batches that
were trained are left out where they are indices still.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty
from typing import Any, Final, Protocol

import keras
import msgspec
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from msgspec.structs import replace

from holdfast.errors import UsageError
from holdfast.integrations.keras.state import Attributes
from holdfast.state.rng import RNG, undisturbed

_NOTHING: Final = object()


class PlaceInData(msgspec.Struct):
    """Where training stands in an epoch.

    Attributes:
        step: How many batches of the epoch are trained.
        is_complete: Whether these are all, and the epoch has not ended yet.
        opening: What the random generators were when the present pass through the data began; None if none has.
        drawing: What they were when its first batch was asked for, if that was not at once; the order is drawn then.
        is_renewed: Whether workers that load were there already.
        taken: How many batches of the pass were taken.
    """

    step: int = 0
    is_complete: bool = False
    opening: Any = None
    drawing: Any = None
    is_renewed: bool = False
    taken: int = 0


class Listener(Protocol):
    """What is known of the way through an epoch."""

    def begin_batches(self) -> None:
        """The callbacks have begun the epoch, and no batch is taken yet."""

    def take_up(self) -> None:
        """The data stands where it stood when training was interrupted."""

    def end_step(self, *, is_last: bool) -> None:
        """A batch is trained, and all callbacks have seen that; the epoch has more of them, if it is not the last."""

    def stand_still(self) -> Iterator[Any]:
        """Gives `fit` what looks like a step and trains nothing."""


class Feed:
    """The batches of one `fit`. It holds the `EpochIterator` that it is put into by a weak reference.

    Attributes:
        place: Where training stands.
        source: The data.
    """

    def __init__(self, iterator: Any, listener: Listener) -> None:
        self.place = PlaceInData()
        self.source = _find_source(iterator)
        self._iterator: Any = weakref.proxy(iterator)
        self._class = type(iterator)
        self._listener: Any = weakref.proxy(listener)
        # Where to take up the data, until that is done.
        self._resumed: PlaceInData | None = None
        self._pending: PlaceInData | None = None
        self._opening: Any = None
        iterator._enumerate_iterator = self._enumerate
        iterator._get_iterator = self._get_iterator

    @property
    def counts_batches(self) -> bool:
        """Whether it is known which batch is the last one of an epoch."""
        return bool(self._iterator.steps_per_epoch or self._iterator.data_adapter.num_batches)

    def resume(self, place: PlaceInData) -> None:
        """Takes the data up at that place, in the epoch that begins next."""
        self.place = place
        self._resumed = place
        is_within = place.step and not place.is_complete
        self._pending = place if place.opening is not None and (is_within or self._is_kept_over_epochs()) else None

    def read_random(self) -> dict[str, Any]:
        """The generators that the process shares, and those of the data's own."""
        return {"shared": RNG().state_dict(), "own": [one.get_state() for one in self.source.generators()]}

    def write_random(self, state: dict[str, Any]) -> None:
        """Sets them back."""
        RNG().load_state_dict(state["shared"])
        for generator, value in zip(self.source.generators(), state["own"], strict=False):
            generator.set_state(value)

    def end_epoch(self) -> PlaceInData:
        """The next epoch begins with its first batch; an iterator that is kept for it goes on where it is."""
        if self._is_kept_over_epochs():
            return replace(self.place, step=0, is_complete=False, taken=self._iterator._steps_seen)
        return PlaceInData()

    def release(self) -> None:
        """Leaves the `EpochIterator` as Keras has made it, if it is still there."""
        with suppress(ReferenceError, AttributeError):
            del self._iterator._enumerate_iterator, self._iterator._get_iterator

    def _is_kept_over_epochs(self) -> bool:
        return bool(self._iterator.steps_per_epoch)

    def _enumerate(self) -> Generator[Any, None, None]:
        """In the place of `EpochIterator._enumerate_iterator`: the steps that are left of an epoch."""
        iterator = self._iterator
        resumed, self._resumed = self._resumed, None
        self._listener.begin_batches()
        if resumed is not None and resumed.is_complete:
            yield from self._listener.stand_still()
            return
        if not self._is_kept_over_epochs():
            if self._pending is not None:
                self.write_random(self._pending.opening)
            self._opening = self.read_random()
        if self._pending is not None:
            self.source.prepare(self._pending.taken)
        kept = self._pending if self._is_kept_over_epochs() else None
        steps = self._class._enumerate_iterator(iterator)
        step = 0 if resumed is None else resumed.step
        item = next(steps, _NOTHING)
        if kept is not None:
            iterator._steps_seen += kept.taken - step
        for _ in range(step // iterator.steps_per_execution):
            item = next(steps, _NOTHING)
        if resumed is not None and resumed.step:
            self._listener.take_up()
        while item is not _NOTHING:
            taken = iterator._steps_seen
            if self._is_kept_over_epochs() and taken == iterator.steps_per_execution:
                self.place.drawing = self.read_random()
            place = replace(self.place, step=step + iterator.steps_per_execution, is_complete=False, taken=taken)
            yield item
            step = place.step
            item = next(steps, _NOTHING)
            if item is not _NOTHING:
                self.place = place
                self._listener.end_step(is_last=False)
        self.place = replace(self.place, step=step, is_complete=True, taken=iterator._steps_seen)
        self._listener.end_step(is_last=True)

    def _get_iterator(self) -> Any:
        """In the place of `EpochIterator._get_iterator`: notes with which random numbers a pass begins."""
        pending, self._pending = self._pending, None
        if pending is None:
            opening = self.read_random() if self._opening is None else self._opening
            self.place = replace(self.place, opening=opening, drawing=None, is_renewed=self.source.is_renewed())
            self._opening = None
            return self._make()
        self._opening = None
        present = self.read_random() if self._is_kept_over_epochs() else None
        if present is not None:
            self.write_random(pending.opening)
        self.source.renew(pending.is_renewed)
        made = self.source.take_up(self._make, pending.taken, partial(self._draw_again, pending))
        if present is not None:
            self.write_random(present)
        return made

    def _draw_again(self, pending: PlaceInData) -> None:
        """What gives the batches is made; now their order is drawn."""
        if pending.drawing is not None:
            self.write_random(pending.drawing)

    def _make(self) -> Any:
        return self._class._get_iterator(self._iterator)


def make_step(model: Any) -> Any:
    """What an `EpochIterator` gives for one step, with an iterator that gives nothing to train."""
    scratch = EpochIterator(np.zeros((1, 1)))
    *numbers, _ = next(scratch._enumerate_iterator())
    return (*numbers, itertools.repeat(None))


class _Source:
    """Data that can only be taken up by loading what was trained, and leaving it out then.

    Attributes:
        remark: Why a resumed epoch is slow, or not exact; empty if it is neither.
    """

    def __init__(self, adapter: Any, name: str = "") -> None:
        self._adapter: Any = weakref.proxy(adapter)
        self.remark = name and (
            f"{name} can only be read from its beginning: if a run is resumed within an epoch, it reads the "
            "batches that were trained before and discards them. Arrays, a keras.utils.PyDataset and a torch "
            "DataLoader of a map-style dataset resume at once"
        )

    def generators(self) -> list[Any]:
        """The random generators of the data's own."""
        return []

    def read(self) -> dict[str, Any]:
        """State of the data's own."""
        return {}

    def write(self, state: dict[str, Any]) -> None:
        """Puts that back."""

    def prepare(self, taken: int) -> None:
        """An epoch begins within which so many batches were taken."""

    def is_renewed(self) -> bool:
        """Whether there are workers from an earlier pass, which load for the next one too."""
        return False

    def renew(self, is_renewed: bool) -> None:
        """Makes that as it was when the pass began."""

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """An iterator behind so many batches.

        Args:
            make: Makes what gives batches from the beginning.
            taken: How many to leave out.
            draw: Called between that and the first look at the batches.
        """
        batches = iter(make())
        draw()
        for _ in range(taken):
            next(batches)
        return batches


class _Arrays(_Source):
    """Arrays that are cut into batches by their indices."""

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `_Source`."""
        if keras.backend.backend() == "torch":
            return begin_behind(make(), taken, draw)
        adapter = self._adapter

        def leave_out(convert: Callable[..., Any], inputs: Any) -> Any:
            is_passing = [True]

            def cut(sliceable: Any, indices: Any = None) -> Any:
                return None if is_passing else convert(sliceable, indices=indices)

            del adapter._get_iterator
            batches = ArrayDataAdapter._get_iterator(adapter, cut, inputs)
            draw()
            for _ in range(taken):
                next(batches)
            is_passing.clear()
            return batches

        adapter._get_iterator = leave_out
        return _begin(adapter, make)


def _begin(adapter: Any, make: Callable[[], Any]) -> Any:
    """Iterates what `make` makes, and sees to it that the adapter is asked for its batches now.

    With JAX and a distribution it would be asked with the first batch only, when the generators stand elsewhere.
    """
    batches = iter(make())
    if "_get_iterator" in adapter.__dict__:
        batches = itertools.chain([next(batches)], batches)
    return batches


class _Loader(_Source):
    """A `DataLoader` of torch."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter, "an IterableDataset")
        self._loader = adapter._dataloader
        self._is_by_index = hasattr(self._loader.dataset, "__getitem__") and hasattr(self._loader.dataset, "__len__")
        own = (self._loader, self._loader.batch_sampler, self._loader.sampler)
        if any(hasattr(one, "state_dict") for one in own):
            raise UsageError(
                f"{type(self._loader).__name__} has a position of its own, which fit advances before it trains",
                hint="Pass a plain DataLoader to fit: its position is saved without a stateful sampler.",
            )
        if self._is_by_index:
            self.remark = ""
        self._owners = [*own, getattr(self._loader.batch_sampler, "sampler", None)]
        samplers = {id(one): one for one in self._owners[1:] if hasattr(one, "__dict__")}
        self._samplers = [_SamplerState(one) for one in samplers.values()]

    def generators(self) -> list[Any]:
        """See `_Source`: with what samplers count by themselves."""
        found = [getattr(owner, "generator", None) for owner in self._owners]
        return [*{id(one): one for one in found if hasattr(one, "get_state")}.values(), *self._samplers]

    def is_renewed(self) -> bool:
        """See `_Source`."""
        return getattr(self._loader, "_iterator", None) is not None

    def renew(self, is_renewed: bool) -> None:
        """See `_Source`: a pass that makes its workers draws one number more than others."""
        loader = self._loader
        if not is_renewed:
            loader._iterator = None
        elif loader._iterator is None:
            with _sampling(loader, ()), undisturbed():
                loader._iterator = loader._get_iterator()
            loader._iterator._index_sampler = _sampler_of(loader)

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `_Source`."""
        if not self._is_by_index:
            return super().take_up(make, taken, draw)
        batches = begin_behind(self._loader, taken, draw)
        if keras.backend.backend() == "torch":
            return batches
        self._adapter._dataloader = _Once(self._adapter, self._loader, batches)
        return make()


class _SamplerState:
    """The attributes of a sampler, such as an epoch that it counts, by the names of those of torch's generators."""

    def __init__(self, sampler: Any) -> None:
        attributes = Attributes(sampler)
        self.get_state, self.set_state = attributes.read, attributes.write


class _Once:
    """Stands for a loader until it is iterated, and hands out an iterator that is made already."""

    def __init__(self, adapter: Any, loader: Any, batches: Any) -> None:
        self._adapter, self._loader, self._batches = adapter, loader, batches

    def __iter__(self) -> Any:
        self._adapter._dataloader = self._loader
        return self._batches


def begin_behind(loader: Any, taken: int, draw: Callable[[], None]) -> Any:
    """An iterator over a loader behind so many batches: what they are is drawn, and they are not loaded."""
    behind = _Behind(_sampler_of(loader), taken)
    workers = getattr(loader, "_iterator", None)
    if workers is not None:
        # They go on, and take their indices from the sampler that they have met first.
        plain, workers._index_sampler = workers._index_sampler, behind
        batches = iter(loader)
        workers._index_sampler = plain
    else:
        with _sampling(loader, behind):
            batches = iter(loader)
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator._index_sampler = _sampler_of(loader)
    draw()
    behind.draw()
    return batches


def _sampler_of(loader: Any) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


@contextmanager
def _sampling(loader: Any, sampler: Any) -> Iterator[None]:
    """In the block, the loader takes its indices from another sampler. It lets no one set that as an attribute."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    plain = loader.__dict__[name]
    loader.__dict__[name] = sampler
    try:
        yield
    finally:
        loader.__dict__[name] = plain


class _Behind:
    """A sampler that leaves out what was trained when it is iterated first."""

    def __init__(self, sampler: Any, taken: int) -> None:
        self._sampler, self._taken = sampler, taken
        self._indices: Any = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self._sampler)
        return self._draw_each(self._indices)

    def _draw_each(self, indices: Iterator[Any]) -> Iterator[Any]:
        self.draw()
        yield from indices

    def draw(self) -> None:
        """Draws what is left out, unless that is done."""
        taken, self._taken = self._taken, 0
        for _ in range(taken):
            next(self._indices)


class _Dataset(_Source):
    """A `keras.utils.PyDataset`."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._dataset = adapter.py_dataset
        has_state = hasattr(self._dataset, "state_dict") and hasattr(self._dataset, "load_state_dict")
        self._own = self._dataset if has_state else None
        self._attributes = Attributes(self._dataset)
        if adapter.enqueuer is not None:
            # To build the model, `fit` has looked at a batch; what workers have loaded then would be trained first.
            # On a slow machine Keras leaves some of it among what is still being loaded.
            for queue in (adapter.enqueuer.ready_queue, adapter.enqueuer.future_queue):
                with suppress(Empty):
                    while True:
                        queue.get_nowait()

    def read(self) -> dict[str, Any]:
        """See `_Source`: with attributes that change, such as an order that is shuffled at the end of an epoch."""
        state: dict[str, Any] = self._attributes.read() if self._own is None else self._own.state_dict()
        return state

    def write(self, state: dict[str, Any]) -> None:
        """See `_Source`."""
        if self._own is not None:
            self._own.load_state_dict(state)
        else:
            self._attributes.write(state)

    def prepare(self, taken: int) -> None:
        """See `_Source`. Workers begin to load as soon as the epoch begins, so they have to know what to leave out."""
        adapter, number = self._adapter, self._dataset.num_batches
        order = list(range(taken if number is None else number))
        if adapter.shuffle and number is not None:
            state = random.getstate()
            random.shuffle(order)
            random.setstate(state)
        passing = _Passing(self._dataset, frozenset(order[:taken]))
        adapter.py_dataset = passing
        if adapter.enqueuer is not None:
            adapter.enqueuer.py_dataset = passing

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `_Source`."""
        adapter, dataset = self._adapter, self._dataset

        def leave_out() -> Any:
            del adapter._get_iterator
            batches = PyDatasetAdapter._get_iterator(adapter)
            draw()
            for _ in range(taken):
                next(batches)
            adapter.py_dataset = dataset
            if adapter.enqueuer is not None:
                adapter.enqueuer.py_dataset = dataset
            return batches

        adapter._get_iterator = leave_out
        return _begin(adapter, make)


class _Passing:
    """Stands for a `PyDataset`, and gives nothing in the place of batches that were trained."""

    def __init__(self, dataset: Any, passed: frozenset[int]) -> None:
        self._dataset, self._passed = dataset, passed

    def __getitem__(self, index: int) -> Any:
        return {} if index in self._passed else self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_passed"):
            raise AttributeError(name)  # It is being made again in another process.
        return getattr(self._dataset, name)


def _find_source(iterator: Any) -> _Source:
    adapter = iterator.data_adapter
    if isinstance(adapter, ArrayDataAdapter):
        return _Arrays(adapter)
    if isinstance(adapter, TorchDataLoaderAdapter):
        return _Loader(adapter)
    if isinstance(adapter, PyDatasetAdapter):
        source = _Dataset(adapter)
        if adapter.enqueuer is not None and iterator.steps_per_epoch:
            source.remark = (
                "the position of a PyDataset with workers cannot be saved if steps_per_epoch is given, because "
                "batches are carried over from one epoch to the next. Leave out steps_per_epoch, or the workers"
            )
        return source
    return _Source(adapter, type(adapter).__name__.removesuffix("Adapter"))
