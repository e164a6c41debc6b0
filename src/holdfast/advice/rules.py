"""The rules of advice for saves: what a program may have forgotten, when that shows, and the warning.

Such a program restores without an error, but resumes differently. `watch.py` has the rules for steps.
"""

from __future__ import annotations

import enum
import operator
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.advice.hyperparameters import find_unsaved_schedule
from holdfast.advice.strays import find_strays, keeps_draws, list_unsaved
from holdfast.errors import UnsupportedValueError
from holdfast.format.encoding import escape
from holdfast.state.adapters import LoadNeeds, Oversights
from holdfast.state.registry import (
    adapter_of,
    backend_of,
    immutable_arrays_in,
    immutable_types,
    list_members,
    list_unmade,
)

EPOCHS: Final = ("epoch", "current_epoch")

_MOST_WATCHED: Final = 8
"""More optimizers than a program has, unless each parameter has its own, which steps in backward()."""
_MOST_COMPARED: Final = 3
"""Saves in which unsaved values are looked for."""
_MOST_NAMED: Final = 3

_SHORT_SECONDS: Final = 0.001
_RESTS: Final = 100
"""After a look that was not short, there is no other for this many times as long."""

_ADVICE: Final = {
    "object": "let it begin with what it saves, or keep the state_dict() of what comes later as a value",
    "type": "call holdfast.register_type for the type when the program starts",
    "array": "keep it in a dict, which takes what is stored",
}


