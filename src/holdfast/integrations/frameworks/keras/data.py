"""The data of `fit`, and how to resume there: by the indices of an order that is drawn again, or by reading again.

The order of an epoch is drawn when its iterator is created, from the generators that the process shares. To resume, the
generators are set back (see `Feed`), the order is drawn again, and the indices of trained batches are skipped.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any, Final

import keras
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from holdfast.errors import UsageError
from holdfast.state.data.attributes import Attributes
from holdfast.state.data.replay import Untrained, Way, describe_reading
from holdfast.state.rng import undisturbed

_NAMES: Final = {
    "GeneratorDataAdapter": "a generator",
    "PyDatasetAdapter": "a PyDataset",
    "TFDatasetAdapter": "this tf.data.Dataset",
    "TorchDataLoaderAdapter": "a DataLoader" if keras.backend.backend() == "tensorflow" else "an IterableDataset",
}


def read_again(adapter: Any) -> str:
    """**Pure.** Returns the warning about data that has no position."""
    cls = adapter.__class__.__name__  # Also that of a weak reference's adapter.
    advice = "Arrays, a keras.utils.PyDataset and a torch DataLoader of a map-style dataset resume at once"
    if keras.backend.backend() == "tensorflow":
        advice = "Arrays and a tf.data.Dataset without generators resume at once"
    return describe_reading(_NAMES.get(cls, cls.removesuffix("Adapter")), advice)


class DataSource:
    """Data that can only be resumed by loading what was trained, and skipping it.

    Attributes:
        way: How a resume comes back to a position.
        remark: Why a resumed epoch is slow, or not exact; empty if it is neither.
    """

    way = Way.READING

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


class Arrays(DataSource):
    """Arrays that are split into batches by their indices."""

    way = Way.INDICES

    def take_up(self, make: Callable[[], Any], taken: int, draw: Callable[[], None]) -> Any:
        """See `DataSource`."""
        if keras.backend.backend() == "torch":
            return _iterate_untrained(make(), taken, draw)
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


class Loader(DataSource):
    """A torch `DataLoader`."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self._loader = adapter._dataloader
        own = (self._loader, self._loader.batch_sampler, self._loader.sampler)
        if any(hasattr(one, "state_dict") for one in own):
            raise UsageError(
                f"{type(self._loader).__name__} has a position of its own, which fit advances before it trains",
                hint="Pass a plain DataLoader to fit: its position is saved without a stateful sampler.",
            )
        if hasattr(self._loader.dataset, "__getitem__") and hasattr(self._loader.dataset, "__len__"):
            self.way = Way.INDICES
        else:
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
        if self.way is Way.READING:
            return super().take_up(make, taken, draw)
        batches = _iterate_untrained(self._loader, taken, draw)
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


def _iterate_untrained(loader: Any, taken: int, draw: Callable[[], None]) -> Any:
    """Returns an iterator over a loader that skips that many batches: their indices are drawn, but not loaded."""
    left = _UntrainedSampler(_sampler_of(loader), taken)
    workers = getattr(loader, "_iterator", None)
    if workers is not None:
        # They go on, and take their indices from the sampler that they have met first.
        plain, workers._index_sampler = workers._index_sampler, left
        batches = iter(loader)
        workers._index_sampler = plain
    else:
        with _sampling(loader, left):
            batches = iter(loader)
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator._index_sampler = _sampler_of(loader)
    draw()
    left.newest.skip()
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


class _UntrainedSampler:
    """A sampler that leaves out what was trained.

    Attributes:
        newest: The newest iterator.
    """

    def __init__(self, sampler: Any, taken: int) -> None:
        self._sampler, self._taken = sampler, taken
        self.newest = Untrained(iter(()), 0)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Untrained:
        self.newest = Untrained(iter(self._sampler), self._taken)
        return self.newest


class PyDatasetSource(DataSource):
    """A `keras.utils.PyDataset`."""

    way = Way.INDICES

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
