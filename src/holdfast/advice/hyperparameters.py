"""Hyperparameters of optimizers and learning rate schedules: the script's values, and the restored ones.

A restore takes `lr`, `weight_decay` or `T_max` from the checkpoint, regardless of the script's current values. Each
checkpoint stores the values of the script that it began with. So a value that training itself has changed (a schedule,
for example) is not mistaken for one that a person has changed.

Optimizers are recognized by their `param_groups`, schedules by their `optimizer`, so no framework is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.errors import ApplyError, UsageError
from holdfast.format.names import HYPERPARAMETERS
from holdfast.state.registry import find_stateful

Settings: TypeAlias = dict[str, list[Any]]
"""By hyperparameter the value of each group of an optimizer; a single value if all groups have the same."""

_RATE: Final = "lr"
_INITIAL_RATE: Final = "initial_lr"
_NOT_SET: Final = ("params", "param_names", _INITIAL_RATE)
_CYCLED: Final = ("max_lr", "min_lr", "base_momentum", "max_momentum")
"""The values that cyclic schedules store in an optimizer's groups."""

_CYCLIC: Final = frozenset({"OneCycleLR", "CyclicLR", "SWALR"})
"""Schedules between rates of their own, which are not proportional to the optimizer's."""

_MOST_PARTS: Final = 64
"""A longer list is not a setting that a person wrote."""

_MARK: Final = "_wrapped_by_lr_sched"

_ODD: Final = object()


class HyperparameterChange(NamedTuple):
    """A hyperparameter that the script has changed since the checkpoint was made.

    Attributes:
        script: The script's value.
        restored: The restored value. In both, a list if the groups of an optimizer differ.
        can_be_kept: True if `keep_current` accepts it.
    """

    script: Any
    restored: Any
    can_be_kept: bool


