"""Loaders for torch whose position in the data can be restored, and whose workers survive signals to the job."""

from __future__ import annotations

import _thread
import itertools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import resource_tracker
from types import SimpleNamespace
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from holdfast.errors import UnsupportedValueError, UsageError
from holdfast.format.digests import derive
from holdfast.integrations.torch.draws import keep_draws, note_parts, read_parts, seed_parts, write_parts
from holdfast.numbers import check_whole
from holdfast.state.adapters import CaptureContext, Loading, Oversights, Readable
from holdfast.state.data.attributes import RANDOM
from holdfast.state.data.position import is_position
from holdfast.state.data.sampler import ResumableSampler, SamplerAdapter, leave_alone
from holdfast.state.data.streams import BatchStream
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import register_adapter

# These tell apart the numbers that are derived from one seed and epoch; the sampler's order is derived without one.
_FOR_SAMPLES: Final = 1
_FOR_WORKERS: Final = 2
_FOR_COLLATE: Final = 3

_FOR_ORDER: Final = 5

_STATEFUL: Final = (
    "torchdata's StatefulDataLoader with it, under a name of the run, which keeps its place and its draws"
)
_OWN_OPTIONS: Final = {
    "batch_sampler": ("the batches are the loader's own", f"Use {_STATEFUL}."),
    "generator": ("the order comes from seed=, not from a generator", "Pass seed=1."),
}


