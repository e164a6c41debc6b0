"""The position of `fit` in its data, and how to resume there without loading what was trained before.

`fit` creates an `EpochIterator` before the first callback is called, and iterates it once per epoch. The order of an
epoch is drawn when its iterator is created, from the generators that the process shares. So the state of these
generators at that time and the number of batches since then are the position. To resume, the generators are set back,
the order is drawn again, and the indices of trained batches are skipped.
"""

from __future__ import annotations

import itertools
import random
import sys
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
from holdfast.state.data.attributes import Attributes
from holdfast.state.rng import RNG, undisturbed

_NOTHING: Final = object()


class PlaceInData(msgspec.Struct):
    """The position of training in an epoch.

    Attributes:
        step: How many batches of the epoch are trained.
        is_complete: True if these are all, and the epoch has not ended yet.
        opening: The random generators' state when the current pass through the data began; None if none has.
        drawing: Their state when its first batch was requested, if that was not at once; the order is drawn then.
        is_renewed: True if loader workers existed already.
        taken: How many batches of the pass were taken.
        sizes: How many samples a batch has, and how many batches an epoch, as far as these are known.
    """

    step: int = 0
    is_complete: bool = False
    opening: Any = None
    drawing: Any = None
    is_renewed: bool = False
    taken: int = 0
    sizes: tuple[int | None, int | None] | None = None


class Listener(Protocol):
    """Receives the events of the way through an epoch."""

    def begin_batches(self) -> None:
        """The callbacks have begun the epoch, and no batch is taken yet."""

    def take_up(self) -> None:
        """The data is at the position at which training was interrupted."""

    def end_step(self, *, is_last: bool) -> None:
        """A batch is trained, and all callbacks have seen it; if it is not the last, the epoch has more."""

    def stand_still(self) -> Iterator[Any]:
        """Gives `fit` a step in which nothing is trained."""


class Feed:
    """The batches of one `fit`. It refers to its `EpochIterator` by a weak reference.

    Attributes:
        place: The position of training.
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
        self._has_looked = False
        # A function to call with each batch that a step takes; None for none. TensorFlow takes them within its graph.
        self._see: Callable[[Any], None] | None = None
        iterator._enumerate_iterator = self._enumerate
        iterator._get_iterator = self._get_iterator

    @property
    def counts_batches(self) -> bool:
        """True if it is known which batch is the last one of an epoch."""
        return bool(self._iterator.steps_per_epoch or self._iterator.data_adapter.num_batches)

    def follow_batches(self, see: Callable[[Any], None]) -> Callable[[], object] | None:
        """Sets what is called with each batch that a step takes; returns what ends that, or None with TensorFlow."""
        if keras.backend.backend() == "tensorflow":
            return None
        self._see = see
        return lambda: setattr(self, "_see", None)

    def describe(self) -> object:
        """Returns what decides which batches come, as far as the program announces it."""
        iterator, adapter = self._iterator, self._iterator.data_adapter
        return iterator.steps_per_execution, iterator.steps_per_epoch, adapter.batch_size, adapter.num_batches

    def resume(self, place: PlaceInData) -> None:
        """Resumes the data at that position, in the epoch that begins next."""
        is_within = place.step and not place.is_complete
        if is_within and place.sizes not in (None, self.sizes) and not self._is_kept_over_epochs():
            place = self._convert(place)
        self.place = place
        self._resumed = place
        self._pending = place if place.opening is not None and (is_within or self._is_kept_over_epochs()) else None

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """How many samples a batch has, and how many batches an epoch, as far as these are known."""
        adapter = self._iterator.data_adapter
        return adapter.batch_size, adapter.num_batches

    def _convert(self, place: PlaceInData) -> PlaceInData:
        """Returns a position within an epoch in the present batches."""
        (former, before), (batch, batches) = place.sizes or self.sizes, self.sizes
        samples = place.taken * (former or 1)
        taken = min(samples // batch if former and batch else place.taken, (batches or sys.maxsize) - 1)
        taken -= taken % self._iterator.steps_per_execution
        now = f"an epoch has {batches} batches of {batch} samples ({before} of {former} at the save)"
        self.source.remark = f"{now}: this one continues after {taken} batches"
        if not former or not batch or taken * batch != samples or before != -(-(batches or 0) * batch // former):
            self.source.remark += ", and some samples may come twice in it, and others not at all"
        return replace(place, step=taken, taken=taken)

    def read_random(self) -> dict[str, Any]:
        """Returns the state of the generators that the process shares, and of the data's own."""
        return {"shared": RNG().state_dict(), "own": [one.get_state() for one in self.source.generators()]}

    def write_random(self, state: dict[str, Any]) -> None:
        """Restores them."""
        RNG().load_state_dict(state["shared"])
        for generator, value in zip(self.source.generators(), state["own"], strict=False):
            generator.set_state(value)

    def end_epoch(self) -> PlaceInData:
        """Makes the next epoch begin with its first batch; an iterator that is kept for it continues."""
        if self._is_kept_over_epochs():
            return replace(self.place, step=0, is_complete=False, taken=self._iterator._steps_seen)
        return PlaceInData()

    def release(self) -> None:
        """Restores the `EpochIterator` as Keras created it, if it still exists."""
        with suppress(ReferenceError, AttributeError):
            del self._iterator._enumerate_iterator, self._iterator._get_iterator

    def _is_kept_over_epochs(self) -> bool:
        return bool(self._iterator.steps_per_epoch)

    def _enumerate(self) -> Generator[Any, None, None]:
        """Replaces `EpochIterator._enumerate_iterator`: gives the remaining steps of an epoch."""
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
            if not self._has_looked:
                self._has_looked = True
                self.source.look()
            step = place.step
            item = next(steps, _NOTHING)
            if item is not _NOTHING:
                self.place = place
                self._listener.end_step(is_last=False)
        self.place = replace(self.place, step=step, is_complete=True, taken=iterator._steps_seen)
        self._listener.end_step(is_last=True)

    def _get_iterator(self) -> Any:
        """Replaces `EpochIterator._get_iterator`."""
        return self._open() if self._see is None else map(self._pass_on, self._open())

    def _pass_on(self, batch: Any) -> Any:
        if self._see is not None:
            self._see(batch)
        return batch

    def _open(self) -> Any:
        """Returns the batches of a pass, and notes with which random numbers it begins."""
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
        """Draws the order again, after the iterator of the batches was created."""
        if pending.drawing is not None:
            self.write_random(pending.drawing)

    def _make(self) -> Any:
        return self.source.open(self._class._get_iterator(self._iterator))


