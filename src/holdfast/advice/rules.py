"""The rules of advice for saves: what a program may have forgotten, when that shows, and the warning.

Such a program restores without an error, but resumes differently. `watch.py` has the rules for steps.
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from holdfast.advice.fresh_look import FreshLook
from holdfast.advice.hyperparameters import find_unsaved_schedule
from holdfast.advice.strays import find_strays, keeps_draws, list_unsaved
from holdfast.state.adapters import Oversights
from holdfast.state.registry import immutable_arrays_in, immutable_types, list_members

EPOCHS: Final = ("epoch", "current_epoch")

_MOST_WATCHED: Final = 8
"""More optimizers than a program has, unless each parameter has its own, which steps in backward()."""
_MOST_COMPARED: Final = 3
"""Saves in which unsaved values are looked for."""
_MOST_NAMED: Final = 3


class Moment(enum.Enum):
    """When a rule is applied."""

    FIRST_SAVE = "at the first save"
    SAVE = "at each save"
    FIRST_END = "at the end of a training that was not resumed"
    END = "at the end of a training that has saved"


class Rule(NamedTuple):
    """A thing that programs forget.

    Attributes:
        moment: When it shows. No rule is applied after an error.
        find: Finds it, and returns what each warning names.
        text: The warning.
    """

    moment: Moment
    find: Callable[[Advisor], Iterable[Mapping[str, object]]]
    text: str


class Advisor:
    """Applies the rules to the objects of a checkpoint, at four moments. It belongs to the training thread.

    Attributes:
        objects: The saved objects, by name.
        step: The step of the save.
        assigned: The names that were assigned another object since the beginning; known at the end.
        take_unread: Returns the names of restored objects that the program has not read, each once. Its argument is
            True to leave out those that the program began with as a number, text or None.
    """

    def __init__(self, objects: Mapping[str, Any], take_unread: Callable[[bool], Sequence[str]]) -> None:
        self.objects, self.take_unread = objects, take_unread
        self.step = 0
        self.assigned: Collection[str] = ()
        self._has_saved = False
        self._fresh, self._arrays = FreshLook(), ImmutableArrays()
        self._is_watching = False
        # What would be lost of work in progress, and what values the state lacks; both are said once.
        self._losses: Sequence[tuple[str, Callable[[], str]]] = ()
        self._changes: Sequence[tuple[str, Callable[[], Sequence[tuple[str, Any]]]]] = ()
        self._looks_left = _MOST_COMPARED

    def begin(self) -> None:
        """Called before something is restored: notes what the program begins with."""
        self._fresh.note(self.objects)

    def enter(self, step: int) -> None:
        """Called when training begins after that many steps: notes what is live."""
        self._arrays.begin(self.objects, step)
        self._watch()

    def _watch(self) -> None:
        self._is_watching = True
        found = self._list_oversights()
        losses = [(path, one.find_loss) for path, one in found if one.find_loss is not None]
        self._losses = losses if len(losses) <= _MOST_WATCHED else ()
        watches = [(path, one.watch_unsaved) for path, one in found if one.watch_unsaved is not None]
        self._changes = [(path, begin()) for path, begin in watches] if self._looks_left else ()

    def find_at_save(self, step: int) -> Iterator[str]:
        """Yields the warnings about a save that is made now."""
        self.step = step
        if not self._is_watching:
            self._watch()
            self._changes = ()  # What a step leaves behind looks like what the program began with.
        moments = (Moment.SAVE,) if self._has_saved else (Moment.SAVE, Moment.FIRST_SAVE)
        self._has_saved = True
        yield from self._apply(*moments)

    def find_at_end(self, assigned: Collection[str], *, is_first: bool, has_saved: bool) -> Iterator[str]:
        """Yields the warnings at the end of training.

        Args:
            assigned: The names that were assigned another object since the beginning.
            is_first: True if it was not resumed, and has saved more than once.
            has_saved: True if it has saved.
        """
        self.assigned = assigned
        yield from self._apply(*[Moment.FIRST_END] * is_first, *[Moment.END] * has_saved)

    def _apply(self, *moments: Moment) -> Iterator[str]:
        for rule in RULES:
            if rule.moment in moments:
                yield from (rule.text.format_map(found) for found in rule.find(self))

    def _list_oversights(self) -> list[tuple[str, Oversights]]:
        return [(path, adapter.oversights_of(obj)) for path, obj, adapter in list_members(self.objects)]

    # What the rules find.

    def find_unchanged(self) -> Iterator[Mapping[str, object]]:
        """Finds immutable arrays that are saved again."""
        if names := self._arrays.look(self.objects, self.step):
            yield {"names": ", ".join(names), "name": names[0]}

    def find_unsaved_values(self) -> Iterator[Mapping[str, object]]:
        """Finds values of objects that have changed since the last look and that no saved object has."""
        if self._changes:
            self._looks_left -= 1
            changed = [(f"{name} of {path}", value) for path, look in self._changes for name, value in look()]
            names = list_unsaved(self.objects, changed) if changed else []
            if names or not self._looks_left:
                self._changes, self._looks_left = (), 0
            if names:
                yield {"names": ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")}

    def find_lost_work(self) -> Iterator[Mapping[str, object]]:
        """Finds gradients that wait for a step, for example."""
        text, path = next(((text, path) for path, find in self._losses if (text := find())), ("", ""))
        if text:
            self._losses = ()
            yield {"path": path, "text": text}

    def find_refused(self) -> Iterator[Mapping[str, object]]:
        """Finds what a restart would refuse."""
        yield from ({"text": text} for text in self._fresh.look(self.objects))

    def find_lacks(self) -> Iterator[Mapping[str, object]]:
        """Finds objects that lack something after a restore."""
        yield from ({"path": path, "text": one.lack} for path, one in self._list_oversights() if one.lack)

    def find_draws(self) -> Iterator[Mapping[str, object]]:
        """Finds objects that draw from the shared generators, while these are not saved."""
        if not keeps_draws(self.objects):
            yield from ({"path": path, "draws": one.draws} for path, one in self._list_oversights() if one.draws)

    def find_strays(self) -> Iterator[Mapping[str, object]]:
        """Finds optimizers that train parameters which no saved object has."""
        members = list_members(self.objects)
        yield from ({"text": text} for text in find_strays(self.objects, members, dict(self._list_oversights())))

    def find_unsaved_schedule(self) -> Iterator[Mapping[str, object]]:
        """Finds the first optimizer with a schedule of which none is saved."""
        if path := find_unsaved_schedule(self.objects):
            yield {"path": path}

    def find_unread(self) -> Iterator[Mapping[str, object]]:
        """Finds restored objects that the program has not read, and that it holds itself."""
        if names := self.take_unread(True):
            yield {"names": ", ".join(names), "name": names[0]}

    def find_unread_values(self) -> Iterator[Mapping[str, object]]:
        """Finds those that it has not read until its end."""
        if names := self.take_unread(False):
            yield {"names": ", ".join(names), "name": names[0]}

    def find_kept_number(self) -> Iterator[Mapping[str, object]]:
        """Finds the first number that counts epochs, and that nothing has set."""
        names = [name for name in EPOCHS if is_number(self.objects.get(name)) and name not in self.assigned]
        yield from ({"name": name, "value": self.objects[name]} for name in names[:1])

    def find_kept_best(self) -> Iterator[Mapping[str, object]]:
        """Finds the first best value or other float that nothing has set."""
        if any(self.find_kept_number()):
            return
        for name, value in self.objects.items():
            is_best = name.startswith("best") and (value is None or type(value) is int)
            if (is_best or type(value) is float) and name not in self.assigned:
                yield {"name": name, "value": value}
                return


class ImmutableArrays:
    """Compares immutable arrays from save to save, without keeping them alive."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._seen: dict[str, list[weakref.ref[Any]]] = {}
        self._named: set[str] = set()

    def begin(self, objects: Mapping[str, object], step: int) -> None:
        """Notes the arrays before anything is trained beyond a step."""
        self._step = step
        # Not by `immutable_types` first: a library may be met here for the first time.
        self._seen = {name: list(map(weakref.ref, immutable_arrays_in(root))) for name, root in objects.items()}

    def look(self, objects: Mapping[str, object], step: int) -> list[str]:
        """Returns the objects that hold the same immutable arrays as at an earlier step, each once."""
        if not immutable_types():
            self._step = step
            return []
        earlier = self._seen if self._step is not None and self._step < step else {}
        self._step, self._seen = step, {}
        same: list[str] = []
        for name, root in objects.items():
            found, seen = immutable_arrays_in(root), earlier.get(name, [])
            is_same = found and len(found) == len(seen) and all(map(operator.is_, found, [ref() for ref in seen]))
            if is_same and name not in self._named:
                same.append(name)
            self._seen[name] = list(map(weakref.ref, found))
        self._named.update(same)
        return same


