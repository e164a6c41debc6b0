"""The position of a training loop in the data of a plain `DataLoader`, which the program does not have to change."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from holdfast.errors import UsageError
from holdfast.format.digests import derive, digest
from holdfast.integrations.torch.draws import (
    has_state,
    note_parts,
    read_generators,
    read_parts,
    walk_stream,
    write_generators,
    write_parts,
)
from holdfast.integrations.torch.loader import (
    IgnoreSignals,
    SignalProofLoader,
    describe_loader,
    generators_put_back,
    seed_generators,
    signals_blocked,
)

_PASSED_ON: Final = ("num_workers", "pin_memory", "timeout", "multiprocessing_context")


class DataPlace:
    """How many batches training has taken in the current epoch of a loader, and how the order of the epoch was drawn.

    The order is not stored. It follows from the random generators as they were when the epoch began, which are stored:
    a restart draws the indices of the epoch again and skips those that were trained, without loading their samples.

    Python's, NumPy's and torch's (CPU) generators are seeded for each batch of a dataset with indices, from their state
    when the epoch began. So an augmentation, or a mask that is drawn while a batch is collated, is the same after a
    restart, regardless of prefetching workers, and loading does not change the generators of training.

    Attributes:
        resumes: True if the next epoch that begins continues at the restored position.
        on_resume: Called when it does.
        see: A function to call with each batch when its owner passes it on to training; None for none.
    """

    def __init__(
        self, loader: DataLoader[Any], owner: Any = None, lookahead: int = 0, *, is_dispatched: bool = False
    ) -> None:
        """Follows a loader from now on; the loader is changed in place.

        Args:
            loader: A torch loader.
            owner: The object that iterates it and passes its batches on, if any; its `iteration` counts the epochs.
            lookahead: How many batches the owner takes from the loader before it passes on the one before.
            is_dispatched: True if the owner gives a part of each batch to each worker; it asks `try_pass` first.

        Raises:
            UsageError: If the loader has its own way of iterating.
        """
        cls = type(loader)
        # The one of torchdata has, and needs none once its place is kept here.
        if cls.__iter__ is not DataLoader.__iter__ and cls.__name__ != "StatefulDataLoader":
            raise UsageError(
                f"{cls.__name__} overrides __iter__, so its position in the data cannot be saved",
                hint="Use torch's DataLoader, or a subclass that does not override __iter__.",
            )
        self._loader, self._owner, self._lookahead = loader, owner, lookahead
        self._is_dispatched = is_dispatched
        note_parts(loader)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        parts = [*walk_stream(loader.dataset)] if self._is_stream else []
        # The state of a stream of `datasets` leaves out the samples in a shuffle buffer, which would never come. Its
        # order follows from its epoch, and it begins each pass at the state that it has loaded.
        self._has_buffer = any(
            type(each).__name__.startswith("BufferShuffled") and each.buffer_size > 1 for each in parts
        )
        self._streams = [each for each in parts if hasattr(each, "_starting_state_dict")]
        self._keeps_stream = (
            not (self._has_buffer or loader.num_workers) and self._is_stream and has_state(loader.dataset)
        )
        self._inner: DataLoader[Any] | None = None
        self._begin: dict[str, Any] | None = None
        self._stream_states: list[Any] = []
        self._fetched, self._begun_iteration, self._has_ended = 0, 0, False
        self._is_left = self._has_loaded_stream = False
        self._restored: Mapping[str, Any] | None = None
        self.resumes = False
        self.on_resume: Callable[[], object] = lambda: None
        self.see: Callable[[Any], None] | None = None
        loader.worker_init_fn = IgnoreSignals(loader.worker_init_fn) if self._is_stream else loader.worker_init_fn
        vars(loader)["_place"] = self
        # It stays of its own class. A framework may ask for its state, but its place is kept here.
        stateless = {"state_dict": lambda _: {}, "load_state_dict": lambda *_: None}
        own = {"_get_iterator": DataLoader._get_iterator, **(stateless if has_state(loader) else {})}
        loader.__class__ = type(f"Followed{cls.__name__}", (_FollowedLoader, cls), own)

    @property
    def caveat(self) -> str:
        """Returns what a restart will have to do nevertheless, or cannot; empty if there is no such thing."""
        if self._is_dispatched and self._fills_last_batch():
            return (
                "with dispatch_batches, accelerate fills the last batch of an epoch with samples of the first "
                "batch, and after a restart in that epoch with samples of the first batch since then. Pass "
                "drop_last=True to the loader"
            )
        if not self._is_stream or self._keeps_stream:
            return ""
        if self._has_buffer:
            return (
                "the state of a stream of datasets leaves out the samples in its shuffle buffer, so a restart in the "
                "middle of an epoch reads the trained batches again and skips them. A stream without "
                "shuffle(buffer_size=...), or a dataset with indices, avoids that"
            )
        return (
            f"{type(self._loader.dataset).__name__} can only be iterated, and keeps no position: a restart in the "
            "middle of an epoch loads the trained batches again and skips them. A dataset with indices, or one "
            "with state_dict and load_state_dict and num_workers=0, avoids that"
        )

    def _fills_last_batch(self) -> bool:
        batches: Any = self._loader.batch_sampler
        size = getattr(batches, "batch_size", None)
        if self._is_stream or size is None or getattr(batches, "drop_last", False):
            return False
        dataset: Any = self._loader.dataset
        return bool(len(dataset) % (size * self._lookahead) % self._owner.state.num_processes)

    @property
    def has_ended(self) -> bool:
        """True if the loader has nothing left in this epoch."""
        return self._has_ended

    def __repr__(self) -> str:
        return f"<DataPlace: {self._taken} batches of {self._loader!r}>"

    @property
    def _taken(self) -> int:
        return self._fetched if self._has_ended else max(self._fetched - self._lookahead, 0)

    @property
    def _key(self) -> int:
        assert self._begin is not None  # It was read, or restored.
        contents = (self._begin["python"][1], self._begin["numpy"][1], self._begin["torch"])
        # Workers whose generators have the same seed draw different augmentations nevertheless.
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if has_ranks else 0
        return derive(*(int(digest(content)[:16], 16) for content in contents), rank)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain values."""
        iteration = getattr(self._owner, "iteration", self._begun_iteration)
        if self._restored is not None and self._begin is None:
            return dict(self._restored)  # Nothing was taken since it was restored.
        state = {"iteration": iteration, "parts": read_parts(self._loader)}
        has_ended = self._has_ended or bool(getattr(self._owner, "end_of_dataloader", False))
        if self._begin is None or iteration != self._begun_iteration:
            return {**state, "begin": None, "taken": 0, "ended": False, "stream": None}
        stream = None
        if self._keeps_stream and not self._has_ended:
            dataset: Any = self._loader.dataset
            # What the owner holds is loaded again.
            stream = self._stream_states[0] if self._lookahead else dataset.state_dict()
        return {**state, "begin": self._begin, "taken": self._taken, "ended": has_ended, "stream": stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores the position for the next epoch that begins."""
        write_parts(self._loader, state["parts"])
        self._restored, self._begin = state, None
        self.resumes = state["begin"] is not None
        if hasattr(self._owner, "iteration"):
            self._owner.iteration = state["iteration"]

    def resume_at(self, taken: int) -> None:
        """Makes the next epoch continue in the restored one, after that many batches."""
        assert self._restored is not None  # Asked only where `resumes` was true.
        if self._restored["taken"] != taken:
            # The program takes other batches than before.
            self._restored = {**self._restored, "taken": taken, "ended": False, "stream": None}
        self.resumes = True

    def follow_batches(self, see: Callable[[Any], None]) -> Callable[[], object]:
        """Sets `see`; returns what ends that."""
        self.see = see
        return lambda: setattr(self, "see", None)

    def describe(self) -> object:
        """See `describe_loader`."""
        return describe_loader(self._loader)

    def close(self) -> None:
        """Ends the loader's persistent workers, if it has some."""
        inner, self._inner = self._inner, None
        workers = getattr(inner, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()

    def forget_left(self) -> None:
        """Called when training goes on. If its loop has left the epoch by `break`, the next one starts at batch 0."""
        if self._is_left:
            self._begin, self._is_left = None, False

    def try_pass(self) -> bool:
        """Returns True if the epoch that begins is the restored one, and nothing is left of it: then it is over."""
        if self._restored is None or not self.resumes or not self._restored["ended"]:
            return False
        self._restored, self.resumes = None, False
        self.on_resume()
        self._owner.iteration += 1
        return True

    def start(self) -> Iterator[Any]:
        """Begins an epoch, or continues in the restored one."""
        state = self._restored if self.resumes else None
        self._restored, self.resumes = None, False
        self._has_ended, self._is_left, self._stream_states = False, False, []
        self._begun_iteration = getattr(self._owner, "iteration", 0)
        if state is None:
            for stream in self._streams if self._has_loaded_stream else ():
                stream._starting_state_dict = None
            epochs = [int(stream._epoch) for stream in self._streams]
            self._begin = {**read_generators(), "parts": read_parts(self._loader), "epochs": epochs}
            self._fetched = 0
            return self._follow(self._open(0))
        self.on_resume()
        now = read_generators()
        self._begin, self._fetched = dict(state["begin"]), state["taken"]
        write_generators(self._begin)
        write_parts(self._loader, self._begin["parts"])
        for stream, epoch in zip(self._streams, self._begin.get("epochs", ()), strict=False):
            stream.set_epoch(epoch)
        batches = self._open(self._fetched, state)
        write_generators(now)
        if state["ended"] and hasattr(self._owner, "iteration"):
            self._owner.iteration += 1  # The owner does not count an epoch that has no batch.
        return self._follow(batches)

    def _open(self, taken: int, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        if self._is_stream:
            return self._open_stream(taken, state)
        inner = self._inner or self._make_inner()
        if inner.num_workers and inner.persistent_workers:
            self._inner = inner
        tasks: Any = inner.batch_sampler
        tasks.begin(self._key, taken)
        batches = iter(inner)
        # Has the sampler draw what it draws while the generators are as they are noted down.
        tasks.newest.prime()
        return batches

    def _make_inner(self) -> DataLoader[Any]:
        loader = self._loader
        is_batched = loader.batch_sampler is not None
        options = {name: getattr(loader, name) for name in _PASSED_ON}
        # Its seed for workers is drawn when they start, which those that persist do once: it disturbs no other order.
        options["generator"] = torch.Generator().manual_seed(self._key)
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["persistent_workers"] = loader.persistent_workers
        return SignalProofLoader(
            _SeededBatches(loader.dataset, loader.collate_fn, is_batched),
            batch_sampler=_BatchTasks(loader.batch_sampler if is_batched else loader.sampler),
            collate_fn=_as_it_is,
            worker_init_fn=IgnoreSignals(loader.worker_init_fn),
            **options,
        )

    def _open_stream(self, taken: int, state: Mapping[str, Any] | None) -> Iterator[Any]:
        if state is not None and state["ended"]:
            return iter(())
        kept = state["stream"] if state is not None and self._keeps_stream else None
        if kept is not None:
            dataset: Any = self._loader.dataset
            dataset.load_state_dict(kept)
            self._has_loaded_stream = True
        with signals_blocked() if self._loader.num_workers else nullcontext():
            batches = DataLoader.__iter__(self._loader)
        if state is not None and kept is None:
            with suppress(StopIteration):  # It may have become shorter.
                for number in range(taken):
                    self._next_of_stream(batches, number)
        return batches

    def _next_of_stream(self, batches: Iterator[Any], number: int) -> Any:
        if self._loader.num_workers:
            return next(batches)  # Its workers' generators follow from the seed of the epoch.
        with generators_put_back():
            seed_generators(derive(self._key, number))
            return next(batches)

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        dataset: Any = self._loader.dataset
        ahead: deque[Any] = deque()
        while True:
            if self._keeps_stream and self._lookahead:
                self._stream_states = [*self._stream_states, dataset.state_dict()][-self._lookahead :]
            try:
                batch = self._next_of_stream(batches, self._fetched) if self._is_stream else next(batches)
            except StopIteration:
                self._has_ended = True
                while ahead and self.see is not None:
                    self.see(ahead.popleft())
                if self._owner is None:
                    self._begin = None  # The loop has asked for a batch after the last one.
                return
            self._fetched += 1
            if self.see is not None:
                ahead.append(batch)
                if len(ahead) > self._lookahead:
                    self.see(ahead.popleft())
            try:
                yield batch
            except GeneratorExit:
                self._is_left = True
                raise


class _FollowedLoader(DataLoader[Any]):
    """A plain loader that reports each batch to its `DataPlace`."""

    _place: DataPlace

    def __iter__(self) -> Any:
        return self._place.start()


class _BatchTasks:
    """A `batch_sampler` that yields tasks in the order of another sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._key = self._taken = 0
        self.newest = _TaskIterator(iter(()), 0, 0)

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self, key: int, taken: int) -> None:
        """Sets how the next iterator begins: the key of the epoch's seeds, and how many batches it skips."""
        self._key, self._taken = key, taken

    def __iter__(self) -> _TaskIterator:
        self.newest = _TaskIterator(iter(self._sampler), self._key, self._taken)
        return self.newest


class _TaskIterator(Iterator[Any]):
    """Skips the first batches' indices when it is asked for the first task."""

    def __init__(self, indices: Iterator[Any], key: int, taken: int) -> None:
        self._indices, self._key, self._number, self._left = indices, key, taken, taken
        self._ready: list[Any] = []
        self._has_begun = False

    def prime(self) -> None:
        """Prepares the next task, if it is not in progress already."""
        if not self._has_begun:
            with suppress(StopIteration):
                self._ready.append(next(self))

    def __next__(self) -> Any:
        self._has_begun = True
        if self._ready:
            return self._ready.pop()
        while self._left:
            next(self._indices)
            self._left -= 1
        task = next(self._indices), derive(self._key, self._number)
        self._number += 1
        return task


class _SeededBatches(Dataset[Any]):
    """A dataset that makes a whole batch, with every generator seeded for it.

    It has the attributes of the user's dataset, which a `worker_init_fn` may read and set by `get_worker_info()`.
    """

    def __init__(self, dataset: Any, collate: Any, is_batched: bool) -> None:
        vars(self)["_kept"] = dataset, collate, is_batched

    def __getattr__(self, name: str) -> Any:
        if name == "_kept" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._kept[0], name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._kept[0], name, value)

    def __getitems__(self, task: tuple[Any, int]) -> Any:
        indices, seed = task
        # A worker's generators belong to nothing else.
        with generators_put_back() if get_worker_info() is None else nullcontext():
            seed_generators(seed)
            dataset, collate, is_batched = self._kept
            if not is_batched:
                return collate(dataset[indices])
            load_many = getattr(dataset, "__getitems__", None)
            return collate(load_many(indices) if callable(load_many) else [dataset[index] for index in indices])


def _as_it_is(batch: Any) -> Any:
    return batch