Found: TypeAlias = Iterable[Mapping[str, object]]
"""The names to put into the text, for each warning."""


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
        find: Finds it.
        text: The warning.
        needs: The attribute of the advisor without which there is nothing to find; empty for none.
    """

    moment: Moment
    find: Callable[[Advisor], Found]
    text: str
    needs: str = ""


class Advisor:
    """Applies the rules to the objects of a checkpoint, at four moments. It belongs to the training thread.

    Attributes:
        losses: Describe what a save would lose of work in progress, by path.
        changes: List the values that have changed and that the state lacks, by path.
    """

    def __init__(self, objects: Mapping[str, Any], take_unread: Callable[[bool], Sequence[str]]) -> None:
        """Prepares.

        Args:
            objects: The saved objects, by name.
            take_unread: Returns the names of restored objects that the program has not read, each once. Its argument is
                True to leave out those that the program began with as a number, text or None.
        """
        self._objects, self._take_unread = objects, take_unread
        self._step, self._assigned = 0, frozenset[str]()
        self._has_saved = self._is_watching = False
        self._fresh = FreshLook()
        # Immutable arrays at the last save or when training began, and after how many steps that was.
        self._arrays_at: int | None = None
        self._arrays: dict[str, list[weakref.ref[Any]]] = {}
        self._named: set[str] = set()
        self.losses: Sequence[tuple[str, Callable[[], str]]] = ()
        self.changes: Sequence[tuple[str, Callable[[], Sequence[tuple[str, Any]]]]] = ()
        self._looks_left = _MOST_COMPARED

    def begin(self) -> None:
        """Called before something is restored: notes what the program begins with."""
        self._fresh.note(self._objects)

    def enter(self, step: int) -> None:
        """Called when training begins after that many steps: notes what is live."""
        self._arrays_at = step
        # Not by `immutable_types` first: a library may be met here for the first time.
        self._arrays = {name: list(map(weakref.ref, immutable_arrays_in(one))) for name, one in self._objects.items()}
        self._watch()

    def _watch(self) -> None:
        self._is_watching = True
        found = self._list_oversights()
        losses = [(path, one.find_loss) for path, one in found if one.find_loss is not None]
        self.losses = losses if len(losses) <= _MOST_WATCHED else ()
        watches = [(path, one.watch_unsaved) for path, one in found if one.watch_unsaved is not None]
        self.changes = [(path, begin()) for path, begin in watches] if self._looks_left else ()

    def find_at_save(self, step: int) -> Iterator[str]:
        """Yields the warnings about a save that is made now."""
        self._step = step
        if not self._is_watching:
            self._watch()
            self.changes = ()  # What a step leaves behind looks like what the program began with.
        is_first, self._has_saved = not self._has_saved, True
        for rule in RULES:
            is_due = rule.moment is Moment.SAVE or (is_first and rule.moment is Moment.FIRST_SAVE)
            if is_due and (not rule.needs or getattr(self, rule.needs)):
                for found in rule.find(self):
                    yield rule.text.format_map(found)

    def find_at_end(self, assigned: Collection[str], *, is_first: bool, has_saved: bool) -> Iterator[str]:
        """Yields the warnings at the end of training.

        Args:
            assigned: The names that were assigned another object since the beginning.
            is_first: True if it was not resumed, and has saved more than once.
            has_saved: True if it has saved.
        """
        self._assigned = frozenset(assigned)
        for rule in RULES:
            if (is_first and rule.moment is Moment.FIRST_END) or (has_saved and rule.moment is Moment.END):
                yield from map(rule.text.format_map, rule.find(self))

    def _list_oversights(self) -> list[tuple[str, Oversights]]:
        return [(path, adapter.oversights_of(obj)) for path, obj, adapter in list_members(self._objects)]

    # What the rules find.

    def _find_unchanged(self) -> Found:
        earlier = self._arrays if self._arrays_at is not None and self._arrays_at < self._step else {}
        self._arrays_at, self._arrays = self._step, {}
        names: list[str] = []
        for name, root in self._objects.items() if immutable_types() else ():
            found, seen = immutable_arrays_in(root), earlier.get(name, [])
            is_same = found and len(found) == len(seen) and all(map(operator.is_, found, [ref() for ref in seen]))
            if is_same and name not in self._named:
                names.append(name)
            self._arrays[name] = list(map(weakref.ref, found))
        self._named.update(names)
        if names:
            yield {"names": ", ".join(names), "name": names[0]}

    def _find_unsaved_values(self) -> Found:
        self._looks_left -= 1
        changed = [(f"{name} of {path}", value) for path, look in self.changes for name, value in look()]
        names = list_unsaved(self._objects, changed) if changed else []
        if names or not self._looks_left:
            self.changes, self._looks_left = (), 0
        if names:
            yield {"names": ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")}

    def _find_lost_work(self) -> Found:
        text, path = next(((text, path) for path, find in self.losses if (text := find())), ("", ""))
        if text:
            self.losses = ()
            yield {"path": path, "text": text}

    def _find_refused(self) -> Found:
        return ({"text": text} for text in self._fresh.look(self._objects))

    def _find_lacks(self) -> Found:
        return ({"path": path, "text": one.lack} for path, one in self._list_oversights() if one.lack)

    def _find_draws(self) -> Found:
        found = () if keeps_draws(self._objects) else self._list_oversights()
        return ({"path": path, "draws": one.draws} for path, one in found if one.draws)

    def _find_strays(self) -> Found:
        members = list_members(self._objects)
        return ({"text": text} for text in find_strays(self._objects, members, dict(self._list_oversights())))

    def _find_unsaved_schedule(self) -> Found:
        if path := find_unsaved_schedule(self._objects):
            yield {"path": path}

    def _find_unread(self, *, only_held: bool = True) -> Found:
        if names := self._take_unread(only_held):
            yield {"names": ", ".join(names), "name": names[0]}

    def _find_kept_number(self) -> Found:
        names = [name for name in EPOCHS if is_number(self._objects.get(name)) and name not in self._assigned]
        return [{"name": name, "value": self._objects[name]} for name in names[:1]]

    def _find_kept_best(self) -> Found:
        if any(self._find_kept_number()):
            return
        for name, value in self._objects.items():
            is_best = name.startswith("best") and (value is None or type(value) is int)
            if (is_best or type(value) is float) and name not in self._assigned:
                yield {"name": name, "value": value}
                return


class FreshLook:
    """Detects what a restart would refuse: what is saved, and a program that has just begun cannot take."""

    def __init__(self) -> None:
        self._first: dict[str, str] | None = None
        self._layouts: dict[str, LoadNeeds] = {}
        self._names: set[str] = set()
        self._is_begun = False
        self._warned: set[str] = set()
        self._rests_until_at = 0.0

    def note(self, objects: Mapping[str, object]) -> None:
        """Called before the first restore, or else the first save: notes what the program begins with."""
        if self._first is None:
            (self._first, self._layouts), self._names = _list_looks(objects), {*objects}

    def look(self, objects: Mapping[str, object]) -> list[str]:
        """Returns the warnings at a save, each once; after a look that takes long, the next saves go without."""
        if time.monotonic() < self._rests_until_at:
            return []
        begun_at = time.thread_time()  # A look that waits for the processor costs no more than another one.
        looks, layouts = _list_looks(objects)
        if self._first is None:
            self._first, self._names, self._layouts = looks, {*objects}, layouts
        if not self._is_begun:  # What was named before the first save is there at a restart as well.
            new = {name: root for name, root in objects.items() if name not in self._names}
            new_looks, new_layouts = _list_looks(new)
            self._is_begun, self._first, self._layouts = True, self._first | new_looks, self._layouts | new_layouts
        texts = []
        for path, layout in layouts.items():
            change = _describe_change(self._layouts.get(path, layout), layout)
            if change and path not in self._warned:
                self._warned.add(path)
                texts.append(
                    f"{path} {change}. A restart that begins as this program did is refused: {_ADVICE['object']}"
                )
        for path in looks.keys() | self._first.keys():
            then, now = self._first.get(path, ""), looks.get(path, "")
            kind = _kind_refused(then, now)
            if kind and path not in self._warned:
                self._warned.add(path)
                texts.append(
                    f"{path} is saved as {now or 'another value'}, and the program began with "
                    f"{then or 'no such thing'}. A restart that begins so is refused: {_ADVICE[kind]}"
                )
        spent = time.thread_time() - begun_at
        if spent > _SHORT_SECONDS:
            self._rests_until_at = time.monotonic() + _RESTS * spent
        return texts


def _kind_refused(then: str, now: str) -> str:
    """**Pure.** Returns the kind of what a restart would refuse, "" for nothing."""
    kind = now.partition(" ")[0]
    if then == now or then.startswith("type"):
        return ""
    if kind in ("object", "type") or then.startswith("object"):
        return "type" if kind == "type" else "object"
    # Arithmetic makes a number of an array without dimensions; any other value takes an array.
    return "array" if then and not (then.endswith("[]") and not now) else ""


def _describe_change(then: LoadNeeds, now: LoadNeeds) -> str:
    """**Pure.** Returns what an object has gained, lost or reshaped, as far as a load would refuse it; "" for nothing.

    What it loads in its own way may change: its class decides.
    """
    gained, lost, reshaped = (
        [name for name in names if not name.startswith(then.own_prefixes or (" ",))]
        for names in (
            now.shapes.keys() - then.shapes.keys(),
            then.shapes.keys() - now.shapes.keys(),
            [name for name, shape in now.shapes.items() if then.shapes.get(name, shape) != shape],
        )
    )
    parts = [
        f"{word} {', '.join(sorted(names)[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}"
        for word, names in (("has gained", gained), ("has lost", lost), ("has another shape of", reshaped))
        if names
    ]
    return f"{', '.join(parts)} since the program began" if parts else ""


def _list_looks(objects: Mapping[str, object]) -> tuple[dict[str, str], dict[str, LoadNeeds]]:
    """Returns what a restart must find in the program, by its path; types by their names. Also what loads need."""
    looks: dict[str, str] = {}
    layouts: dict[str, LoadNeeds] = {}
    value: Any
    for name, root in objects.items():
        for path, value in list_unmade(root, escape(name)):
            adapter, library = adapter_of(value), backend_of(value)
            if adapter is not None:
                if (layout := adapter.layout_of(value)) is not None:
                    layouts[path] = layout
                groups = value.param_groups if adapter.kind == "torch.optimizer" else ()
                numbers = [len(group["params"]) for group in groups]
                looks[path] = f"object ({adapter.kind})" + (f" with {numbers} parameters in groups" if numbers else "")
            elif library is not None:
                with suppress(UnsupportedValueError):  # A save says so.
                    spec = library.describe([value]).check(0, path)
                    looks[path] = f"array {spec.dtype} {list(spec.shape)}"
            else:
                looks[f"{type(value).__qualname__} in {path}"] = "type that is not registered"
    return looks, layouts


def is_number(value: Any) -> bool:
    """**Pure.** Returns True for a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