class ResumableDataLoader:
    """A `DataLoader` for map-style datasets that can resume at any batch.

        loader = ResumableDataLoader(dataset, batch_size=32, seed=1, num_workers=2)
        for epoch in loader.epochs(10):
            for batch in loader:
                ...

    Iterating it gives the rest of the epoch, and each batch that the loop takes moves the position; prefetched batches
    do not. The next epoch begins when the loop has asked for a batch after the last one, or has taken the last one and
    iterates again; if the loop leaves early, the epoch continues there.

    Python's, NumPy's and torch's (CPU) random generators are seeded for every sample from seed, epoch and index, and
    for every batch before it is collated, with or without workers. So an augmentation is the same after a resume, with
    any number of workers, and differs from epoch to epoch; and loading data does not change the generators of the
    training process, which are restored after each batch. A dataset's own generators are not handled. A dataset with
    `__getitems__` is seeded once a batch. In a worker, `get_worker_info().dataset.dataset` is the dataset.

    Workers ignore signals that go to all processes of a job, because the training process decides when they end.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        on_resize: Literal["error", "next_epoch"] = "error",
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        seed_samples: bool = True,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        """Creates a loader at the beginning of epoch 0.

        Args:
            dataset: An object with a length and `__getitem__`, or `__getitems__` as well.
            batch_size: The samples of one batch, of all workers of the job together; 1 by default, as in torch.
            shuffle: True for another order in each epoch.
            seed: The seed of the orders.
            drop_last: True to skip an incomplete last batch.
            sampler: Draws the indices of each epoch, in place of `shuffle`: a `WeightedRandomSampler`, say, or one of
                your own with a length. The generators of the process and its own ones are seeded for that from seed and
                epoch, and its `set_epoch` is called; other attributes that it draws from, such as weights, are yours
                to restore. It draws for all workers of the job, and each gets its part.
            on_resize: As for `ResumableSampler`.
            num_workers: The number of processes that load; 0 to load in this one.
            collate_fn: Makes a batch of a list of samples.
            seed_samples: True to seed random generators for every sample, which takes about 10 microseconds.
            rank: The rank of this worker among those that share the data.
            world_size: The number of these workers; each gets its part of every batch. See `ResumableSampler`.
            options: Other arguments of `torch.utils.data.DataLoader`, such as `pin_memory`, `prefetch_factor`,
                `persistent_workers`, `multiprocessing_context`.

        Raises:
            UsageError: If the dataset can only be iterated, or an option conflicts with the loader's own order; or
                when an epoch begins, if the sampler does not draw as many indices as its length says.
        """
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                f"{type(dataset).__name__} can only be iterated, so training cannot resume at a position in it",
                hint="Use a map-style dataset, or torchdata's StatefulDataLoader with a dataset that has state_dict.",
            )
        for name, (reason, way) in _OWN_OPTIONS.items():
            if name in options:
                raise UsageError(f"{name}= cannot be passed to ResumableDataLoader: {reason}", hint=way)
        num_workers = check_whole("num_workers", num_workers)
        self._dataset = dataset
        order = None if sampler is None else _DrawnOrder(sampler, world_size)
        self._sampler = ResumableSampler(
            dataset if order is None else order.length,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
            order=order,
            on_resize=on_resize,
        )
        # A generator of its own, since torch draws a number for its workers from the global one otherwise.
        generator = torch.Generator()
        generator.manual_seed(derive(seed, _FOR_WORKERS))
        options["worker_init_fn"] = IgnoreSignals(options.get("worker_init_fn"))
        self._loader: DataLoader[Any] = SignalProofLoader(
            _SeededDataset(dataset, collate_fn, seed_samples),
            batch_sampler=_Tasks(self._sampler),
            num_workers=num_workers,
            collate_fn=as_it_is,
            generator=generator,
            **options,
        )
        self._sampler.check_loader(self._loader)

    def __repr__(self) -> str:
        return f"<ResumableDataLoader of {type(self._dataset).__name__}: {self._sampler!r}>"

    @property
    def dataset(self) -> Any:
        """The dataset that was passed."""
        return self._dataset

    @property
    def sampler(self) -> ResumableSampler:
        """The sampler, which has order and position."""
        return self._sampler

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._sampler.epoch

    @property
    def batches_done(self) -> int:
        """The batches of this epoch that the loop has taken: `enumerate(loader, start=loader.batches_done)` gives each
        its number in the epoch, after a restart too, and ends at `len(loader)` with another batch size as well.
        """
        return self._sampler.batches_done

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of this epoch; the position moves just before each batch is given out."""
        return self._sampler.batches(self._loader)

    def stream(self) -> BatchStream[Any]:
        """Returns batches without end, over one epoch after the other.

        Its `len` is the number of batches of an epoch. Pass this to a loop of another library that asks for that many
        in each of its epochs, as the `Trainer` of transformers does: it gets all of them, also after a restart.

        Raises:
            UsageError: If an epoch has no batch.
        """
        return self._sampler.stream(self._loader)

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs up to `total`, beginning with that of the position."""
        return self._sampler.epochs(total)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; if the position is already in that epoch, it stays.

        It also stays if a position was restored and is in a later epoch, because loops of other libraries count their
        epochs from 0 again after a restart; if nothing is left of its epoch, it goes to the next one.

        Raises:
            UsageError: If the number is below 0.
        """
        self._sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns order and position, as plain values."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a stored position; seed and shuffle are those that were stored.

        Raises:
            MismatchError: If the stored position is for another number of samples.
            UsageError: If the state is not that of a sampler, or of a newer version.
        """
        self._sampler.load_state_dict(state)


class _DrawnOrder:
    """The order that a sampler draws for a seed and an epoch."""

    def __init__(self, sampler: Any, world_size: int) -> None:
        if not hasattr(sampler, "__len__") or (world_size > 1 and hasattr(sampler, "num_replicas")):
            is_endless = not hasattr(sampler, "__len__")
            raise UsageError(
                f"{type(sampler).__name__} "
                + ("has no length" if is_endless else "divides the data among workers, and so does world_size="),
                hint=f"Use {_STATEFUL}." if is_endless else "Pass a sampler that draws for all of them.",
            )
        self.length = len(sampler)
        self._parts = SimpleNamespace(sampler=sampler)
        note_parts(self._parts)
        self._begin: Mapping[str, Any] = {}
        self._counts = False
        self._drawn: tuple[tuple[int, int], list[int]] | None = None

    def __call__(self, seed: int, epoch: int) -> list[int]:
        """Returns the indices of an epoch."""
        if self._drawn is None or self._drawn[0] != (seed, epoch):
            before = None if self._drawn is None else self._drawn[0]
            self._begin = self._begin or read_parts(self._parts)
            with generators_put_back():
                indices = self._draw(seed, epoch)
                if self._counts and epoch and before != (seed, epoch - 1):
                    # It counts its epochs by itself, so it draws those before as well.
                    write_parts(self._parts, self._begin, begins_again=True)
                    indices = [self._draw(seed, number) for number in range(epoch + 1)][-1]
            self._drawn = (seed, epoch), indices
        return self._drawn[1]

    def _draw(self, seed: int, epoch: int) -> list[int]:
        sampler = self._parts.sampler
        seed_generators(number := derive(seed, epoch, _FOR_ORDER))
        seed_parts(self._parts, number)
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)
        before = _describe_counts(read_parts(self._parts))
        drawn = list(itertools.islice(sampler, self.length + 1))
        if len(drawn) != self.length or any(isinstance(index, list | tuple) for index in drawn):
            raise UsageError(
                f"{type(sampler).__name__} has a length of {self.length}, but does not draw that many indices",
                hint=f"Use {_STATEFUL}.",
            )
        self._counts = self._counts or before != _describe_counts(read_parts(self._parts))
        return [int(index) for index in drawn]


def _describe_counts(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what has changed in a sampler, except its generators, in a form that can be compared."""
    items = ((path, name, value) for path, part in parts.items() for name, value in part.items())
    return repr([item for item in items if not (isinstance(item[2], dict) and RANDOM in item[2])])