def make_step(model: Any) -> Any:
    """Returns what an `EpochIterator` gives for one step, with an iterator without batches."""
    scratch = EpochIterator(np.zeros((1, 1)))
    *numbers, _ = next(scratch._enumerate_iterator())
    return (*numbers, itertools.repeat(None))


_NAMES: Final = {
    "GeneratorDataAdapter": "a generator",
    "PyDatasetAdapter": "a PyDataset",
    "TFDatasetAdapter": "this tf.data.Dataset",
    "TorchDataLoaderAdapter": "a DataLoader" if keras.backend.backend() == "tensorflow" else "an IterableDataset",
}


def read_again(adapter: Any) -> str:
    """**Pure.** Returns the warning about data that has no position."""
    cls = adapter.__class__.__name__  # Also that of a weak reference's adapter.
    name = _NAMES.get(cls, cls.removesuffix("Adapter"))
    at_once = "Arrays, a keras.utils.PyDataset and a torch DataLoader of a map-style dataset resume at once"
    if keras.backend.backend() == "tensorflow":
        at_once = "Arrays and a tf.data.Dataset without generators resume at once"
    return (
        f"{name} can only be read from its beginning: if a run is resumed within an epoch, it reads the batches that "
        f"were trained before and discards them. {at_once}"
    )


class DataSource:
    """Data that can only be resumed by loading what was trained, and skipping it.

    Attributes:
        remark: Why a resumed epoch is slow, or not exact; empty if it is neither.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter: Any = weakref.proxy(adapter)
        self.remark = ""

    def build(self, model: Any) -> None:
        """Creates all variables of the model, its optimizer and its metrics; with most backends Keras has done so.

        Raises:
            UsageError: If that is not possible.
        """
        if not model.built:
            raise UsageError(
                f"{model!r} has not been built",
                hint="Build it before fit, by calling it on a batch of data; or its layers, if it has no `call`.",
            )

    def open(self, batches: Any) -> Any:
        """Begins a pass through the data; returns its batches."""
        return batches

    def look(self) -> None:
        """Sets the remark, if it shows only in a pass that has begun."""

    def generators(self) -> list[Any]:
        """The data's own random generators."""
        return []

    def read(self) -> dict[str, Any]:
        """Returns the data's own state."""
        return {}

    def write(self, state: dict[str, Any]) -> None:
        """Restores the data's own state."""

    def prepare(self, taken: int) -> None:
        """Prepares an epoch in which that many batches were already taken."""

    def is_renewed(self) -> bool:
        """True if there are workers from an earlier pass, which also load for the next one."""
        return False

    def renew(self, is_renewed: bool) -> None:
        """Restores the workers' state at the beginning of the pass."""

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """Returns an iterator that skips that many batches.

        Args:
            make: Creates the iterator from the beginning.
            taken: How many to skip.
            draw: Called between that and the first batch.
        """
        batches = iter(make())
        draw()
        for _ in range(taken):
            next(batches)
        return batches


