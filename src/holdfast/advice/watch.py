"""The rules of advice for steps: training that is not counted, and things that steps use and that are not saved."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from holdfast.advice.rules import EPOCHS, is_number
from holdfast.advice.strays import StrayOptimizers, is_own_class, keeps_draws, list_values
from holdfast.format.names import is_own
from holdfast.process.pulse import PULSE
from holdfast.state.data.followed import CALL, FollowedData
from holdfast.state.data.sampler import BatchCount, ResumableSampler, SamplerAdapter
from holdfast.state.registry import list_members
from holdfast.state.rng import RNG

# More than most steps take, such as one that accumulates gradients, or updates one of several models more often.
_MOST_IN_A_STEP: Final = 8
_MOST_WITHOUT_UPDATE: Final = 64
"""More counted steps than gradients are usually accumulated over."""

_MOST_BATCHES: Final = 10_000
_MOST_EPOCHS: Final = 2
"""More than an epoch has, and more than are trained between two backups."""

_DRAWS_COMPARED: Final = (2, 3, 4)
"""The counted steps whose draws are compared. A loader may draw a seed in the first one."""

_UNASKED: Final = (
    "{path} was restored with {epochs}. A loop over range(n) trains n more epochs: write `for epoch in "
    "loader.epochs(n)` to train n in total. If your loop ends at a total number of steps, ignore this"
)
_IDLE: Final = (
    "{number} steps were counted, but {names} has not stepped. If another optimizer or model is trained, it is not "
    "saved: pass the objects that are trained, and create them before entering the run"
)
_PLAIN: Final = (
    "training takes batches from a DataLoader whose place is not saved, so a restart begins the data from scratch: "
    "write `for batch in run.batches(loader)`, or pass a ResumableDataLoader, loader=loader. If your loop skips what "
    "was trained, ignore this"
)
_DRAWS: Final = (
    "each step draws from random generators that are not saved ({names}), so a restart draws other numbers: pass "
    "rng=holdfast.RNG() as well. If your program seeds them in each step, ignore this"
)


class TakenBatches:
    """Counts what is taken from the samplers that are saved when this is created, and from the loaders of `data`.

    Attributes:
        data: The loaders of `run.batches`.
        counts: The count of each sampler, by its path, and that of these loaders.
    """

    def __init__(self, objects: Mapping[str, object], data: FollowedData | None = None) -> None:
        self.data = FollowedData() if data is None else data
        samplers: dict[str, ResumableSampler | FollowedData] = {**_find_samplers(objects), CALL: self.data}
        self.counts: dict[str, BatchCount] = {path: sampler.count for path, sampler in samplers.items()}
        self._samplers = [*samplers.values()]
        self._step_began = self.count()

    def count(self) -> tuple[int, int]:
        """Returns how many batches were taken, and how often a loop asked for another one at the end of an epoch."""
        batches = ends = 0
        for count in self.counts.values():  # At each step: quicker than sums.
            batches += count.batches
            ends += count.ends
        return batches, ends

    def begin_step(self) -> None:
        """Called when a step begins that will be counted."""
        batches, ends = self.count()
        self._step_began = batches - self.data.begin_step(), ends

    def is_step_empty(self) -> bool:
        """Returns True if the step took no batch and ended an epoch, like the last one of `zip(steps, loader)`."""
        began, now = self._step_began, self.count()
        return now[1] > began[1] and now[0] == began[0]

    def find_epoch_end(self) -> int | None:
        """Returns how many batches were taken if the last one of an epoch was the newest; else None."""
        return self.count()[0] if any(one.has_taken_last() for one in self._samplers) else None


def count_taken(objects: Mapping[str, object]) -> dict[str, int]:
    """Returns how many batches were taken in this process from each saved sampler, or that of a saved loader."""
    return {path: sampler.count.batches for path, sampler in _find_samplers(objects).items()}


def follow_epochs(objects: Mapping[str, object]) -> Callable[[], int | None]:
    """Returns a function that counts the complete epochs of the first saved sampler; None while there is none."""
    found: list[ResumableSampler] = []

    def count() -> int | None:
        found.extend(() if found else [*_find_samplers(objects).values()][:1])
        return found[0].count_complete() if found else None

    return count


def describe_epochs(objects: Mapping[str, object], count: Callable[[], int] | None) -> str:
    """Returns how many epochs are complete, by a framework or else the first saved sampler, in words; "" if none is."""
    if count is not None:
        return _epochs_text(complete) if (complete := count()) else ""
    for path, sampler in _find_samplers(objects).items():
        if complete := sampler.count_complete():
            return _epochs_text(complete) + ("" if is_own(path) else f" of {path}")
    return ""


def list_overruled(objects: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """Returns the script's settings of the saved samplers, as `loader.seed`, and the restored ones."""
    return {
        f"{path}.{name}": pair
        for path, sampler in _find_samplers(objects).items()
        for name, pair in sampler.count.overruled.items()
    }