class Hyperparameters:
    """The script's settings of optimizers and schedules when it created them, by their paths. It is saved with them.

    Attributes:
        built: The settings of this process's script.
        valid: The settings from which the live values come: these, or those of the checkpoint.
        is_loaded: True if the last restore found such a record.
    """

    def __init__(self) -> None:
        self.built: dict[str, Settings] = {}
        self.valid: dict[str, Settings] = {}
        self.is_loaded = False
        # As they are in the groups of an optimizer, or in a schedule.
        self.raw: dict[str, list[dict[str, Any]]] = {}

    def note(self, objects: Mapping[str, object]) -> None:
        """Reads new objects, before anything is restored or trained."""
        for path, obj in _list_members(objects).items():
            if path not in self.built and (settings := read_settings(obj)):
                self.built[path] = self.valid[path] = settings
                self.raw[path] = _read_raw(obj)

    def state_dict(self) -> dict[str, Any]:
        """Returns the valid settings."""
        return {"valid": self.valid}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the valid settings of a checkpoint."""
        stored, self.is_loaded = state.get("valid", {}), True
        # What the checkpoint does not know comes from this script.
        self.valid = {}
        for path, built in self.built.items():
            known = found if isinstance(found := stored.get(path), dict) else {}
            self.valid[path] = {key: known.get(key, value) for key, value in built.items()}


class Keeping:
    """Keeps values as the script set them, in one restore, and lists the changed ones.

    Attributes:
        whole: The names of objects that are not restored at all.
    """

    def __init__(self, record: Hyperparameters, objects: Mapping[str, object], keep: Sequence[str]) -> None:
        """Resolves the names.

        Args:
            record: The script's settings.
            objects: The live objects by name.
            keep: Names of objects, and hyperparameters such as `optimizer.lr`.

        Raises:
            UsageError: If there is no such object or hyperparameter, or its value cannot be kept alone.
        """
        self._record = record
        self._members = _list_members(objects)
        built = {path: settings for path, settings in record.built.items() if path in self._members}
        self.whole, self._keys = _find_kept(keep, objects, built)
        for path, keys in self._keys.items():
            for key in keys:
                if problem := self._find_problem(path, key):
                    raise UsageError(f"{path}.{key} cannot be kept: {problem}", hint=_KEEP_SCHEDULE_HINT)
        record.is_loaded = False

    def put_back(self) -> None:
        """Gives the restored objects the script's values that are kept.

        Raises:
            ApplyError: If a rate that was 0 before is to be kept.
        """
        for path in self._members:
            if self._is_whole(path):
                self._keep_whole(path)
        paths = sorted(self._keys, key=lambda path: _is_schedule(self._members[path]))
        for path in paths:  # Schedules last: they set the rate.
            for key in self._keys[path]:
                self._keep(path, key)
                self._record.valid[path] = {**self._record.valid[path], key: self._record.built[path][key]}

    def list_changes(self) -> dict[str, HyperparameterChange]:
        """Returns the settings that differ between the script and the checkpoint, by paths such as `optimizer.lr`."""
        changes: dict[str, HyperparameterChange] = {}
        record = self._record
        for path, built in record.built.items():
            obj = self._members.get(path)
            if obj is None or not (record.is_loaded or hasattr(obj, "param_groups")):
                continue
            now = read_settings(obj)
            for key, said in built.items():
                # A checkpoint without a record does not say what its script said, and what a schedule has changed.
                is_same = _same(record.valid[path].get(key), said) if record.is_loaded else _is_cycled(key, built)
                if not is_same and key in now and not _same(now[key], said):
                    can_be_kept = not self._find_problem(path, key)
                    changes[f"{path}.{key}"] = HyperparameterChange(_shown(said), _shown(now[key]), can_be_kept)
        return changes

    def _is_whole(self, path: str) -> bool:
        return path.partition("/")[0] in self.whole

    def _schedules_of(self, path: str) -> dict[str, Any]:
        """Returns the schedules of an optimizer that are restored, by their paths."""
        groups = self._members[path].param_groups
        schedules = {name: _unwrap(obj) for name, obj in self._members.items() if not self._is_whole(name)}
        return {
            name: obj for name, obj in schedules.items() if _is_schedule(obj) and obj.optimizer.param_groups is groups
        }

    def _find_problem(self, path: str, key: str) -> str:
        """Returns why a value cannot be kept without the rest of its object; empty if it can."""
        obj = _unwrap(self._members[path])
        if not _is_schedule(obj):
            schedules = [part for one in self._schedules_of(path).values() for part in _parts_of(one)]
            if schedules and (key == _RATE or _is_cycled(key, self._record.built[path])):
                for part in schedules:
                    if names := _CYCLIC & {cls.__name__ for cls in type(part).__mro__}:
                        return f"a {min(names)} sets it, within a range of its own"
                    if key == _RATE and len(schedules) > 1 and getattr(part, "eta_min", None):
                        return f"a {type(part).__name__} with eta_min={part.eta_min} sets it together with others"
            return ""
        if hasattr(obj, "num_bad_epochs"):
            return ""  # That changes the rate from what it is, now and then.
        others = [_unwrap(member) for one, member in self._members.items() if one != path]
        groups = obj.optimizer.param_groups
        is_shared = any(_is_schedule(one) and one.optimizer.param_groups is groups for one in others)
        if "." in key or is_shared or not hasattr(obj, "_get_closed_form_lr"):
            return "in the middle of the schedule, the rate that follows from it is unknown"
        return ""

    def _keep(self, path: str, key: str) -> None:
        obj = _unwrap(self._members[path])
        raw = self._record.raw[path]
        if _is_schedule(obj):
            setattr(obj, key, raw[0][key])
            if not hasattr(obj, "num_bad_epochs"):
                _set_rates([obj], obj.optimizer.param_groups, obj._get_closed_form_lr())
        elif key == _RATE:
            self._keep_rate(path)
        else:
            for group, own in zip(obj.param_groups, raw, strict=False):
                if key in own:
                    _set(group, key, own[key])

    def _keep_rate(self, path: str) -> None:
        groups, raw = self._members[path].param_groups, self._record.raw[path]
        schedules = [part for one in self._schedules_of(path).values() for part in _parts_of(one)]
        said = [own.get(_INITIAL_RATE, own[_RATE]) for own in raw]
        plateau = any(hasattr(one, "num_bad_epochs") for one in schedules)
        before = self._record.valid[path].get(_RATE, []) if plateau and self._record.is_loaded else []
        rates = []
        for number, (group, own, rate) in enumerate(zip(groups, raw, said, strict=False)):
            known = before[number % len(before)] if before else None
            old = _value(group[_INITIAL_RATE]) if _INITIAL_RATE in group and _INITIAL_RATE in own else known
            # With one schedule alone; see `_find_problem`.
            floor = getattr(schedules[0], "eta_min", 0) if schedules else 0
            now = _value(group[_RATE])
            if old is None:
                rates.append(rate)
            elif old != floor:
                rates.append(floor + (now - floor) * ((rate - floor) / (old - floor)))
            elif now == old:
                rates.append(rate)
            else:
                raise ApplyError(
                    f"{path}.lr cannot be kept: it was {old} when the schedule began, so no current rate can be "
                    "derived from it",
                    hint="Restore without that entry of keep_current; the objects now hold the restored values.",
                )
            if _INITIAL_RATE in group:
                _set(group, _INITIAL_RATE, rate)
        for schedule in schedules:
            if hasattr(schedule, "base_lrs"):
                schedule.base_lrs = [_like(one, rate) for one, rate in zip(schedule.base_lrs, said, strict=False)]
        _set_rates(schedules, groups, rates)

    def _keep_whole(self, path: str) -> None:
        """Starts a schedule over with the script's rates, regardless of those that the optimizer was saved with."""
        record, obj = self._record, _unwrap(self._members[path])
        if path in record.built:
            record.valid[path] = record.built[path]
        if not _is_schedule(obj):
            return
        groups: list[dict[str, Any]] = obj.optimizer.param_groups
        for other, optimizer in self._members.items():
            if getattr(optimizer, "param_groups", None) is groups and not self._is_whole(other):
                built = record.built[other]
                for group, own in zip(groups, record.raw[other], strict=False):
                    for key, value in own.items():
                        if key in (_RATE, _INITIAL_RATE) or _is_cycled(key, built):
                            _set(group, key, value)
                said = {key: value for key, value in built.items() if key == _RATE or _is_cycled(key, built)}
                record.valid[other] = {**record.valid[other], **said}


