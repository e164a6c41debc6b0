"""The position of a training loop in the data of a plain `DataLoader`, which the program does not have to change."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from holdfast.errors import UsageError
from holdfast.format.digests import derive, digest
from holdfast.integrations.torch.batch_tasks import BatchTasks, SeededBatches
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
    as_it_is,
    describe_loader,
    generators_put_back,
    seed_generators,
    signals_blocked,
)
from holdfast.state.data.replay import Taken, Watched, Way, describe_change, describe_reading, read_past
from holdfast.state.data.sampler import ResumableSampler

_PASSED_ON: Final = ("num_workers", "pin_memory", "timeout", "multiprocessing_context")


class DataPlace(Watched):
    """How many batches training has taken in the current epoch of a loader, and how the order of the epoch was drawn.

    The order is not stored. It follows from the random generators as they were when the epoch began, which are stored:
    a restart draws the indices of the epoch again and skips those that were trained, without loading their samples.

    The generators of Python, NumPy and torch (CPU) are seeded for each batch of a dataset with indices, by the state of
    torch's when the epoch began, and the number of the epoch. So an augmentation, or a mask that is drawn while a batch
    is collated, is the same after a restart, regardless of prefetching workers. Each epoch has others, even if nothing
    draws from these generators between two. Loading does not change the generators of training.

    The position is also stored in samples, with the sizes of a batch and of the dataset: if these have changed, the
    samples that are left are drawn again, and come in the present batches. The count of batches is then the one that
    ends the epoch with the data.

    Attributes:
        lookahead: How many of the batches that were taken from the loader are not passed on yet.
        caveat: What a restart will have to do nevertheless, or cannot; empty if there is no such thing.
        resumes: True if the next epoch that begins continues at the restored position.
        on_resume: Called when it does.
        is_driven: As in `__init__`.
        remark: What a restore has found changed since the save, and how the epoch continues; empty if nothing has.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        owner: Any = None,
        lookahead: int = 0,
        *,
        is_dispatched: bool = False,
        is_driven: bool = False,
    ) -> None:
        """Follows a loader from now on; the loader is changed in place.

        Args:
            loader: A torch loader.
            owner: The object that iterates it and passes its batches on, if any; its `iteration` counts the epochs.
            lookahead: How many batches the owner takes from the loader before it passes on the one before.
            is_dispatched: True if the owner gives a part of each batch to each worker; it asks `try_pass` first.
            is_driven: True if only `start` begins an epoch, and a loop over the loader itself counts for nothing.

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
        self._loader, self._owner, self.lookahead = loader, owner, lookahead
        self._is_dispatched, self.is_driven = is_dispatched, is_driven
        note_parts(loader)
        self._data = _Stream(loader) if isinstance(loader.dataset, IterableDataset) else _Indexed(loader)
        self.caveat = self._data.caveat
        self._begin: dict[str, Any] | None = None
        self._taken, self._begun_iteration = Taken(), 0
        self._is_left = False
        self._restored: Mapping[str, Any] | None = None
        self.resumes = False
        self.on_resume: Callable[[], object] = lambda: None
        self.remark = ""
        vars(loader)["_place"] = self
        # It stays of its own class. A framework may ask for its state, but its place is kept here.
        stateless = {"state_dict": lambda _: {}, "load_state_dict": lambda *_: None}
        own = {"_get_iterator": DataLoader._get_iterator, **(stateless if has_state(loader) else {})}
        loader.__class__ = type(f"Followed{cls.__name__}", (_FollowedLoader, cls), own)

    @property
    def source(self) -> Any:
        """The object from which training takes its batches: the owner, or the loader itself."""
        return self._loader if self._owner is None else self._owner

    @property
    def has_ended(self) -> bool:
        """True if the loader has nothing left in this epoch."""
        return self._taken.has_ended

    def __repr__(self) -> str:
        return f"<DataPlace: {self._count_trained()} batches of {self._loader!r}>"

    def _count_trained(self) -> int:
        taken = self._taken
        return taken.batches if taken.has_ended else max(taken.batches - self.lookahead, 0)

    def outline(self) -> dict[str, Any]:
        """Returns the position without the order: `taken` in batches, `ended`, and `sizes` for `fit`.

        `total` is the number of batches of an epoch; None if it is not known, or workers share each batch.
        """
        is_unknown = self._data.length is None or self._is_dispatched
        found: dict[str, Any] = {"total": None}
        with suppress(TypeError):  # A batch sampler needs no length.
            found["total"] = None if is_unknown else len(self._loader)
        state = self._restored if self._restored is not None and self._begin is None else None
        if state is not None and state["begin"]:
            return {**found, **{name: state.get(name) for name in ("taken", "ended", "sizes")}}
        is_other = getattr(self._owner, "iteration", self._begun_iteration) != self._begun_iteration
        if state is not None or self._begin is None or is_other:
            return {**found, "taken": 0}
        has_ended = self.has_ended or bool(getattr(self._owner, "end_of_dataloader", False))
        trained = self._count_trained()
        return {**found, "taken": trained, "ended": has_ended, "sizes": self._data.size(self._taken, trained)}

    def fit(self, outline: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Returns a stored position in the present batches, and what has changed; empty if nothing has."""
        same, sizes = dict(outline), outline.get("sizes")
        if outline.get("ended", True):
            return same, ""
        if sizes is None:
            return same, "the checkpoint does not say how many samples a batch had: keep that number in this epoch"
        size, length = self._data.batch_size, self._data.length
        is_changed = (size, length) != (sizes["batch"], sizes["length"])
        if not is_changed and not sizes["earlier"] and sizes["samples"] in (None, outline["taken"] * (size or 0)):
            return same, ""
        rest, is_exact = self._data.plan_rest(outline["taken"], sizes)
        same |= {"taken": rest.batches, "ended": rest.has_ended, "sizes": self._data.size(rest, rest.batches)}
        if not is_changed:
            return same, ""
        changes = {"batch size": (size, sizes["batch"]), "samples in the dataset": (length, sizes["length"])}
        text = describe_change(changes, is_exact=is_exact)
        if is_exact and length != sizes["length"]:
            text += ", provided that the new ones are at the end"
        return same, text

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, as plain values."""
        iteration = getattr(self._owner, "iteration", self._begun_iteration)
        if self._restored is not None and self._begin is None:
            return dict(self._restored)  # Nothing was taken since it was restored.
        state = {"iteration": iteration, "parts": read_parts(self._loader), "begun": self._data.begun}
        if self._begin is None or iteration != self._begun_iteration:
            return {**state, "begin": None, "taken": 0, "ended": False, "stream": None}
        stream = None if self.has_ended else self._data.read(self.lookahead)
        return {**state, "begin": self._begin, "stream": stream, **self.outline()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stores the position for the next epoch that begins."""
        write_parts(self._loader, state["parts"])
        outline, self.remark = self.fit(state) if state["begin"] is not None else ({}, "")
        self._restored, self._begin = {**state, **outline}, None
        self._data.begun = state.get("begun", 0)  # Older checkpoints have no such number.
        self.resumes = state["begin"] is not None
        if hasattr(self._owner, "iteration"):
            self._owner.iteration = state["iteration"]

    def describe(self) -> object:
        """See `describe_loader`."""
        return describe_loader(self._loader)

    def close(self) -> None:
        """Ends the loader's persistent workers, if it has some."""
        self._data.close()

    def forget_left(self) -> None:
        """Called when training goes on. If its loop has left the epoch by `break`, the next one starts at batch 0."""
        if self._is_left:
            self.forget()

    def forget_all(self) -> None:
        """Leaves the epoch, and those before it: the next one is the first."""
        self.forget()
        self._data.begun = 0

    def forget(self) -> None:
        """Leaves the epoch: the next one starts at batch 0."""
        self._begin, self._is_left, self.resumes = None, False, False
        if self._restored is not None:
            self._restored = {**self._restored, "begin": None, "taken": 0, "ended": False, "stream": None}

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
        self._is_left = False
        self._begun_iteration = getattr(self._owner, "iteration", 0)
        if state is None:
            streams, number = self._data.begin_epoch(), self._data.begun
            self._begin = {**read_generators(), "parts": read_parts(self._loader), "epochs": streams, "number": number}
            self._data.begun = number + 1
            self._taken = Taken()
            return self._follow(self._data.open(self._begin, self._taken))
        self.on_resume()
        now = read_generators()
        begin = self._begin = dict(state["begin"])
        sizes, trained = state.get("sizes"), state["taken"]
        # An old checkpoint has no sizes: then all batches had the present one.
        self._taken = Taken(trained, state["ended"], trained, trained * (self._data.batch_size or 0))
        if sizes:
            self._taken.samples_before, self._taken.earlier = sizes["samples"] or 0, sizes["earlier"]
        _draw_again(self._loader, begin)
        batches = self._data.open(begin, self._taken, state)
        write_generators(now)
        write_arrays(self._loader, state["parts"])
        if state["ended"] and hasattr(self._owner, "iteration"):
            self._owner.iteration += 1  # The owner does not count an epoch that has no batch.
        return self._follow(batches)

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        ahead: deque[Any] = deque()
        taken = self._taken
        while True:
            try:
                batch = self._data.take(batches, taken.batches, self.lookahead)
            except StopIteration:
                taken.has_ended = True
                while ahead and self.see is not None:
                    self.see(ahead.popleft())
                if self._owner is None:
                    self._begin = None  # The loop has asked for a batch after the last one.
                return
            taken.batches += 1
            if self.see is not None:
                ahead.append(batch)
                if len(ahead) > self.lookahead:
                    self.see(ahead.popleft())
            try:
                yield batch
            except GeneratorExit:
                self._is_left = True
                raise


