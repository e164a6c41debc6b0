"""The loaders of `run.batches`: the epoch that training is in, and its progress in each loader.

A loader is followed from its first call on. Its `LoaderPlace` leads back to a batch of a pass; this module counts the
passes, and decides which batches belong to a step that is saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from holdfast.errors import UsageError
from holdfast.format.records import Worker
from holdfast.process.progress import LongRead
from holdfast.process.pulse import take_batch
from holdfast.state.adapters import StateDictAdapter
from holdfast.state.data.followed_loader import FollowedLoader
from holdfast.state.data.reading import ReadPlace
from holdfast.state.data.sampler import BatchCount
from holdfast.state.leaves import Skeleton
from holdfast.state.registry import adapter_of, list_members, register_adapter
from holdfast.tracebacks import short_traceback

Batch = TypeVar("Batch")

CALL: Final = "run.batches(loader)"
"""The name of these loaders in messages."""

_ENDLESS: Final = (
    "a whole pass of {name} is over, and run.batches(loader) begins the next one: outside of run.epochs(n) it gives "
    "batches without end. Write `for epoch in run.epochs(n)` around it. If your loop ends at a number of steps, ignore "
    "this"
)


class _WayBack:
    """The way of training back to an earlier step.

    Attributes:
        count: How often it has gone back.
        state: While it goes back, the state to which it does; None otherwise.
        rests: By the identity of a loader, the rest of the pass that a loop over it continues with.
        epochs: How many epochs there are in all: it leads no further.
    """

    def __init__(self) -> None:
        self.count = self.epochs = 0
        self.state: Mapping[str, Any] | None = None
        self.rests: dict[int, Iterator[Any]] = {}


class FollowedData:
    """The epoch that training is in, and its loaders in the order of their first use.

    Attributes:
        warn: Called with each warning.
        count: Counts the batches that training takes; not those of loaders that only evaluate.
        epoch: The epoch in progress, or to begin with.
        is_between: True while a step is saved, of which batches of the next one may be taken already.
        keeps_epoch: True while a state is noted that belongs to the epoch although its passes are over.
    """

    def __init__(self) -> None:
        self.warn: Callable[[str], object] = lambda _: None
        self.count = BatchCount()
        self.epoch = 0
        self.is_between = self.keeps_epoch = False
        self._loaders: list[FollowedLoader] = []
        self._newest: FollowedLoader | None = None
        # The states of loaders that the restarted program has not used yet.
        self._pending: list[Mapping[str, Any]] = []
        self._is_in_epochs = self._is_epoch_left = self._was_in_epochs = False
        self._is_resized = self._has_own_steps = False
        self._back = _WayBack()
        # True if a batch was taken, since the last step, from a loader that is not known to train.
        self._has_unknown = False

    @property
    def is_used(self) -> bool:
        """True if there is something to save."""
        return bool(self._loaders or self._pending or self._was_in_epochs)

    @property
    def has_loaders(self) -> bool:
        """True if a loader is followed in this process."""
        return bool(self._loaders)

    def check_unnamed(self, loader: Any, objects: Mapping[str, object]) -> None:
        """Raises `UsageError` if the program saves a loader by name."""
        is_known = any(one.loader is loader for one in self._loaders)
        cut = getattr(loader, "batch_sampler", loader)
        for path, obj, _ in () if is_known else list_members(objects):
            if obj is loader or obj is cut:
                raise UsageError(
                    f"{path} is saved by its name, and keeps its own place: run.batches cannot follow it as well",
                    hint=f"Iterate it directly, or remove {path} from the arguments of resumable.",
                )

    # What the program calls.

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs."""
        self._back.epochs = total
        self._check_workers()
        if self._is_in_epochs:
            raise UsageError("run.epochs cannot be called inside of an epoch of run.epochs")
        if not self._was_in_epochs:
            self._end_epoch()  # What was taken before was outside of epochs.
        for one in self._loaders:
            if one.is_outside:
                one.drop_pass()
                one.passes = one.spent = 0
        while self.epoch < total:
            self._is_in_epochs, self._is_epoch_left, self._was_in_epochs = True, False, True
            try:
                yield self.epoch
            except GeneratorExit:
                self._is_epoch_left = True
                raise
            finally:
                self._is_in_epochs = False
            self.epoch += 1
            self._end_epoch()
            self.count.note_taken()

    def _end_epoch(self) -> None:
        self._back.rests.clear()
        self._pending = [_begin_again(state) for state in self._pending]
        for one in self._loaders:
            one.drop_pass()
            one.passes = one.spent = 0

    def batches(self, loader: Iterable[Batch] | Callable[[], Iterable[Batch]]) -> LoaderBatches[Batch]:
        """Returns one pass of a loader in an epoch; outside of epochs, one after the other without end."""
        self._check_workers()
        one = self._find(loader)
        if self._is_in_epochs:
            if one.used[0] != self.epoch:
                one.used = self.epoch, sum(other.used[0] == self.epoch for other in self._loaders)
            return LoaderBatches(self._pass_once(one), one)
        if one.current is None:
            one.current = self._pass_for_ever(one)
        return LoaderBatches(one.current, one)

    def _check_workers(self) -> None:
        if self._is_resized:
            raise UsageError(
                "this job has another number of workers than the one that was saved in the middle of an epoch of "
                "run.batches, where each worker has a place of its own in the data",
                hint="Start with the number of workers that it had, or go back to the end of an epoch (start_from=). A "
                "holdfast.ResumableDataLoader(..., rank=, world_size=) that is passed to resumable as loader=loader "
                "continues with any number.",
            )

    def _find(self, loader: Any) -> FollowedLoader:
        found = next((one for one in self._loaders if one.loader is loader), None)
        is_new = found is None
        if found is None:
            adapter = adapter_of(loader)
            place = None if adapter is None else adapter.make_place(loader)
            found = FollowedLoader(loader, ReadPlace(loader) if place is None else place)
        if is_new or found.used[0] < 0:
            # Of the same kinds and sizes, or else of the same kinds: the batch size may have changed. What was used
            # outside of epochs may be left out by the restarted program, or the other way round.
            states = [one for one in self._pending if one.get("outside", False) != self._is_in_epochs]
            for facts in (found.facts, found.facts[:2]):
                state = next((one for one in states if one["facts"][: len(facts)] == facts), None)
                if state is not None:
                    self._pending.remove(state)
                    found.load(state, is_in_epochs=self._is_in_epochs)
                    if found.place.remark:
                        self.warn(f"{found.facts[0]}: {found.place.remark}")
                    break
        if is_new:
            self._add(found)
        return found

    def _add(self, loader: FollowedLoader) -> None:
        """Follows a loader, in place of the one of an earlier epoch if the program creates it again for each."""
        for number, one in enumerate(self._loaders):
            if one.facts == loader.facts and self._is_in_epochs and 0 <= one.used[0] < self.epoch:
                loader.trains, loader.is_remade = one.trains, True
                self._loaders[number] = loader
                return
        self._loaders.append(loader)

    def _pass_once(self, one: FollowedLoader) -> Iterator[Any]:
        if one.spent:
            one.spent -= 1
        else:
            if id(one) not in self._back.rests and (one.current is not None or one.is_left):
                one.end_pass()
            one.current, own, returns = None, object(), -1
            while returns != self._back.count:
                batches, one.current, returns = self._go_on(one, self.epoch), own, self._back.count
                for batch in batches:
                    self._take(one, batch)
                    try:
                        yield batch
                    except GeneratorExit:
                        if one.current is own:
                            one.current, one.is_left = None, True
                        raise
                    if returns != self._back.count:
                        break
                    if one.current is not own:
                        raise UsageError(
                            "another pass of this loader has begun, or its epoch has ended: this loop cannot continue",
                            hint="Call run.batches(loader) again.",
                        )
            one.end_pass()
        if self._counts(one):
            self.count.ends += 1

    def _pass_for_ever(self, one: FollowedLoader) -> Iterator[Any]:
        while True:
            was_within, returns = one.place.resumes or id(one) in self._back.rests, self._back.count
            for batch in self._go_on(one, one.passes):
                self._take(one, batch)
                yield batch
                if returns != self._back.count:
                    break
            else:
                if not (one.done or was_within):
                    raise UsageError(f"{one.facts[0]} has no batches")
                one.passes, one.done = one.passes + 1, 0

    def _take(self, one: FollowedLoader, batch: Any) -> None:
        one.taken += 1
        one.done += 1
        self._newest = one
        self._has_unknown = self._has_unknown or not one.trains
        # A first pass may be a validation before the first step. To end it, a loop may take one batch too many.
        is_again = not self._is_in_epochs and one.taken > (one.total or one.done) + 1
        if is_again and (self._has_own_steps or self._has_unknown) and not self.count.has_warned:
            self.count.has_warned = True
            self.warn(_ENDLESS.format(name=one.facts[0]))
        if not self._counts(one):
            return
        self.count.batches += 1
        if is_again:
            self.count.note_taken()
        if self.count.see is not None:
            one.ahead.append(batch)
            if len(one.ahead) > one.lead:
                self.count.see(one.ahead.popleft())

    def _counts(self, one: FollowedLoader) -> bool:
        """Returns True if a loader trains, or none does yet; after a restart, the one that trained is awaited."""
        return one.trains or not (self._is_any_known() or any(state["trains"] for state in self._pending))

    def _is_any_known(self) -> bool:
        return any(one.trains for one in self._loaders)

    # What a loop calls.

    def note_taken(self) -> dict[int, int]:
        """Returns how many batches were taken of each loader."""
        return {id(one): one.taken for one in self._loaders}

    def find_lead(self, before: Mapping[int, int]) -> None:
        """Called before the first step of a loop over steps: what was taken since is of the step to come.

        Raises:
            UsageError: If that is more than one batch.
        """
        for one in self._loaders:
            one.lead = one.place.lookahead = one.taken - before.get(id(one), 0)
            if one.lead > 1:
                raise UsageError(
                    f"{one.lead} batches were taken from {CALL} before the first step of run.steps(n) began",
                    hint="Take the batch inside the step: for step, batch in zip(run.steps(n), run.batches(loader)).",
                )

    def begin_step(self) -> int:
        """Called when a step of such a loop begins; returns how many batches were taken for it before."""
        self.is_between = False
        for one in self._loaders:
            while one.ahead and self.count.see is not None:
                self.count.see(one.ahead.popleft())
        return sum(one.lead for one in self._loaders)

    def note_own_step(self) -> None:
        """Called when the program's own loop counts a step."""
        self.is_between, self._has_own_steps = False, True

    def note_step(self) -> None:
        """Called when a step is counted: a loader in whose pass that is trains."""
        if not self._has_unknown:
            return
        self._has_unknown = False
        found = [one for one in self._loaders if one.current is not None and one.done]
        if not found and self._newest is not None and not self._is_any_known():
            found = [self._newest]  # The step has taken a whole pass.
        for one in found:
            one.trains = True

    def has_taken_last(self) -> bool:
        """Returns True if the newest batch was the last one of an epoch, and none was asked for since."""
        one = self._newest
        return (
            self._is_in_epochs
            and one is not None
            and one.current is not None
            and one.is_at_end(is_between=self.is_between)
        )

    def count_complete(self) -> int:
        """Returns how many epochs are complete, but for a validation; outside of epochs, passes of the first loader."""
        ended = [state["passes"] + state.get("ended", False) for state in self._pending if state["trains"]]
        ended += [one.passes + one.is_at_end(is_between=self.is_between) for one in self._loaders if self._counts(one)]
        if self._was_in_epochs or not ended:
            return self.epoch + (bool(ended) and all(ended))
        return int(ended[0])

    def take_caveats(self) -> list[str]:
        """Returns what a restart has to do, or cannot, each once."""
        found = [one for one in self._loaders if one.place.caveat and self._counts(one)]
        texts = [one.place.caveat for one in found]
        for one in found:
            one.place.caveat = ""
        return texts

    def describe(self) -> object:
        """Returns what decides which batches come first."""
        return self._loaders[0].facts if self._loaders else None

    def close(self) -> None:
        """Ends all passes, and with them the workers of their loaders."""
        for one in self._loaders:
            one.current = None

    # What is stored.

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the places; those of the next epoch if all passes of the present one are over."""
        # A pass that was left by `break` is over, unless its epoch was left as well.
        within = [
            one.current is not None or one.place.resumes or (one.is_left and self._is_epoch_left)
            for one in self._loaders
        ]
        is_within = any(within) or any(state["within"] for state in self._pending)
        is_over = (
            (self._is_in_epochs or self._is_epoch_left)
            and not (self.keeps_epoch or is_within or any(one.spent for one in self._loaders))
            and any(one.passes or one.is_left for one in self._loaders)
        )
        # A restart repeats this epoch: its loaders come first, in the order in which it has used them.
        by_use = sorted(
            zip(self._loaders, within, strict=True),
            key=lambda pair: (pair[0].used[0] != self.epoch, pair[0].used[1] if pair[0].used[0] == self.epoch else 0),
        )
        loaders = [one.read(is_within=is_in, is_over=is_over, is_between=self.is_between) for one, is_in in by_use]
        loaders += [_begin_again(state) if is_over else dict(state) for state in self._pending]
        epoch, was_in_epochs = self.epoch + is_over, self._was_in_epochs
        return {"epoch": epoch, "in_epochs": was_in_epochs, "within": is_within, "loaders": loaders}

    @contextmanager
    def returning(self) -> Iterator[None]:
        """In the block, a state that is loaded is that to which training goes back: `go_back` goes on there."""
        self._back.state = {}
        try:
            yield
        finally:
            self._back.state = None

    @property
    def has_lead(self) -> bool:
        """True if a loop takes a batch before the step that trains it begins."""
        return any(one.lead for one in self._loaders)

    def count_trained(self) -> int:
        """Returns how many loaders are trained on."""
        return sum(one.trains for one in self._loaders)

    def go_back(self, state: Mapping[str, Any] | None, batches: int) -> int:
        """**Blocks** while it draws that many batches after a state, or the loaded one; they are left out.

        Loops that are in a pass of a loader go on with the batch after them.

        Returns:
            How many of them there are not: the last epoch has ended.
        """
        lacking = 0
        state, self._back.count = state or self._back.state, self._back.count + 1
        if not state:
            return lacking  # The step has no place in a loader.
        self.epoch, self._was_in_epochs, self._pending = state["epoch"], state["in_epochs"], []
        stored = [*state["loaders"]]
        self._back.rests.clear()
        for one in self._loaders:
            found = next((each for each in stored if each["facts"] == one.facts), None)
            current = one.current
            is_outside = one.is_outside
            one.drop_pass()
            one.passes = one.spent = 0
            if found is None:
                continue
            stored.remove(found)
            one.load(found, is_in_epochs=False)
            one.used = (-1 if is_outside else self.epoch), one.used[1]
            if one.trains and batches:
                lacking = self._leave_out(one, batches, is_outside=is_outside)
                one.used = (-1 if is_outside else self.epoch), one.used[1]
            one.current = object() if current is None and id(one) in self._back.rests else current
        return lacking

    def _leave_out(self, one: FollowedLoader, batches: int, *, is_outside: bool) -> int:
        """Draws batches that no step takes, over one pass after the other; the rest of the last pass is kept.

        Returns how many are not drawn, as the last epoch has ended.
        """
        left = batches
        with LongRead(f"leaving out batches of {one.facts[0]}", lambda: batches, "batches") as shown:
            while True:
                rest = self._go_on(one, one.passes if is_outside else self.epoch)
                for _ in itertools.islice(rest, left):
                    one.taken, one.done, left = one.taken + 1, one.done + 1, left - 1
                    shown.advance(1)
                is_over = left > 0 and not is_outside and self.epoch + 1 >= self._back.epochs
                if not left or is_over:
                    self._back.rests[id(one)] = rest
                    self.epoch += is_over  # A restart finds no batch either.
                    return left
                if not one.done:
                    raise UsageError(f"{one.facts[0]} has no batches")
                one.place.forget()
                one.done = 0
                if is_outside:
                    one.passes += 1
                else:
                    self.epoch += 1

    def _go_on(self, one: FollowedLoader, number: int) -> Iterator[Any]:
        """Begins a pass of the epoch of that number, or continues in the one to which training has gone back."""
        rest = self._back.rests.pop(id(one), None)
        if rest is None:
            one.begin_pass(number)
            rest = one.place.start()
        return rest

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a stored state."""
        if self._back.state is not None:
            self._back.state = state
            return
        self.epoch, self._was_in_epochs, self._pending = state["epoch"], state["in_epochs"], [*state["loaders"]]
        self._loaders, self._newest, self._is_resized = [], None, False

    def load_resized(self, stored: Any) -> None:
        """Continues between two epochs with another number of workers; in the middle of one, `batches` refuses."""
        self.load_state_dict({**stored, "loaders": [{**state, "place": None} for state in stored["loaders"]]})
        self._is_resized = stored["within"]