def note_script(objects: Mapping[str, object], own: dict[str, Any]) -> Hyperparameters:
    """Records the script's settings of the objects, with the objects that holdfast itself adds to a checkpoint.

    Args:
        objects: The live objects by name.
        own: Those that holdfast has added. The record is added if there is anything to record.
    """
    record: Hyperparameters = own.get(HYPERPARAMETERS) or Hyperparameters()
    record.note(objects)
    if record.built:
        own[HYPERPARAMETERS] = record
    return record


def check_kept(keep: str | Iterable[str], objects: Mapping[str, object]) -> tuple[str, ...]:
    """Returns what a restore leaves as the script set it: names of objects, and hyperparameters such as `optimizer.lr`.

    Raises:
        UsageError: If there is no such object or hyperparameter, or its value cannot be kept alone.
    """
    names = list_kept(keep)
    if names:
        record = Hyperparameters()
        record.note(objects)
        Keeping(record, objects, names)
    return names


def list_kept(keep: str | Iterable[str]) -> tuple[str, ...]:
    """**Pure.** Returns the names in an argument `keep_current`.

    Raises:
        UsageError: If it contains none.
    """
    if not isinstance(keep, Iterable):
        raise UsageError(
            f"keep_current must be a list of names, got {keep!r}", hint='For example: keep_current=["optimizer.lr"].'
        )
    return (keep,) if isinstance(keep, str) else tuple(keep)


def read_settings(obj: Any) -> Settings:
    """Returns the current hyperparameters of an optimizer or a schedule; empty for any other object.

    The rate of an optimizer with a schedule is the one with which that begins.
    """
    groups = _read_raw(obj)
    if _is_schedule(_unwrap(obj)):
        return {key: [value] for key, one in groups[0].items() if (value := _plain(one)) is not _ODD}
    settings: Settings = {}
    for key in dict.fromkeys(key for group in groups for key in group):
        name = _INITIAL_RATE if key == _RATE else key
        values = [_plain(group.get(name, group.get(key, _ODD))) for group in groups]
        if key not in _NOT_SET and _ODD not in values:
            settings[key] = values[:1] if all(_same(value, values[0]) for value in values) else values
    return settings


def _read_raw(obj: Any) -> list[dict[str, Any]]:
    """Returns the settings of each group of an optimizer, or of a schedule."""
    schedule = _unwrap(obj)
    if _is_schedule(schedule):
        return [_read_schedule(schedule)]
    groups = getattr(obj, "param_groups", None)
    if not isinstance(groups, list) or not all(isinstance(group, dict) and "params" in group for group in groups):
        return []
    # A tensor is the rate itself, which a restore fills.
    return [{key: _value(one) for key, one in group.items() if key not in _NOT_SET[:2]} for group in groups]


def _read_schedule(schedule: Any) -> dict[str, Any]:
    values = {
        key: value for key, value in getattr(schedule, "__dict__", {}).items() if key[0] != "_" or key == "_milestones"
    }
    found = {
        key.lstrip("_"): value
        for key, value in values.items()
        if key not in ("optimizer", "base_lrs", "last_epoch") and _plain(value) is not _ODD
    }
    for number, part in enumerate(getattr(schedule, "_schedulers", ())):
        found |= {f"{number}.{key}": value for key, value in _read_schedule(part).items()}
    return found


def find_unsaved_schedule(objects: Mapping[str, object]) -> str:
    """Returns the path of the first optimizer with a schedule of which none is saved; "" if there is none."""
    scheduled = {
        path: obj
        for path, obj in _list_members(objects).items()
        # torch marks the step of an optimizer for which a schedule was created.
        if any(hasattr(getattr(one, "step", None), _MARK) for one in (obj, getattr(obj, "optimizer", None)))
        and not _is_schedule(_unwrap(obj))
    }
    if not scheduled:
        return ""
    # A program may keep a schedule in an object of its own, or its state in a dict.
    parts: list[Any] = [*objects.values(), *(obj for root in objects.values() for _, obj, _ in find_stateful(root, ""))]
    parts += [part for one in parts for part in _values_of(getattr(one, "__dict__", one))]
    parts += [inner for part in parts for inner in _values_of(part)]
    if any(isinstance(part, dict) and "last_epoch" in part for part in parts):
        return ""
    # By their class, since what else the program keeps in such objects may not expect to be asked.
    schedules = [_unwrap(part) for part in parts if hasattr(type(part), "state_dict")]
    served = {id(one.optimizer.param_groups) for one in schedules if _is_schedule(one)}
    return next((path for path, obj in scheduled.items() if id(obj.param_groups) not in served), "")