def _find_samplers(objects: Mapping[str, object]) -> dict[str, ResumableSampler]:
    """Returns each sampler once, even if a loader that is built on it is saved as well."""
    found: dict[int, tuple[str, ResumableSampler]] = {}
    for path, obj, adapter in list_members(objects):
        if (sampler := adapter.find_sampler(obj)) is not None:
            found.setdefault(id(sampler), (path, sampler))
    return dict(found.values())


def _epochs_text(number: int) -> str:
    """**Pure.** Returns "1 complete epoch", say."""
    return f"{number} complete {'epoch' if number == 1 else 'epochs'}"


class TrainingWatch:
    """Detects a program that trains but counts no step, and steps that use what is not saved.

    Training shows by the steps of the saved optimizers. If none can be followed, it shows by the batches that were
    taken from the saved loaders.

    Attributes:
        may_predict: True if batches alone are not training, because the program may only evaluate or predict.
    """

    _lack = "no step was counted"
    _remark = ". If a single step takes longer than that, ignore this warning"
    may_predict = False

    def __init__(
        self,
        objects: Mapping[str, object],
        taken: TakenBatches,
        warn: Callable[[str], object],
        advice: str,
        warn_else: Callable[[str], object],
    ) -> None:
        """Starts watching.

        Args:
            objects: The saved objects, by name.
            taken: The batches that are taken from the samplers among them.
            warn: Called with a warning that no step is counted, at most once, in the training thread.
            advice: What to call, and when.
            warn_else: Called with other warnings, at most once with each, in that thread.
        """
        self._objects, self._taken, self._warn, self._warn_else = objects, taken, warn, warn_else
        self._advice, self._thread = advice, threading.get_ident()
        self._counted, self._has_warned = 0, False
        self._strays, self._draws = StrayOptimizers(objects), DrawWatch(objects)
        # Whether a plain loader has begun that no saved one replaces; None once that was said.
        self._has_plain: bool | None = False
        self._updates: dict[str, int] = {}
        self._ends: list[Callable[[], object]] = []
        members = list_members(objects)
        adapters = [adapter for _, _, adapter in members]
        for path, obj, adapter in members:
            if (end := adapter.before_step(obj, partial(self._note_update, path), is_own=True)) is not None:
                self._updates[path] = 0
                self._ends.append(end)
        for count in () if self._updates else taken.counts.values():
            count.calls.append(self._note_batch)
            self._ends.append(partial(count.calls.remove, self._note_batch))
        self._end_all: list[Callable[[], object]] = []
        for note, follow in (
            (self._note_any_update, next((one.follow_optimizers for one in adapters if one.follow_optimizers), None)),
            (self._note_plain, next((one.follow_loaders for one in adapters if one.follow_loaders), None)),
        ):
            # The hook of all optimizers, and of all loaders, must not keep this alive.
            if follow is not None:
                self._end_all.append(follow(partial(_pass_on, weakref.WeakMethod(note))))
                weakref.finalize(self, self._end_all[-1]).atexit = False
        # The batches and updates until the watch began, or until the newest save; and which of both.
        self._seen = (*self._read(), "")

    def note_own_step(self) -> None:
        """Called when the program's own loop counts a step; warns at the first one if its epochs seem to start over."""
        counts = self._taken.counts
        if not self._counted and not any(count.is_asked for count in counts.values()):
            unasked = [(path, count.unasked_epochs) for path, count in counts.items() if count.unasked_epochs]
            if unasked and not any(is_number(self._objects.get(name)) for name in EPOCHS):
                path, number = unasked[0]
                self._warn_else(_UNASKED.format(path=path, epochs=_epochs_text(number)))
        self.note_counted()

    def note_counted(self) -> None:
        """Called when a step is counted, so the program does count them. A saved optimizer must step as well."""
        self._counted += 1
        self._strays.step += 1
        if self._draws.is_looking and (names := self._draws.look()):
            self._warn_else(_DRAWS.format(names=", ".join(names)))
        if self._ends:
            if not self._updates or any(self._updates.values()):
                self._end_following()
            elif self._counted > _MOST_WITHOUT_UPDATE:
                self.warn_if_idle()
                self._end_following()

    def warn_if_idle(self) -> None:
        """Warns if steps were counted, but no saved optimizer has stepped: others may train instead."""
        if self._ends and self._updates and self._counted > 1 and not any(self._updates.values()):
            self._warn_else(_IDLE.format(number=self._counted, names=", ".join([*self._updates][:3])))

    def note_saved(self) -> None:
        """Called when everything trained until now is saved."""
        if self._has_plain and not self._taken.data.has_loaders:
            self._has_plain = None
            self._warn_else(_PLAIN)
        for text in self._strays.list_lost():
            self._warn_else(text)
        self._seen = (*self._read(), " since the newest save")

    def end(self) -> None:
        """Stops following optimizers and loaders; may be repeated."""
        for end in self._end_all:
            end()
        self._end_following()

    def describe(self, consequence: str, remark: str = "") -> str:
        """Returns what was trained since the newest save and was not counted, and what to do; "" if nothing was.

        Args:
            consequence: The consequence.
            remark: When the warning can be ignored.
        """
        taken, updates = self._find_new()
        # One batch may have been taken for a look at it. Where optimizers are followed, batches alone train nothing.
        is_followed = self._updates or self._strays.updates
        is_trained = bool(updates) or not (is_followed or self.may_predict or sum(taken.values()) < 2)
        if self._counted or not is_trained:
            return ""
        since = self._seen[2]
        parts = [
            f"{number} {'batch was' if number == 1 else 'batches were'} taken from {path}{since}"
            for path, number in _largest(taken)
        ]
        parts += [
            f"{path} has stepped {'once' if number == 1 else f'{number} times'}{since}"
            for path, number in _largest(updates)
        ]
        if not updates and CALL in dict(_largest(taken)):
            remark = remark or ". If they were only a validation, ignore this"
        return f"{' and '.join(parts)}, but {self._lack}, so {consequence}: {self._advice}{remark}"

    def warn_once(self, consequence: str, remark: str = "") -> None:
        """Warns of what `describe` returns, unless this has warned before."""
        if not self._has_warned and (text := self.describe(consequence, remark)):
            self._has_warned = True
            self._warn(text)

    def _note_update(self, path: str, _: object) -> None:
        self._updates[path] += 1
        self._warn_if_long(self._updates[path] - self._seen[1].get(path, 0))

    def _note_any_update(self, optimizer: Any) -> None:
        """Called when an optimizer has stepped, in any thread: warns if it trains a saved module but is not saved."""
        if threading.get_ident() != self._thread:
            return
        PULSE.note_update()
        path, text = self._strays.find(optimizer)
        if text:
            self._warn_else(text)
        if path and not self._updates and not self._counted:
            updates, name = self._strays.updates, type(optimizer).__name__
            updates[name] = updates.get(name, 0) + 1
            self._warn_if_long(updates[name] - self._seen[1].get(name, 0))

    def _note_plain(self, _: object) -> None:
        """Called when a loader begins that keeps no place, in any thread."""
        members = list_members(self._objects)
        trains = any(getattr(obj, "training", False) is True for _, obj, _ in members)
        if trains and threading.get_ident() == self._thread and self._has_plain is not None:
            self._has_plain = not any(
                isinstance(one, SamplerAdapter) or is_own_class(obj, one) or one.gives_batches(obj, path)
                for path, obj, one in members
            )

    def _note_batch(self) -> None:
        self._warn_if_long(sum(self._find_new()[0].values()))

    def _warn_if_long(self, number: int) -> None:
        """Warns, once, if that many new batches or updates are more than are usual before something is counted."""
        if not self._has_warned and self._is_long(number):
            self.warn_once("nothing was saved yet", self._remark)

    def _is_long(self, number: int) -> bool:
        return number >= _MOST_IN_A_STEP

    def _end_following(self) -> None:
        while self._ends:
            self._ends.pop()()

    def _read(self) -> tuple[dict[str, int], dict[str, int]]:
        taken = {path: count.batches for path, count in self._taken.counts.items()}
        return taken, dict(self._updates or self._strays.updates)

    def _find_new(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the batches and updates since the newest save."""
        taken, updates = (
            {path: number - seen.get(path, 0) for path, number in now.items() if number > seen.get(path, 0)}
            for now, seen in zip(self._read(), self._seen[:2], strict=True)
        )
        return taken, updates


class EpochWatch(TrainingWatch):
    """Detects a program that trains epochs and backs none of them up."""

    _lack = "no epoch was backed up"
    _remark = ". If your next backup is yet to come, ignore this"

    def __init__(self, objects: Mapping[str, object], warn: Callable[..., object]) -> None:
        """Starts watching; `warn` is called with each warning, with `is_error=True` if the training is lost."""
        taken = TakenBatches(objects)
        super().__init__(objects, taken, warn, "call back_up(epoch) after each epoch", warn)
        self._warn_at_end, self._ends_before = warn, taken.count()[1]

    def note_counted(self) -> None:
        """Called when a backup has begun, so the program does make them."""
        self._counted += 1
        self._end_following()

    def finish(self, consequence: str, *, is_error: bool = False) -> None:
        """Stops watching, and reports what was trained and not backed up; may be repeated."""
        self.end()
        text = self.describe(consequence)
        self._counted += 1
        if text:
            self._warn_at_end(text, is_error=is_error)

    def _is_long(self, number: int) -> bool:
        return number >= _MOST_BATCHES or self._taken.count()[1] - self._ends_before >= _MOST_EPOCHS


class DrawWatch:
    """Compares the states of the generators that the whole process shares at three steps in a row, and then no more.

    Attributes:
        is_looking: True until that is done.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.is_looking = True
        self._objects = objects
        self._counted = 0
        self._states: list[dict[str, list[object]]] = []

    def look(self) -> list[str]:
        """Called when a step is counted; returns the generators that each step draws from, if they are not saved.

        A single step may begin an epoch, for which a loader draws a seed.
        """
        self._counted += 1
        if self._counted < _DRAWS_COMPARED[0]:
            return []
        # Modules that draw are named at the first save.
        members = list_members(self._objects)
        if keeps_draws(self._objects) or any(one.oversights_of(obj).draws for _, obj, one in members):
            self.is_looking, self._states = False, []
            return []
        self._states.append({name: _flatten(state) for name, state in RNG().state_dict().items()})
        if self._counted < _DRAWS_COMPARED[-1]:
            return []
        first, second, third = self._states
        self.is_looking, self._states = False, []
        return [name for name in third if name in first and first[name] != second[name] != third[name]]


def _flatten(state: Any) -> list[object]:
    """Returns the values in a state, in a form that can be compared; arrays as bytes."""
    parts: list[object] = []
    for one in list_values(state):
        array: Any = one.numpy() if hasattr(one, "numpy") else one
        if hasattr(array, "tobytes"):
            parts.append(array.tobytes())
        elif not isinstance(array, dict | list | tuple):
            parts.append(array)
    return parts


def _largest(numbers: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(numbers.items(), key=lambda item: -item[1])[:1]


def _pass_on(method: weakref.WeakMethod[Any], found: object) -> None:
    alive = method()
    if alive is not None:
        alive(found)