_UNREAD: Final = (
    "{names}: nothing has read the restored value, so your program probably goes on with its first one. Read "
    "checkpoint.{name} after the restore; with resumable that is run.checkpoint.{name}. An object with state_dict and "
    "load_state_dict needs no such line: a restore changes it in place"
)

RULES: Final = (
    Rule(
        Moment.SAVE,
        Advisor._find_unchanged,
        "{names}: the same immutable arrays are saved again. Anything trained since is in other arrays and is NOT "
        "saved: put those into the checkpoint at the end of each step, as in checkpoint.{name} = {name} "
        "(run.checkpoint, if run is resumable's). If they are not trained, ignore this",
    ),
    Rule(
        Moment.SAVE,
        Advisor._find_unsaved_values,
        "{names}: such values change in training and are in no state_dict(), so a restart begins with the first ones: "
        "use register_buffer(name, tensor), persistent=True, or get_extra_state. If they are computed again in each "
        "step, ignore this",
        needs="changes",
    ),
    Rule(Moment.SAVE, Advisor._find_lost_work, "{path}: {text}", needs="losses"),
    Rule(Moment.SAVE, Advisor._find_refused, "{text}"),
    Rule(Moment.FIRST_SAVE, Advisor._find_lacks, "{path}: {text}"),
    Rule(
        Moment.FIRST_SAVE,
        Advisor._find_draws,
        "{path}: {draws} draws from random generators that are not saved, so a restart draws other numbers: pass "
        "rng=holdfast.RNG() as well",
    ),
    Rule(Moment.FIRST_SAVE, Advisor._find_strays, "{text}"),
    Rule(
        Moment.FIRST_SAVE,
        Advisor._find_unsaved_schedule,
        "a learning-rate scheduler sets the rates of {path} and is not saved, so after a restart the schedule begins "
        "again: pass it too, scheduler=scheduler. If your program sets it by run.step, ignore this",
    ),
    Rule(Moment.FIRST_SAVE, Advisor._find_unread, _UNREAD),
    Rule(
        Moment.FIRST_END,
        Advisor._find_kept_number,
        "{name} is saved as the number {value}, and nothing has set it since: if the loop has its own variable, a "
        "restart begins with the old value. Set checkpoint.{name} in the loop (run.checkpoint, if run is resumable's) "
        "and start from it, or take the epochs from run.epochs(n)",
    ),
    Rule(
        Moment.FIRST_END,
        Advisor._find_kept_best,
        "{name} is saved as {value}, and nothing has set it since. A restore cannot change a number in a variable of "
        "yours: keep it in a dict, or set checkpoint.{name} in the loop (run.checkpoint, if run is resumable's) and "
        "start from it. If it is a constant, leave it out",
    ),
    Rule(Moment.END, partial(Advisor._find_unread, only_held=False), _UNREAD),
)
"""All rules for saves, in the order in which they are applied."""