class _Tasks:
    """A `batch_sampler` that yields for each batch the number that all seeds of the epoch are derived from, and its
    indices; a worker needs no more to make the batch.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        # The key is taken along with the position: seed and epoch are those of the sampler when a loader begins.
        key = derive(self._sampler.seed, self._sampler.look().epoch, _FOR_SAMPLES)
        return ((key, indices) for indices in iter(self._sampler))


class _SeededDataset(Dataset[Any]):
    """Makes a whole batch where the samples are loaded, with every generator seeded for it."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed_samples: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed_samples = seed_samples

    def __getitems__(self, task: tuple[int, list[int]]) -> Any:
        # A worker's generators are its own.
        is_disturbing = self._seed_samples and get_worker_info() is None
        with generators_put_back() if is_disturbing else nullcontext():
            return self._collate(self._load(*task))

    def _load(self, key: int, indices: list[int]) -> list[Any]:
        load_many = getattr(self.dataset, "__getitems__", None)
        if callable(load_many):
            self._seed(key, indices[0])
            samples = list(load_many(indices))
        else:
            samples = []
            for index in indices:
                self._seed(key, index)
                samples.append(self.dataset[index])
        self._seed(key, indices[0], _FOR_COLLATE)
        return samples

    def _seed(self, *words: int) -> None:
        if self._seed_samples:
            seed_generators(derive(*words))


def seed_generators(number: int) -> None:
    """Seeds the generators that samples are made with: Python's, NumPy's and torch's (CPU)."""
    random.seed(number)
    # A number of 32 bits is what NumPy takes quickly. Another part of it keeps the generators apart.
    np.random.seed(number >> 32)
    # Not `torch.manual_seed`, which would seed the devices' generators as well.
    torch.default_generator.manual_seed(derive(number))