def follow_loader(loader: Any) -> DataPlace | None:
    """Follows a loader that only `start` drives; None if it iterates in its own way.

    Raises:
        UsageError: If accelerate, one of holdfast's integrations or a `ResumableSampler` keeps its place.
    """
    place: DataPlace | None = getattr(loader, "__dict__", {}).get("_place")
    if not issubclass(type(loader), DataLoader) or not (place is None or place.is_driven):
        raise UsageError(
            f"run.batches cannot follow this {type(loader).__name__}, which is prepared or followed already",
            hint="Iterate it directly, in a run of holdfast.accelerate.resumable(accelerator, ...).",
        )
    if isinstance(loader.batch_sampler, ResumableSampler):
        raise UsageError(
            "the ResumableSampler of this DataLoader keeps its own place: run.batches cannot follow it as well",
            hint="Create the loader with shuffle=True or a sampler of yours; or pass it to resumable, loader=loader, "
            "and iterate sampler.batches(loader).",
        )
    if place is not None:
        place.forget_all()
        return place
    is_plain = type(loader).__iter__ is DataLoader.__iter__ or type(loader).__name__ == "StatefulDataLoader"
    return DataPlace(loader, is_driven=True) if is_plain else None


class _FollowedLoader(DataLoader[Any]):
    """A plain loader that reports each batch to its `DataPlace`."""

    _place: DataPlace

    def __iter__(self) -> Any:
        return DataLoader.__iter__(self) if self._place.is_driven else self._place.start()