def _values_of(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _find_kept(
    keep: Sequence[str], objects: Mapping[str, object], built: Mapping[str, Settings]
) -> tuple[frozenset[str], dict[str, list[str]]]:
    """Returns the names of whole objects, and by path the hyperparameters."""
    whole, keys = set(), dict[str, list[str]]()
    for name in keep:
        if isinstance(name, str) and name in objects:
            whole.add(name)
            continue
        paths = [path for path in built if isinstance(name, str) and name.startswith(f"{path}.")]
        path = max(paths, key=len, default="")
        key = name[len(path) + 1 :] if path else ""
        if key not in built.get(path, ()):
            known = [*objects, *(f"{path}.{key}" for path, settings in built.items() for key in settings)]
            raise UsageError(
                f"keep_current contains {name!r}, which is not an object or hyperparameter",
                hint=f"The names are {', '.join(map(repr, known))}.",
            )
        keys.setdefault(path, []).append(key)
    return frozenset(whole), {path: found for path, found in keys.items() if path.partition("/")[0] not in whole}


def _list_members(objects: Mapping[str, object]) -> dict[str, Any]:
    """Returns the optimizers and schedules among the objects, by their paths."""
    members = (member for name, root in objects.items() for member in find_stateful(root, name))
    return {
        path: obj
        for path, obj, adapter in members
        if adapter is not None and (_is_schedule(_unwrap(obj)) or isinstance(getattr(obj, "param_groups", None), list))
    }


def _unwrap(obj: Any) -> Any:
    """Returns the schedule inside a wrapper such as accelerate's; otherwise the object."""
    inner = getattr(obj, "scheduler", None)
    return inner if _is_schedule(inner) else obj


def _is_schedule(obj: Any) -> bool:
    optimizer = None if isinstance(obj, type) else getattr(obj, "optimizer", None)
    is_one = hasattr(obj, "last_epoch") or hasattr(obj, "_schedulers")
    return is_one and isinstance(getattr(optimizer, "param_groups", None), list)


def _parts_of(schedule: Any) -> list[Any]:
    """Yields a schedule, and those that it is made of."""
    parts = [part for one in getattr(schedule, "_schedulers", ()) for part in _parts_of(one)]
    return [schedule, *parts]


def _is_cycled(key: str, settings: Settings) -> bool:
    """Returns True if a cyclic schedule changes a value of an optimizer, or stores its own bounds there."""
    return key in _CYCLED or (key in ("momentum", "betas") and "max_momentum" in settings)


def _set_rates(schedules: Iterable[Any], groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> None:
    for group, rate in zip(groups, rates, strict=False):
        _set(group, _RATE, rate)
    for schedule in schedules:
        if hasattr(schedule, "_last_lr"):
            schedule._last_lr = [_like(one, rate) for one, rate in zip(schedule._last_lr, rates, strict=False)]


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """Sets a value; a tensor stays the same tensor, because a compiled step may hold it."""
    if hasattr(group.get(key), "fill_"):
        group[key].fill_(value)
    else:
        group[key] = value


def _like(present: Any, value: Any) -> Any:
    return present.clone().fill_(value) if hasattr(present, "fill_") else value


def _value(value: Any) -> Any:
    """Returns the number in a tensor or an array of one element."""
    try:
        return value.item() if hasattr(value, "item") else value
    except Exception:  # noqa: BLE001  Of many elements, or on no device: it is not a plain value.
        return value


def _plain(value: Any) -> Any:
    """Returns the value as it is stored and compared, with lists for tuples; `_ODD` if it is not a plain one."""
    value = _value(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Counter):
        return _plain(sorted(value.elements()))
    if isinstance(value, list | tuple) and len(value) <= _MOST_PARTS:
        parts = list(map(_plain, value))
        return _ODD if any(part is _ODD for part in parts) else parts
    return _ODD


def _same(left: Any, right: Any) -> bool:
    return bool(left == right) or repr(left) == repr(right)  # NaN is not equal to itself.


def _shown(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


_KEEP_SCHEDULE_HINT: Final = (
    "Add the schedule's name to keep_current: then it starts over with the learning rates of the script. Or set "
    "the values yourself after the restore."
)