@contextmanager
def generators_put_back() -> Iterator[None]:
    """Restores the generators that samples are seeded in: quicker than restoring all of them, once a batch."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def as_it_is(batch: Any) -> Any:
    """Collates nothing: the dataset has made the batch."""
    return batch


class LoaderAdapter(SamplerAdapter):
    """Serves torch's `DataLoader` and its subclasses.

    A loader over a `ResumableSampler` is saved as that sampler is, and one with a state of its own, such as torchdata's
    `StatefulDataLoader`, by that state and what its sampler draws from. Any other has no position that could be saved,
    nor has a loader that accelerate prepared: its state, if it has one, does not contain the order of the epoch.
    """

    knows_wrappers = True

    def __init__(self) -> None:
        super().__init__(_sampler_of)

    def readable(self, obj: Any) -> Readable:
        """See `Adapter`. torchdata's loader has a state of its own, and starts its workers when it is asked for it."""
        return Readable.WHEN_SAVED if callable(getattr(obj, "state_dict", None)) else super().readable(obj)

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns the loader's own state, or that of its sampler.

        Raises:
            UnsupportedValueError: If it has neither, or both.
        """
        path = next((path for path, member in context.members if member is obj), "")
        return (keep_draws(obj) if _has_state(obj, path) else _sampler_of(obj, path)).state_dict()

    def find_sampler(self, obj: Any) -> ResumableSampler | None:
        """Returns the loader's sampler, unless the loader has a state of its own or another sampler."""
        sampler = getattr(obj, "batch_sampler", None)
        has_state = callable(getattr(obj, "state_dict", None))
        return sampler if isinstance(sampler, ResumableSampler) and not has_state else None

    def check(self, obj: Any, path: str) -> None:
        """Follows a loader with a state of its own from now on; what else cannot be saved shows when it is."""
        has_state = issubclass(type(obj), DataLoader) and callable(getattr(obj, "load_state_dict", None))
        if has_state and not isinstance(obj.batch_sampler, ResumableSampler):
            keep_draws(obj)

    def oversights_of(self, obj: Any) -> Oversights:
        """See `Adapter`: what a sampler draws along with training cannot be drawn again."""
        draws = getattr(obj, "__dict__", {}).get("_kept_draws")
        if draws is None or not draws.draws_along:
            return Oversights()
        return Oversights(
            "its sampler draws each sample from the random generators of the whole process, from which training "
            "draws as well, so a restart within an epoch repeats and omits samples: draw from a generator of the "
            "sampler's own, or the whole epoch at once"
        )

    def follow_batches(self, obj: Any, call: Callable[[Any], None]) -> Callable[[], object] | None:
        """See `Adapter`."""
        draws = getattr(obj, "__dict__", {}).get("_kept_draws")
        return super().follow_batches(obj, call) if draws is None else draws.follow_batches(call)

    def facts_of_batches(self, obj: Any) -> object:
        """See `Adapter`."""
        return super().facts_of_batches(obj) or describe_loader(obj)

    def make_place(self, obj: Any) -> Any:
        """See `Adapter`."""
        from holdfast.integrations.torch.places import follow_loader

        return follow_loader(obj)

    def gives_batches(self, obj: Any, path: str) -> bool:
        """See `Adapter`. One that has not begun is not asked for its state, because that would start its workers."""
        return _has_state(obj, path) and getattr(obj, "_iterator", None) is not None

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Prepares the loader, or its sampler.

        Raises:
            UnsupportedValueError: If neither or both have a state.
        """
        if not _has_state(obj, loading.name()):
            _sampler_of(obj, loading.name())
            return super().begin_load(obj, stored, loading)
        if not loading.wants():
            return leave_alone
        # The present state is not asked for, since that would start the loader's workers.
        state = loading.value(stored, None)
        if is_position(state):
            loading.differences.wrong_kind.append(
                f"{loading.name()}: stored the position of a ResumableSampler, live a {type(obj).__name__}"
            )
            return leave_alone
        if difference := keep_draws(obj).find_difference(state):
            loading.differences.wrong_shape.append(f"{loading.name()}: {difference}")
            return leave_alone
        return lambda: keep_draws(obj).load_state_dict(loading.complete(state))


def describe_loader(loader: Any) -> object:
    """Returns what decides which batches a loader gives, as far as the program announces it."""
    batches, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    size = getattr(batches, "batch_size", getattr(loader, "batch_size", None))
    length = None
    with suppress(TypeError, NotImplementedError):
        length = len(dataset)  # type: ignore[arg-type]
    return size, getattr(batches, "drop_last", None), length


def _has_state(loader: Any, path: str) -> bool:
    if not issubclass(type(loader), DataLoader):
        raise UnsupportedValueError(
            f"{path}: {type(loader).__name__} wraps a DataLoader and does not keep its position across a restart",
            path=path,
            hint="With accelerate, create a ResumableDataLoader(..., rank=accelerator.process_index, "
            "world_size=accelerator.num_processes) and iterate that; accelerator.prepare does not change it.",
        )
    if not callable(getattr(loader, "state_dict", None)) or not callable(getattr(loader, "load_state_dict", None)):
        return False
    if isinstance(loader.batch_sampler, ResumableSampler):
        raise UnsupportedValueError(
            f"{path}: {type(loader).__name__} and its ResumableSampler both save a position",
            path=path,
            hint=f"Use ResumableDataLoader, or {type(loader).__name__} with shuffle=True and no ResumableSampler.",
        )
    return True


def _sampler_of(loader: DataLoader[Any], path: str = "") -> ResumableSampler:
    sampler = loader.batch_sampler
    if isinstance(sampler, ResumableSampler):
        return sampler
    is_own = type(loader.batch_sampler) not in (BatchSampler, type(None))
    raise UnsupportedValueError(
        f"{path}: this DataLoader cannot tell how far the training loop has got in its data",
        path=path,
        hint=f"Its batches are those of a {type(loader.batch_sampler).__name__}: use {_STATEFUL}."
        if is_own
        else "Take its batches from run.batches(loader), and do not pass it to resumable; or use ResumableDataLoader, "
        "which takes a sampler= as well, or torchdata's StatefulDataLoader.",
    )


_begin_plain: Final = DataLoader.__iter__
_followers: Final[list[Callable[[Any], None]]] = []


def follow_plain(call: Callable[[Any], None]) -> Callable[[], None]:
    """Calls a function with each plain loader that begins while gradients are recorded; returns what ends that."""
    _followers.append(call)
    DataLoader.__iter__ = _begin_followed  # type: ignore[method-assign]

    def end() -> None:
        if call in _followers:
            _followers.remove(call)
        if not _followers:
            DataLoader.__iter__ = _begin_plain  # type: ignore[method-assign]

    return end


def _begin_followed(self: Any) -> Any:
    if type(self).__iter__ is _begin_followed and torch.is_grad_enabled():
        for call in [*_followers]:
            call(self)
    if not self.persistent_workers or self._iterator is not None or self.generator is not None:
        return _begin_plain(self)
    # Workers that persist get their seed once in a process. Drawn from the generator of training, it would shift what a
    # restarted job draws later.
    self.generator = torch.Generator().manual_seed(torch.initial_seed())
    try:
        return _begin_plain(self)
    finally:
        self.generator = None


register_adapter(DataLoader, LoaderAdapter())
register_adapter(ResumableDataLoader, SamplerAdapter(lambda loader: loader.sampler))


_PASSED_OVER: Final = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_BLOCKED_AT_START: Final = (signal.SIGTERM, *_PASSED_OVER)


class IgnoreSignals:
    """A `worker_init_fn` that lets a worker ignore signals that are meant for the training process.

    Schedulers send `SIGTERM` to every process of a job. Workers would die of it first, and then the training process in
    the middle of a step, for lack of a batch. With this they work until that process ends them: it tells them to end,
    it ends itself, or it sends them `SIGTERM` as `Process.terminate` does.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        """Stores the user's own function, which is called afterwards."""
        self._then = then

    def __call__(self, worker: int) -> None:
        """Called in the worker, before it loads anything."""
        for number in _PASSED_OVER:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_OVER)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _thread.start_new_thread(_wait_for_parent, ())
        if self._then is not None:
            self._then(worker)


class SignalProofLoader(DataLoader[Any]):
    """A `DataLoader` whose workers begin with these signals blocked.

    A signal that is blocked in all threads of a process can be taken by one that waits for it, which learns who sent
    it. Libraries start threads of their own when they are imported, so it must be blocked before that.
    """

    def __iter__(self) -> Any:
        """Starts the workers."""
        is_forked = self.multiprocessing_context is None and multiprocessing.get_start_method() == "fork"
        if self.num_workers and not is_forked:
            # It unblocks signals when it starts, so it starts before they are blocked.
            resource_tracker.ensure_running()
        with signals_blocked():
            return super().__iter__()


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Blocks the signals that a loader's workers ignore, for processes that begin in this block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_AT_START)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    while True:
        sender = signal.sigwaitinfo({signal.SIGTERM}).si_pid
        if parent is None or sender in (parent.pid, os.getpid()):
            os._exit(0)