class _Arrays(DataSource):
    """Arrays that are split into batches by their indices."""

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `DataSource`."""
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
    """Iterates the result of `make`, and makes sure that the adapter is asked for its batches now.

    With JAX and a distribution it would be asked only with the first batch, when the generators have another state.
    """
    batches = iter(make())
    if "_get_iterator" in adapter.__dict__:
        batches = itertools.chain([next(batches)], batches)
    return batches


class _Loader(DataSource):
    """A torch `DataLoader`."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._loader = adapter._dataloader
        self._is_by_index = hasattr(self._loader.dataset, "__getitem__") and hasattr(self._loader.dataset, "__len__")
        own = (self._loader, self._loader.batch_sampler, self._loader.sampler)
        if any(hasattr(one, "state_dict") for one in own):
            raise UsageError(
                f"{type(self._loader).__name__} has a position of its own, which fit advances before it trains",
                hint="Pass a plain DataLoader to fit: its position is saved without a stateful sampler.",
            )
        if not self._is_by_index:
            self.remark = read_again(adapter)
        self._owners = [*own, getattr(self._loader.batch_sampler, "sampler", None)]
        samplers = {id(one): one for one in self._owners[1:] if hasattr(one, "__dict__")}
        self._samplers = [_SamplerState(one) for one in samplers.values()]

    def generators(self) -> list[Any]:
        """See `DataSource`; includes the counts of samplers."""
        found = [getattr(owner, "generator", None) for owner in self._owners]
        return [*{id(one): one for one in found if hasattr(one, "get_state")}.values(), *self._samplers]

    def is_renewed(self) -> bool:
        """See `DataSource`."""
        return getattr(self._loader, "_iterator", None) is not None

    def renew(self, is_renewed: bool) -> None:
        """See `DataSource`: a pass that starts workers draws one number more than others."""
        loader = self._loader
        if not is_renewed:
            loader._iterator = None
        elif loader._iterator is None:
            with _sampling(loader, ()), undisturbed():
                loader._iterator = loader._get_iterator()
            loader._iterator._index_sampler = _sampler_of(loader)

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `DataSource`."""
        if not self._is_by_index:
            return super().take_up(make, taken, draw)
        batches = begin_behind(self._loader, taken, draw)
        if keras.backend.backend() == "torch":
            return batches
        self._adapter._dataloader = _Once(self._adapter, self._loader, batches)
        return make()


class _SamplerState:
    """The attributes of a sampler, such as an epoch that it counts, with the interface of torch's generators."""

    def __init__(self, sampler: Any) -> None:
        attributes = Attributes(sampler)
        self.get_state, self.set_state = attributes.read, attributes.write


class _Once:
    """Replaces a loader until it is iterated, and then gives an iterator that was already created."""

    def __init__(self, adapter: Any, loader: Any, batches: Any) -> None:
        self._adapter, self._loader, self._batches = adapter, loader, batches

    def __iter__(self) -> Any:
        self._adapter._dataloader = self._loader
        return self._batches


def begin_behind(loader: Any, taken: int, draw: Callable[[], None]) -> Any:
    """Returns an iterator over a loader that skips that many batches: their indices are drawn, but not loaded."""
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
    """In the block, the loader takes its indices from another sampler, although it refuses setting that attribute."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    plain = loader.__dict__[name]
    loader.__dict__[name] = sampler
    try:
        yield
    finally:
        loader.__dict__[name] = plain


class _Behind:
    """A sampler that skips what was trained when it is first iterated."""

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
        """Draws what is skipped, unless that is done."""
        taken, self._taken = self._taken, 0
        for _ in range(taken):
            next(self._indices)


class PyDatasetSource(DataSource):
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
        """See `DataSource`; includes attributes that change, such as an order that each epoch shuffles."""
        state: dict[str, Any] = self._attributes.read() if self._own is None else self._own.state_dict()
        return state

    def write(self, state: dict[str, Any]) -> None:
        """See `DataSource`."""
        if self._own is not None:
            self._own.load_state_dict(state)
        else:
            self._attributes.write(state)

    def prepare(self, taken: int) -> None:
        """See `DataSource`. Workers begin to load as soon as the epoch begins, so they must know what to skip."""
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
        """See `DataSource`."""
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
    """Replaces a `PyDataset`, and gives nothing for batches that were trained."""

    def __init__(self, dataset: Any, passed: frozenset[int]) -> None:
        self._dataset, self._passed = dataset, passed

    def __getitem__(self, index: int) -> Any:
        return {} if index in self._passed else self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_passed"):
            raise AttributeError(name)  # It is being made again in another process.
        return getattr(self._dataset, name)


def _find_source(iterator: Any) -> DataSource:
    adapter = iterator.data_adapter
    if keras.backend.backend() == "tensorflow":
        from holdfast.integrations.frameworks.keras.pipeline import Pipeline

        return Pipeline(iterator)
    if isinstance(adapter, ArrayDataAdapter):
        return _Arrays(adapter)
    if isinstance(adapter, TorchDataLoaderAdapter):
        return _Loader(adapter)
    if isinstance(adapter, PyDatasetAdapter):
        if adapter.enqueuer is not None and iterator.steps_per_epoch:
            raise UsageError(
                "the position of a PyDataset with workers cannot be saved if steps_per_epoch is given: "
                "batches are carried over from one epoch to the next, so a resumed run would train other data",
                hint="Leave out steps_per_epoch, or give the PyDataset workers=0.",
            )
        return PyDatasetSource(adapter)
    source = DataSource(adapter)
    source.remark = read_again(adapter)
    return source