def is_number(value: Any) -> bool:
    """**Pure.** Returns True for a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


_UNREAD: Final = (
    "{names}: restored, but nothing has read it from the checkpoint since. What your program itself holds has its "
    "first value: take checkpoint.{name} after the restore (run.checkpoint, if run is resumable's), or name an object "
    "with state_dict and load_state_dict, which a restore changes in place"
)

RULES: Final = (
    Rule(
        Moment.SAVE,
        Advisor.find_unchanged,
        "{names}: the same immutable arrays are saved again. Anything trained since is in other arrays and is NOT "
        "saved: put those into the checkpoint at the end of each step, as in checkpoint.{name} = {name} "
        "(run.checkpoint, if run is resumable's). If they are not trained, ignore this",
    ),
    Rule(
        Moment.SAVE,
        Advisor.find_unsaved_values,
        "{names}: such values change in training and are in no state_dict(), so a restart begins with the first ones: "
        "use register_buffer(name, tensor), persistent=True, or get_extra_state. If they are computed again in each "
        "step, ignore this",
    ),
    Rule(Moment.SAVE, Advisor.find_lost_work, "{path}: {text}"),
    Rule(Moment.SAVE, Advisor.find_refused, "{text}"),
    Rule(Moment.FIRST_SAVE, Advisor.find_lacks, "{path}: {text}"),
    Rule(
        Moment.FIRST_SAVE,
        Advisor.find_draws,
        "{path}: {draws} draws from random generators that are not saved, so a restart draws other numbers: pass "
        "rng=hf.RNG() as well",
    ),
    Rule(Moment.FIRST_SAVE, Advisor.find_strays, "{text}"),
    Rule(
        Moment.FIRST_SAVE,
        Advisor.find_unsaved_schedule,
        "a learning-rate scheduler sets the rates of {path} and is not saved, so after a restart the schedule begins "
        "again: pass it too, scheduler=scheduler. If your program sets it by run.step, ignore this",
    ),
    Rule(Moment.FIRST_SAVE, Advisor.find_unread, _UNREAD),
    Rule(
        Moment.FIRST_END,
        Advisor.find_kept_number,
        "{name} is saved as the number {value}, and nothing has set it since: if the loop has its own variable, a "
        "restart begins with the old value. Set checkpoint.{name} in the loop (run.checkpoint, if run is resumable's) "
        "and start from it, or take the epochs from a ResumableDataLoader's epochs()",
    ),
    Rule(
        Moment.FIRST_END,
        Advisor.find_kept_best,
        "{name} is saved as {value}, and nothing has set it since. A restore cannot change a number in a variable of "
        "yours: keep it in a dict, or set checkpoint.{name} in the loop (run.checkpoint, if run is resumable's) and "
        "start from it. If it is a constant, leave it out",
    ),
    Rule(Moment.END, Advisor.find_unread_values, _UNREAD),
)
"""All rules for saves, in the order in which they are applied."""