class _Indexed:
    """The data of a loader whose dataset has indices: their order is drawn again, and no trained sample is loaded.

    Attributes:
        way: How a restart comes back to a position.
        caveat: What such a restart has to do, or cannot; empty if there is no such thing.
        begun: How many epochs were begun.
    """

    way, caveat = Way.INDICES, ""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader, self.begun = loader, 0
        self._inner: DataLoader[Any] | None = None

    @property
    def batch_size(self) -> int | None:
        """The samples of a batch, of all workers that share the loader's batches; None if these differ."""
        batches, shares = _find_batches(self._loader)
        size = getattr(batches, "batch_size", None)
        return None if size is None else int(size) * shares

    @property
    def length(self) -> int | None:
        """The number of samples; None if that is not known."""
        return len(self._loader.dataset)  # type: ignore[arg-type]

    def size(self, taken: Taken, batches: int) -> dict[str, Any]:
        """Returns the sizes of batch and data, and the samples in so many batches of an epoch, as they are stored."""
        samples = taken.count_samples(batches, self.batch_size)
        return {"batch": self.batch_size, "length": self.length, "samples": samples, "earlier": taken.earlier}

    def begin_epoch(self) -> list[int]:
        """Called before an epoch begins with its first batch; returns the streams' numbers of it."""
        return []

    def read(self, lookahead: int) -> Any:
        """Returns the data's own state; None if it has none."""
        return None

    def plan_rest(self, trained: int, stored: Mapping[str, Any]) -> tuple[Taken, bool]:
        """Returns how much was taken of an epoch in the present batches, and whether each other sample comes once.

        Args:
            trained: How many batches were trained at the save.
            stored: What `size` returned then.
        """
        batches, _ = _find_batches(self._loader)
        samples, earlier = stored["samples"], stored["earlier"]
        if type(batches) is not BatchSampler:
            return Taken(trained, False, trained, samples, earlier), False
        sampler: Any = batches.sampler
        length, former, is_exact = self.length or 0, stored["length"], True
        if length != former:
            is_exact = length > former and _draws_each_once(sampler)
            earlier, samples = ([*earlier, [former, samples]], 0) if is_exact else (earlier, samples)
        left = max(len(sampler) - samples - sum(count for _, count in earlier), 0)
        total = len(self._loader.batch_sampler)  # type: ignore[arg-type]
        with _sampling_from(batches, range(left)):
            left = len(self._loader.batch_sampler)  # type: ignore[arg-type]
        taken = max(total - left, 0)
        return Taken(taken, left == 0, taken, samples, earlier), is_exact

    def open(self, begin: Mapping[str, Any], taken: Taken, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Begins an epoch after the batches that were taken; the generators are as when it began.

        Args:
            begin: What the epoch began with.
            taken: How much of it was taken.
            state: The restored position; None if the epoch begins with its first batch.
        """
        inner = self._inner or self._make_inner(begin)
        if inner.num_workers and inner.persistent_workers:
            self._inner = inner
        tasks: Any = inner.batch_sampler
        batches, _ = _find_batches(self._loader)
        is_changed = bool(taken.earlier) or taken.samples_before != taken.batches * (self.batch_size or 0)
        is_cut = type(batches) is BatchSampler and is_changed and not taken.has_ended
        skipped = sys.maxsize if taken.has_ended else 0 if is_cut else taken.batches
        tasks.begin = _derive_key(begin), taken.batches, skipped
        with _sampling_from(batches, self._draw_rest(batches.sampler, begin, taken)) if is_cut else nullcontext():
            found = iter(inner)
            # Has the sampler draw what it draws while the generators are as they are noted down.
            tasks.newest.prime()
        return found

    def take(self, batches: Iterator[Any], number: int, lookahead: int) -> Any:
        """Returns the batch of that number in the epoch.

        Raises:
            StopIteration: If none is left.
        """
        return next(batches)

    def close(self) -> None:
        """Ends the persistent workers."""
        inner, self._inner = self._inner, None
        workers = getattr(inner, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()

    def _draw_rest(self, sampler: Any, begin: Mapping[str, Any], taken: Taken) -> list[int]:
        """Returns the samples that are left of the epoch, in their order."""
        trained: set[int] = set()
        for length, count in taken.earlier:
            former = copy.copy(sampler)
            former.data_source = range(length)
            trained.update([index for index in former if index not in trained][:count])
            _draw_again(self._loader, begin)
        return [index for index in sampler if index not in trained][taken.samples_before or 0 :]

    def _make_inner(self, begin: Mapping[str, Any]) -> DataLoader[Any]:
        loader = self._loader
        is_batched = loader.batch_sampler is not None
        options = {name: getattr(loader, name) for name in _PASSED_ON}
        # Its seed for workers is drawn when they start, which those that persist do once: it disturbs no other order.
        options["generator"] = torch.Generator().manual_seed(_derive_key(begin))
        if loader.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["persistent_workers"] = loader.persistent_workers
        return SignalProofLoader(
            SeededBatches(loader.dataset, loader.collate_fn, is_batched),
            batch_sampler=BatchTasks(loader.batch_sampler if is_batched else loader.sampler),
            collate_fn=as_it_is,
            worker_init_fn=IgnoreSignals(loader.worker_init_fn),
            **options,
        )


class _Stream(_Indexed):
    """The data of a loader whose dataset can only be iterated: it restores its own state, or is read again."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        loader.worker_init_fn = IgnoreSignals(loader.worker_init_fn)
        parts = [*walk_stream(loader.dataset)]
        # The state of a stream of `datasets` leaves out the samples in a shuffle buffer, which would never come. Its
        # order follows from its epoch, and it begins each pass at the state that it has loaded.
        has_buffer = any(type(each).__name__.startswith("BufferShuffled") and each.buffer_size > 1 for each in parts)
        self._parts = [each for each in parts if hasattr(each, "_starting_state_dict")]
        self._states: list[Any] = []
        self._has_loaded, self._key = False, 0
        if not has_buffer and not loader.num_workers and has_state(loader.dataset):
            self.way = Way.STATE
            return
        self.way = Way.READING
        self.caveat = describe_reading(
            type(loader.dataset).__name__,
            "Its state leaves out the samples in its shuffle buffer. A stream without shuffle(buffer_size=...), or a "
            "dataset with indices, avoids that"
            if has_buffer
            else "A dataset with indices, or one with state_dict and load_state_dict and num_workers=0, avoids that",
        )

    @property
    def batch_size(self) -> int | None:
        """See `_Indexed`."""
        return self._loader.batch_size

    @property
    def length(self) -> int | None:
        """See `_Indexed`."""
        return None

    def begin_epoch(self) -> list[int]:
        """See `_Indexed`."""
        for part in self._parts if self._has_loaded else ():
            part._starting_state_dict = None
        return [int(part._epoch) for part in self._parts]

    def read(self, lookahead: int) -> Any:
        """See `_Indexed`; what the owner holds is loaded again."""
        if self.way is not Way.STATE:
            return None
        dataset: Any = self._loader.dataset
        return self._states[0] if lookahead else dataset.state_dict()

    def plan_rest(self, trained: int, stored: Mapping[str, Any]) -> tuple[Taken, bool]:
        """See `_Indexed`."""
        samples, size = stored["samples"], self.batch_size
        if samples is None or size is None:
            return Taken(trained, False, trained, samples, stored["earlier"]), False
        taken = samples // size
        return Taken(taken, False, taken, samples, stored["earlier"]), self.way is Way.STATE or samples % size == 0

    def open(self, begin: Mapping[str, Any], taken: Taken, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """See `_Indexed`."""
        self._key, self._states = _derive_key(begin), []
        if taken.has_ended:
            return iter(())
        if state is not None:
            for part, epoch in zip(self._parts, begin.get("epochs", ()), strict=False):
                part.set_epoch(epoch)
        kept = state["stream"] if state is not None and self.way is Way.STATE else None
        if kept is not None:
            dataset: Any = self._loader.dataset
            dataset.load_state_dict(kept)
            self._has_loaded = True
        with signals_blocked() if self._loader.num_workers else nullcontext():
            batches = DataLoader.__iter__(self._loader)
        if kept is None:
            past = map(partial(self._next, batches), range(taken.batches))  # It may have become shorter.
            read_past(past, taken.batches, type(self._loader.dataset).__name__)
        return batches

    def take(self, batches: Iterator[Any], number: int, lookahead: int) -> Any:
        """See `_Indexed`."""
        if lookahead and self.way is Way.STATE:
            dataset: Any = self._loader.dataset
            self._states = [*self._states, dataset.state_dict()][-lookahead:]
        return self._next(batches, number)

    def _next(self, batches: Iterator[Any], number: int) -> Any:
        if self._loader.num_workers:
            return next(batches)  # Its workers' generators follow from the seed of the epoch.
        with generators_put_back():
            seed_generators(derive(self._key, number))
            return next(batches)


def _derive_key(begin: Mapping[str, Any]) -> int:
    """Returns the number that all seeds of an epoch are derived from."""
    # `torch.manual_seed` alone is to give the same epoch twice. One of an older checkpoint goes on as it has begun.
    contents = (begin["torch"],) if "number" in begin else (begin["python"][1], begin["numpy"][1], begin["torch"])
    # Workers whose generators have the same seed draw different augmentations nevertheless.
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if has_ranks else 0
    number = (begin["number"],) if "number" in begin else ()
    return derive(*(int(digest(content)[:16], 16) for content in contents), rank, *number)


def _draw_again(loader: Any, begin: Mapping[str, Any]) -> None:
    """Restores what an epoch is drawn from, as it was when the epoch began."""
    write_generators(begin)
    write_parts(loader, begin["parts"])


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
