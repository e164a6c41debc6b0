"""The position of a training loop in the data of a plain `DataLoader`, which the program does not have to change."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from holdfast.errors import UsageError
from holdfast.format.digests import derive, digest
from holdfast.integrations.torch.draws import (
    has_state,
    note_parts,
    read_generators,
    read_parts,
    walk_stream,
    write_arrays,
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

    The position is also stored in samples, with the sizes of a batch and of the dataset: if these have changed, the
    samples that are left are drawn again, and come in the present batches. The count of batches is then the one that
    ends the epoch with the data.

    Attributes:
        resumes: True if the next epoch that begins continues at the restored position.
        on_resume: Called when it does.
        remark: What a restore has found changed since the save, and how the epoch continues; empty if nothing has.
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
        # The samples before the batch at which this process began in the epoch, the number of that batch, and for each
        # smaller size that the dataset had in this epoch, that size and how many samples of it were trained.
        self._samples_before = self._first = 0
        self._earlier: list[list[int]] = []
        self._restored: Mapping[str, Any] | None = None
        self.resumes = False
        self.on_resume: Callable[[], object] = lambda: None
        self.remark = ""
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
    def source(self) -> Any:
        """The object from which training takes its batches: the owner, or the loader itself."""
        return self._loader if self._owner is None else self._owner

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

    def outline(self) -> dict[str, Any]:
        """Returns the position without the order: `taken` in batches, `ended`, and `sizes` for `fit`.

        `total` is the number of batches of an epoch; None if it is not known, or workers share each batch.
        """
        found: dict[str, Any] = {"total": None if self._is_stream or self._is_dispatched else len(self._loader)}
        state = self._restored if self._restored is not None and self._begin is None else None
        if state is not None and state["begin"]:
            return {**found, **{name: state.get(name) for name in ("taken", "ended", "sizes")}}
        is_other = getattr(self._owner, "iteration", self._begun_iteration) != self._begun_iteration
        if state is not None or self._begin is None or is_other:
            return {**found, "taken": 0}
        has_ended = self._has_ended or bool(getattr(self._owner, "end_of_dataloader", False))
        return {**found, "taken": self._taken, "ended": has_ended, "sizes": self._read_sizes(self._taken)}

    def _read_sizes(self, taken: int) -> dict[str, Any]:
        loader: Any = self._loader
        batches, shares = _find_batches(loader)
        size = getattr(loader if self._is_stream else batches, "batch_size", None)
        size = None if size is None else size * shares
        samples = None if size is None else self._samples_before + (taken - self._first) * size
        length = None if self._is_stream else len(loader.dataset)
        return {"batch": size, "length": length, "samples": samples, "earlier": self._earlier}

    def fit(self, outline: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Returns a stored position in the present batches, and what has changed; empty if nothing has."""
        same, sizes, live = dict(outline), outline.get("sizes"), self._read_sizes(0)
        if outline.get("ended", True):
            return same, ""
        if sizes is None:
            return same, "the checkpoint does not say how many samples a batch had: keep that number in this epoch"
        changes = [
            f"{name} {live[key]} ({sizes[key]} at the save)"
            for key, name in (("batch", "batch size"), ("length", "samples in the dataset"))
            if live[key] != sizes[key]
        ]
        batches, _ = _find_batches(self._loader)
        samples, earlier, batch = sizes["samples"], sizes["earlier"], live["batch"]
        if not changes and not earlier and samples in (None, outline["taken"] * (batch or 0)):
            return same, ""
        is_exact, text = True, ", ".join(changes)
        if type(batches) is not BatchSampler:
            if self._is_stream and samples is not None and batch is not None:
                is_exact = self._keeps_stream or samples % batch == 0
                same["taken"] = samples // batch
            else:
                is_exact = False
        else:
            sampler: Any = batches.sampler
            if live["length"] != sizes["length"]:
                is_exact = live["length"] > sizes["length"] and _draws_each_once(sampler)
                earlier, samples = ([*earlier, [sizes["length"], samples]], 0) if is_exact else (earlier, samples)
            left = max(len(sampler) - samples - sum(count for _, count in earlier), 0)
            total = len(self._loader.batch_sampler)  # type: ignore[arg-type]
            with _sampling_from(batches, range(left)):
                left = len(self._loader.batch_sampler)  # type: ignore[arg-type]
            same |= {"taken": max(total - left, 0), "ended": left == 0}
        same["sizes"] = {**live, "samples": samples, "earlier": earlier}
        if not text:
            return same, ""
        if not is_exact:
            return same, f"{text}: in the rest of this epoch some samples may come twice, and others not at all"
        is_longer = live["length"] != sizes["length"]
        condition = ", provided that the new ones are at the end" if is_longer else ""
        return same, f"{text}: the rest of this epoch has the samples that were not trained{condition}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain values."""
        iteration = getattr(self._owner, "iteration", self._begun_iteration)
        if self._restored is not None and self._begin is None:
            return dict(self._restored)  # Nothing was taken since it was restored.
        state = {"iteration": iteration, "parts": read_parts(self._loader)}
        if self._begin is None or iteration != self._begun_iteration:
            return {**state, "begin": None, "taken": 0, "ended": False, "stream": None}
        stream = None
        if self._keeps_stream and not self._has_ended:
            dataset: Any = self._loader.dataset
            # What the owner holds is loaded again.
            stream = self._stream_states[0] if self._lookahead else dataset.state_dict()
        return {**state, "begin": self._begin, "stream": stream, **self.outline()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores the position for the next epoch that begins."""
        write_parts(self._loader, state["parts"])
        outline, self.remark = self.fit(state) if state["begin"] is not None else ({}, "")
        self._restored, self._begin = {**state, **outline}, None
        self.resumes = state["begin"] is not None
        if hasattr(self._owner, "iteration"):
            self._owner.iteration = state["iteration"]

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
            self._fetched = self._samples_before = self._first = 0
            self._earlier = []
            return self._follow(self._open(0))
        self.on_resume()
        now = read_generators()
        self._begin, self._fetched = dict(state["begin"]), state["taken"]
        sizes = state.get("sizes") or self._read_sizes(self._fetched)
        self._samples_before, self._first, self._earlier = sizes["samples"] or 0, self._fetched, sizes["earlier"]
        write_generators(self._begin)
        write_parts(self._loader, self._begin["parts"])
        for stream, epoch in zip(self._streams, self._begin.get("epochs", ()), strict=False):
            stream.set_epoch(epoch)
        batches = self._open(self._fetched, state)
        write_generators(now)
        write_arrays(self._loader, state["parts"])
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
        batches, _ = _find_batches(self._loader)
        size = self._read_sizes(taken)["batch"]
        has_ended = state is not None and state["ended"]
        is_changed = bool(self._earlier) or self._samples_before != taken * (size or 0)
        is_cut = type(batches) is BatchSampler and is_changed and not has_ended
        tasks.begin(self._key, taken, sys.maxsize if has_ended else 0 if is_cut else taken)
        with _sampling_from(batches, self._draw_rest(batches.sampler)) if is_cut else nullcontext():
            found = iter(inner)
            # Has the sampler draw what it draws while the generators are as they are noted down.
            tasks.newest.prime()
        return found

    def _draw_rest(self, sampler: Any) -> list[int]:
        """Returns the samples that are left of the epoch, in their order."""
        assert self._begin is not None  # The epoch is resumed.
        trained: set[int] = set()
        for length, count in self._earlier:
            former = copy.copy(sampler)
            former.data_source = range(length)
            trained.update([index for index in former if index not in trained][:count])
            write_generators(self._begin)
            write_parts(self._loader, self._begin["parts"])
        return [index for index in sampler if index not in trained][self._samples_before :]

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


def _find_batches(loader: Any) -> tuple[Any, int]:
    """Returns what cuts batches out of the samples' order, and how many of them are a batch of all workers together."""
    batches = loader.batch_sampler
    if type(batches).__name__ != "BatchSamplerShard":  # That of accelerate.
        return batches, 1
    return batches.batch_sampler, 1 if batches.split_batches else batches.num_processes


def _draws_each_once(sampler: Any) -> bool:
    """Returns True if the order that the sampler had for a shorter dataset can be drawn again."""
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


@contextmanager
def _sampling_from(batches: Any, indices: Any) -> Iterator[None]:
    """In the block, batches are cut out of these indices."""
    plain, batches.sampler = batches.sampler, indices
    try:
        yield
    finally:
        batches.sampler = plain


class _BatchTasks:
    """A `batch_sampler` that yields tasks in the order of another sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._key = self._number = self._skipped = 0
        self.newest = _TaskIterator(iter(()), 0, 0, 0)

    def __len__(self) -> int:
        return len(self._sampler)

    def begin(self, key: int, number: int, skipped: int) -> None:
        """Sets how the next iterator begins: the key of the epoch's seeds, its first batch, how many it skips."""
        self._key, self._number, self._skipped = key, number, skipped

    def __iter__(self) -> _TaskIterator:
        self.newest = _TaskIterator(iter(self._sampler), self._key, self._number, self._skipped)
        return self.newest


class _TaskIterator(Iterator[Any]):
    """Skips the first batches' indices when it is asked for the first task."""

    def __init__(self, indices: Iterator[Any], key: int, number: int, skipped: int) -> None:
        self._indices, self._key, self._number, self._left = indices, key, number, skipped
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