class LoaderBatches(Iterator[Batch]):
    """The batches of a loader of `run.batches`."""

    def __init__(self, batches: Iterator[Batch], loader: FollowedLoader) -> None:
        self._batches, self._loader = batches, loader

    @short_traceback
    def __next__(self) -> Batch:
        return take_batch(self._batches)

    @property
    def batches_done(self) -> int:
        """The batches of this pass that were taken, including those before a restart: `enumerate(batches,
        start=batches.batches_done)` gives each its number in the pass.
        """
        return self._loader.done

    def __len__(self) -> int:
        """Returns the length of the loader: a bar over the rest of a pass begins at `batches_done`, of that many.

        Raises:
            TypeError: If the loader has no length; and outside of epochs, where its batches do not end.
        """
        if isinstance(self._loader.current, Iterator):
            raise TypeError("outside of run.epochs(n), run.batches(loader) has no length: its batches do not end")
        return len(self._loader.loader)

    def __repr__(self) -> str:
        return f"<LoaderBatches of {self._loader.loader!r}: {self._loader.done} taken>"


class _FollowedAdapter(StateDictAdapter):
    is_per_worker = True

    def __init__(self) -> None:
        super().__init__(may_change=False)
        self.kind = "followed_data"

    def find_sampler(self, obj: FollowedData) -> FollowedData:
        return obj

    def begin_anew(self, obj: FollowedData, stored: Skeleton, worker: Worker) -> Callable[[], None]:
        return partial(obj.load_resized, stored)


register_adapter(FollowedData, _FollowedAdapter())


def _begin_again(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of a loader that is not used yet, at the beginning of an epoch."""
    place = None if state["place"] is None else {**state["place"], "begin": None}
    return {**state, "passes": 0, "within": False, "ended": False, "place": place}
