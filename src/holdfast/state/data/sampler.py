"""`ResumableSampler`: the order of samples, and how far the training loop has come in it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

import msgspec

from holdfast.errors import MismatchError, OutOfRangeError, UsageError
from holdfast.format.digests import derive
from holdfast.numbers import check_whole
from holdfast.state.adapters import Adapter, CaptureContext, Loading
from holdfast.state.data.order import Batches, Permutation
from holdfast.state.data.position import Position, count_samples, step_break
from holdfast.state.data.replay import Watched
from holdfast.state.data.streams import BatchIterator, BatchStream
from holdfast.state.leaves import Differences, Skeleton
from holdfast.state.registry import register_adapter
from holdfast.state.rng import undisturbed

Batch = TypeVar("Batch")

_BLOCK_SAMPLES: Final = 8192
# Tells the number that draws at the beginning of a pass start from apart from others derived of seed and epoch.
_FOR_LOADERS: Final = 4


class _Pass(msgspec.Struct):
    """One pass of a loader through the rest of an epoch, which the position follows."""

    epoch: int
    batches: int
    handed_out: int = 0
    taken: int = 0


_log: Final = logging.getLogger("holdfast")


class BatchCount(Watched):
    """Counts the batches that a training loop has taken from one sampler in this process, for warnings.

    A copy of the sampler, pickled or not, begins with its own count.

    Attributes:
        batches: How many were taken.
        ends: How often the loop asked for another batch at the end of an epoch.
        calls: Functions to call when a batch of training was taken, or some were.
        is_asked: True if the program has read or set the epoch since a position was restored.
        unasked_epochs: How many epochs of a restored position were complete when a loop over the rest of an epoch began
            without asking; 0 if none did.
        overruled: Seed and shuffle as the script set them and as the newest restore did, if they differ.
        has_warned: True if the sampler has warned of a loop over epochs.
    """

    def __init__(self) -> None:
        self.batches = self.ends = self.unasked_epochs = 0
        self.is_asked = self.has_warned = False
        self.calls: list[Callable[[], object]] = []
        self.overruled: dict[str, tuple[Any, Any]] = {}

    def note_taken(self) -> None:
        """Calls the functions of `calls`."""
        for call in [*self.calls]:
            call()

    def __reduce__(self) -> tuple[type[BatchCount], tuple[()]]:
        return BatchCount, ()


class ResumableSampler:
    """Yields lists of indices, one list per batch, in an order that a job can resume at any batch.

    Use it as the `batch_sampler` of a loader. Its position moves when the training loop takes a batch, not when a
    loader prefetches one, so the loop must take its batches through the sampler:

        sampler = ResumableSampler(dataset, batch_size=32, seed=1)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
        for epoch in sampler.epochs(10):
            for batch in sampler.batches(loader):
                ...

    In a job of several workers each creates one, with the same arguments except `rank`, and gets its part of each
    batch: all have the same number of batches, and at least one sample of each. Samples at the end of an epoch that are
    fewer than the workers join the batch before.

    The position is counted in samples of the whole job, and the batch is that of the whole job, so both the batch size
    and the number of workers may change between a save and a restart: each sample of the epoch still comes exactly
    once. If fewer samples of the epoch remain than there are workers, the first samples of the next epoch fill that
    batch up to one sample per worker, and the next epoch continues after those. The order follows from seed, epoch and
    length by the formula of `holdfast.state.data.order`; no random generator is involved.

    A batch that is taken between two steps of `PreemptionCheckpointHandler.run`, as an argument, belongs to the next
    step: the saved position is then the one before it.

    A pass through a loader ends when a newer one begins, or when another position is loaded or set; taking another
    batch from it is an error. Iterating the sampler itself gives the rest of the epoch, and moves nothing.

    Use it in one thread, that of the training loop; a loader may draw indices in another one.

    Attributes:
        count: What was taken in this process, for holdfast's own warnings.
    """

    def __init__(
        self,
        length_or_dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        order: Callable[[int, int], Sequence[int]] | None = None,
        on_resize: Literal["error", "next_epoch"] = "error",
    ) -> None:
        """Creates a sampler at the beginning of epoch 0.

        Args:
            length_or_dataset: The number of samples, or an object with a length.
            batch_size: The samples of one batch of the whole job.
            shuffle: True for another order in each epoch, False for the order of indices.
            seed: The seed of the orders, from 0 up to 2**64, exclusive.
            drop_last: True to skip an incomplete last batch.
            rank: The rank of this worker among those that share the data.
            world_size: The number of these workers. Workers that compute one model together, as in tensor parallelism,
                count as one here and get the same samples.
            order: Takes the seed and the number of an epoch, and returns all indices of that epoch, always the same
                ones; in place of a shuffle.
            on_resize: "next_epoch" to continue with the next epoch where the position was saved with another number of
                samples, because the dataset has grown, say. By default that is an error.

        Raises:
            UsageError: If an argument is not valid.
        """
        if on_resize not in ("error", "next_epoch"):
            raise UsageError(f"on_resize={on_resize!r} is neither 'error' nor 'next_epoch'")
        length = count_samples(length_or_dataset)
        batch_size = check_whole("batch_size", batch_size, 1)
        seed = check_whole("seed", seed, 0, (1 << 64) - 1)
        world_size = check_whole("world_size", world_size, 1)
        rank = check_whole("rank", rank, 0, world_size - 1)
        if world_size > batch_size:
            raise OutOfRangeError(
                f"rank={rank!r} of world_size={world_size!r} workers cannot share a batch of {batch_size} samples",
                hint="batch_size counts the samples of the whole job: it needs at least one for each worker.",
            )
        self._cut = Batches(length, batch_size, bool(drop_last), rank, world_size)
        self._shuffle = bool(shuffle)
        self._seed, self._order, self._on_resize = seed, order, on_resize
        self._epoch = 0
        self._position_samples = 0
        self._pass: _Pass | None = None
        # The position before the first batch that was taken for a step to come, and in which break between steps.
        self._untrained: tuple[int, int, int] | None = None
        self._unfollowed_batches = 0
        # The epoch of which a loop has taken the last batch, and maybe asks for no more.
        self._taken_epoch: int | None = None
        self._is_restored = False
        self._moves = self._skips = 0
        self.count = BatchCount()

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        self.count.is_asked = True
        return self._epoch

    @property
    def position_samples(self) -> int:
        """The samples of this epoch that the training loop has taken, on all workers together."""
        return self._position_samples

    @property
    def batches_done(self) -> int:
        """The batches of this epoch that the training loop has taken, in batches of the present size."""
        return len(self) - self._cut.count_from(self._position_samples)

    @property
    def seed(self) -> int:
        """The seed of the orders."""
        return self._seed

    def look(self) -> Position:
        """Returns order and position. Unlike `epoch`, that does not count as a question of the program."""
        return Position(self._epoch, self._position_samples, self._seed, self._cut.length, self._shuffle)

    def count_complete(self) -> int:
        """Returns how many epochs are complete."""
        return self._epoch + self.has_taken_last()

    def has_taken_last(self) -> bool:
        """Returns True if the loop has taken the last batch of an epoch, and not asked for another one since."""
        return not self._cut.count_from(self._position_samples)

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        return self._cut.count_from(0)

    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches from the position to the end of the epoch, without moving the position."""
        # An iterator made after a pass has given its first batch is not that pass's own.
        current = self._pass if self._pass and not self._pass.taken else None
        return self._hand_out(current, self._epoch, self._position_samples)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the rest of this epoch; the position moves just before each batch is given out.

        The next epoch begins once the loop asks for a batch after the last one, or takes the last one and calls this
        again. If the loop leaves early, the next call continues the epoch there. If a restored position leaves nothing
        of its epoch, the first call gives nothing: the loop then ends the epoch. Beginning a pass does not change the
        global random generators.

        Args:
            loader: An iterable that makes a batch of each list of indices of this sampler, such as a `DataLoader` with
                this `batch_sampler`; or the sampler itself.

        Raises:
            UsageError: If the loader keeps its own position, does not keep the order, or does not use this sampler; or,
                at a later batch, if a newer pass has ended this one.
        """
        self.check_loader(loader)
        if self._is_restored and not self.count.is_asked:
            self.count.unasked_epochs = self.count_complete()
        return BatchIterator(self._follow_on(loader))

    def stream(self, loader: Iterable[Batch]) -> BatchStream[Batch]:
        """Yields batches like `batches`, over one epoch after the other without end.

        If another position is loaded or set meanwhile, it continues there. Its `len` is the number of batches of an
        epoch: a loop of another library that asks for that many per epoch gets all of them, also after a restart.

        Raises:
            UsageError: As in `batches`; and if an epoch has no batch.
        """
        self.check_loader(loader)
        if not len(self):
            raise UsageError(
                f"{self!r} has no batches",
                hint="Check the dataset's length; with drop_last=True it must have at least one whole batch.",
            )
        return BatchStream(self._follow_for_ever(loader), len(self))

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs up to `total`, beginning with that of the position.

        Each is followed by the next even if the loop's body has not used all of its batches. If a body uses more than
        one epoch, because it evaluates with the training loader, a warning says so once.
        """
        total = check_whole("total", total)
        self.count.is_asked = True
        while self._epoch < total:
            epoch, moves = self._epoch, self._moves
            yield epoch
            if self._moves != moves:
                continue
            if self._epoch == epoch:
                self.set_epoch(epoch + 1)
            elif self._epoch > epoch + 1 and not self.count.has_warned:
                self.count.has_warned = True
                _log.warning(
                    "epochs %d to %d ended within one turn of epochs(%d): a pass that only evaluates counts as "
                    "an epoch, too. Use a separate loader for evaluation",
                    epoch,
                    self._epoch - 1,
                    total,
                )

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of an epoch; if the position is already in that epoch, it stays.

        It also stays if a position was restored and is in a later epoch, because loops of other libraries count their
        epochs from 0 again after a restart; if nothing is left of its epoch, it goes to the next one. The first time,
        that is a warning: your own loop over `range(n)` would train n more epochs. Use `epochs(n)`.

        Raises:
            UsageError: If the number is below 0.
        """
        epoch = check_whole("epoch", epoch)
        self.count.is_asked = True
        if epoch < self._epoch and self._is_restored and not self.count.has_warned:
            self.count.has_warned = True
            _log.warning(
                "set_epoch(%d) after a restore in epoch %d: the position stays in epoch %d. A loop over range(n) "
                "trains n more epochs; write `for epoch in loader.epochs(n)` to train n in total",
                epoch,
                self._epoch,
                self._epoch,
            )
        if epoch > self._epoch or (epoch < self._epoch and not self._is_restored):
            self._move(epoch, 0)
        elif epoch < self._epoch and self.has_taken_last():
            self._move(self._epoch + 1, 0)

    def skip(self, batches: int) -> None:
        """Called when training has gone back to the position that was just loaded: leaves out that many batches.

        None of them is loaded. Loops over loaders go on with the batch after them.
        """
        self._move(*self._cut.move(self._epoch, self._position_samples, batches))
        self._skips += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns order and position as plain values; between two steps of `handler.run`, those of the last complete
        one.

        Raises:
            UsageError: If batches were given to a loader that was not followed: then it is unknown which of them were
                trained.
        """
        if self._unfollowed_batches:
            raise UsageError(
                f"{self._unfollowed_batches} batches of this sampler went to a loader that was iterated directly, "
                "so it is unknown how many of them were trained",
                hint="Iterate sampler.batches(loader) or sampler.stream(loader) instead of the loader, or use "
                "ResumableDataLoader. A StatefulDataLoader saves its own position and needs a plain sampler.",
            )
        position = self.look()
        if self._untrained is not None and self._untrained[0] == step_break.number:
            _, epoch, position_samples = self._untrained
            position = replace(position, epoch=epoch, position_samples=position_samples)
        return position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a stored position; seed and shuffle are those that were stored.

        Raises:
            MismatchError: If the stored position is for another number of samples.
            UsageError: If the state is not that of a sampler, or of a newer version.
        """
        stored = Position.from_state(state)
        difference = self.difference_from(stored)
        if difference:
            raise MismatchError(
                f"the saved data position does not fit: {difference}",
                differences=Differences(wrong_shape=[difference]),
                hint="Use the data that the job was trained on, or restore everything but the loader.",
            )
        epoch, position_samples = stored.epoch, stored.position_samples
        if stored.length != self._cut.length:
            epoch, position_samples = epoch + (position_samples > 0), 0
            _log.warning(
                "the data has %d samples, and had %d when the position was saved: training continues with epoch %d",
                self._cut.length,
                stored.length,
                epoch,
            )
        live = {"seed": (self._seed, stored.seed), "shuffle": (self._shuffle, stored.shuffle)}
        self.count.overruled = {name: pair for name, pair in live.items() if pair[0] != pair[1]}
        self._seed = stored.seed
        self._shuffle = stored.shuffle
        self._is_restored, self.count.is_asked = True, False
        self._move(epoch, position_samples)

    def difference_from(self, stored: Position) -> str:
        """Returns why a stored position cannot be used with these samples; an empty string if it can."""
        if stored.length == self._cut.length or self._on_resize == "next_epoch":
            return ""
        return (
            f'stored {stored.length} samples, live {self._cut.length}; with on_resize="next_epoch" it '
            "continues with the next epoch"
        )

    def check_loader(self, loader: Any) -> None:
        """Refuses a loader that this sampler cannot follow.

        Raises:
            UsageError: If it keeps its own position, or does not keep the order.
        """
        if loader is self:
            return
        if hasattr(loader, "state_dict"):
            raise UsageError(
                f"{type(loader).__name__} saves its own position, which would be wrong with this sampler",
                hint="Use a ResumableDataLoader or a plain loader, or iterate it directly, without a ResumableSampler.",
            )
        if getattr(loader, "in_order", True) is False:
            raise UsageError(
                "a loader with in_order=False gives batches in an order that cannot be resumed",
                hint="Leave in_order at its default.",
            )

    def __repr__(self) -> str:
        cut = self._cut
        workers = "" if cut.world_size == 1 else f", rank={cut.rank}, world_size={cut.world_size}"
        return (
            f"ResumableSampler({self._cut.length}, batch_size={cut.batch_size}, shuffle={self._shuffle}, "
            f"seed={self._seed}, drop_last={cut.drop_last}{workers})"
        )

    def _hand_out(self, current: _Pass | None, epoch: int, start: int) -> Iterator[list[int]]:
        for indices in self._indices(epoch, start):
            if current is None:
                self._unfollowed_batches += 1
            else:
                current.handed_out += 1
            yield indices

    def _indices(self, epoch: int, start: int) -> Iterator[list[int]]:
        order_of = self._order and functools.lru_cache(1)(self._order)
        for further, batches in self._cut.blocks_from(start, _BLOCK_SAMPLES):
            places = itertools.chain.from_iterable(batches)
            if order_of is not None:
                order = order_of(self._seed, epoch + further)
                indices = [order[place] for place in places]
            elif self._shuffle:
                indices = Permutation(self._cut.length, derive(self._seed, epoch + further)).of(batches)
            else:
                indices = list(places)
            first = 0
            for batch in batches:
                yield indices[first : first + len(batch)]
                first += len(batch)

    def _follow_on(self, loader: Iterable[Batch]) -> Generator[Batch]:
        """Like `_follow`, and goes on in the rest of the epoch to which training has gone back meanwhile."""
        is_over = False
        while not is_over:
            skips, is_over = self._skips, True
            with contextlib.closing(self._follow(loader)) as batches:
                for batch in batches:
                    yield batch
                    if self._skips != skips:
                        is_over = False
                        break

    def _follow(self, loader: Iterable[Batch]) -> Generator[Batch]:
        if self._taken_epoch == self._epoch:
            # The loop before has counted its batches, and did not ask whether there was another one.
            self._epoch, self._position_samples = self._epoch + 1, 0
        self._taken_epoch = None
        current = self._pass = _Pass(self._epoch, self._cut.count_from(self._position_samples))
        self._unfollowed_batches = 0
        try:
            # A loader with nothing left to load need not start its workers.
            if current.batches:
                # A loader may draw from a global generator when it begins: in the middle of an epoch, where only a
                # resumed job begins, that would shift all that is drawn later.
                with undisturbed():
                    _seed_draws(derive(self._seed, self._epoch, _FOR_LOADERS, self._position_samples))
                    iterator = iter(loader)
                for batch in iterator:
                    self._take(current)
                    if self.count.see is not None:
                        self.count.see(batch)
                    yield batch
            self._end_epoch(current)
        finally:
            if self._pass is current:
                self._pass = None

    def _follow_for_ever(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        while True:
            moves = self._moves
            with contextlib.closing(self._follow(loader)) as batches:
                for batch in batches:
                    yield batch
                    if self._moves != moves:
                        break

    def _take(self, current: _Pass) -> None:
        self._check_current(current)
        if current.taken == current.handed_out:
            raise UsageError(
                "the loader gave a batch that this sampler did not produce",
                hint="Create the loader with this sampler: DataLoader(dataset, batch_sampler=sampler).",
            )
        current.taken += 1
        self.count.batches += 1
        self.count.note_taken()
        # The loop goes on with this pass, so what else was handed out meanwhile was only looked at.
        self._unfollowed_batches = 0
        if not step_break.is_open:
            self._untrained = None
        elif self._untrained is None or self._untrained[0] != step_break.number:
            self._untrained = (step_break.number, self._epoch, self._position_samples)
        further, self._position_samples = self._cut.end_of(self._position_samples)
        self._epoch += further
        self._taken_epoch = current.epoch if current.taken == current.batches else None

    def _end_epoch(self, current: _Pass) -> None:
        self._check_current(current)
        self.count.ends += 1
        if current.taken < current.batches:
            raise UsageError(
                f"the loader ended after {current.taken} of the {current.batches} remaining batches of epoch "
                f"{self._epoch}",
                hint="To leave an epoch early, break out of the loop and call set_epoch, or use epochs().",
            )
        # The last batch may have gone on into the next epoch.
        if self._epoch == current.epoch:
            self._epoch += 1
            self._position_samples = 0

    def _check_current(self, current: _Pass) -> None:
        if self._pass is not current:
            raise UsageError(
                "another loop over this loader has started, or its position was set or loaded: this loop cannot "
                "continue",
                hint="For evaluation, use a separate loader. To continue from a position that was set or loaded, "
                "start a new loop.",
            )

    def _move(self, epoch: int, position_samples: int) -> None:
        self._epoch = epoch
        self._position_samples = position_samples
        self._pass = self._untrained = self._taken_epoch = None
        self._unfollowed_batches = 0
        self._moves += 1


class SamplerAdapter(Adapter):
    """Adapter of samplers and everything built on one: their states are the same, and interchangeable."""

    kind = "data_position"

    def __init__(self, sampler_of: Callable[[Any], ResumableSampler]) -> None:
        """Stores the function that finds an object's sampler."""
        self._sampler_of = sampler_of

    def find_sampler(self, obj: Any) -> ResumableSampler | None:
        """Returns the sampler that an object is built on; None if it keeps a position in another way."""
        return self._sampler_of(obj)

    def follow_batches(self, obj: Any, call: Callable[[Any], None]) -> Callable[[], object] | None:
        """See `Adapter`."""
        sampler = self.find_sampler(obj)
        return None if sampler is None else sampler.count.follow_batches(call)

    def facts_of_batches(self, obj: Any) -> object:
        """See `Adapter`."""
        sampler = self.find_sampler(obj)
        if sampler is None:
            return None
        return sampler._seed, sampler._cut.length, sampler._shuffle, sampler._cut.batch_size, sampler._cut.drop_last

    def state_of(self, obj: Any, context: CaptureContext) -> Any:
        """Returns the sampler's state."""
        return self._sampler_of(obj).state_dict()

    def begin_load(self, obj: Any, stored: Skeleton, loading: Loading) -> Callable[[], None]:
        """Checks whether the stored position fits, before anything is changed."""
        # A position is one thing: without its epoch, say, the rest of it means nothing.
        if not loading.wants():
            return leave_alone
        sampler = self._sampler_of(obj)
        state = loading.value(stored, None)
        try:
            difference = sampler.difference_from(Position.from_state(state))
        except UsageError as error:
            loading.differences.wrong_kind.append(f"{loading.name()}: {error.message}")
            return leave_alone
        if difference:
            loading.differences.wrong_shape.append(f"{loading.name()}: {difference}")
            return leave_alone
        return lambda: sampler.load_state_dict(state)


def leave_alone() -> None:
    """Restores no state."""


register_adapter(ResumableSampler, SamplerAdapter(lambda sampler: sampler))


def _seed_draws(number: int) -> None:
    """Seeds what a loader may draw from when it begins.

    A loader's workers are seeded by such a draw. Because all generators are restored afterwards, each epoch would draw
    the same number again if training draws none, and augmentations would repeat.
    """
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number >> 32)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(number)
