"""Detects what is trained but not saved: parameters that no saved object has, and optimizers."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Final

from holdfast.state.adapters import Adapter, Oversights, StateDictAdapter
from holdfast.state.registry import adapter_of, find_array, list_members
from holdfast.state.rng import RNG

_GENERATORS: Final = ("rng", "random", "generator", "seed")
_MOST_STEPPED: Final = 8
_MOST_REACHED: Final = 20_000
_MOST_SHAPES: Final = 4


def find_strays(
    objects: Mapping[str, object], members: Sequence[tuple[str, Any, Adapter]], found: Mapping[str, Oversights]
) -> list[str]:
    """Returns a warning for each saved optimizer that trains parameters which no saved object has.

    Args:
        objects: The saved objects, by name.
        members: The objects with state among them.
        found: What each of these may lack.
    """
    held = {id(parameter) for one in found.values() for parameter in one.holds}
    if all(id(parameter) in held for one in found.values() for parameter in one.trains):
        return []
    kept = held | _list_kept(objects, members)
    own = [obj for _, obj, adapter in members if is_own_class(obj, adapter)]
    may_hold = held or own or find_array(list(objects.values())) is not None
    texts: list[str] = []
    for path, one in found.items():
        strays = [parameter for parameter in one.trains if id(parameter) not in kept]
        if not strays:
            continue
        if len(strays) < len(one.trains):
            shapes = [str(list(parameter.shape)) for parameter in strays]
            more = ", ..." if len(shapes) > _MOST_SHAPES else ""
            number = "a parameter" if len(strays) == 1 else f"{len(strays)} parameters"
            modules = one.find_owners(strays)
            owners = " and ".join(f"a {type(owner).__name__}" for owner in modules)
            owned = {id(parameter) for owner in modules for parameter in owner.parameters()}
            advice = ["the module, as in criterion=criterion"] if modules else []
            advice += [] if owned.issuperset(map(id, strays)) else ["the parameter itself, as in scale=scale"]
            texts.append(
                f"{path} trains {number}{owners and f' of {owners}'} that no saved object has (shape "
                f"{', '.join(shapes[:_MOST_SHAPES])}{more}), so a restart begins with new values: pass "
                f"{' and '.join(advice)}, too"
            )
        elif held:
            texts.append(
                f"{path} trains none of the saved parameters, so it changes another model than the one that is saved. "
                "Create it from the parameters of the saved model"
            )
        elif not may_hold:
            texts.append(f"the parameters of {path} belong to no saved object: pass the model too, model=model")
    return texts


def _list_kept(objects: Mapping[str, object], members: Sequence[tuple[str, Any, Adapter]]) -> set[int]:
    """Returns the ids of all values in the trees; objects of the program's own classes may keep others in their state,
    such as parameters, or the model."""
    kept = {id(value) for obj in objects.values() for value in list_values(obj)}
    own = [obj for _, obj, adapter in members if is_own_class(obj, adapter)]
    return kept.union(id(value) for obj in own for value in list_reached(obj))


def list_unsaved(objects: Mapping[str, object], changed: Sequence[tuple[str, object]]) -> list[str]:
    """Returns the names of the changed values that no saved object has."""
    own = [obj for _, obj, adapter in list_members(objects) if is_own_class(obj, adapter)]
    kept = {id(value) for root in (*objects.values(), *map(list_reached, own)) for value in list_values(root)}
    return [name for name, value in changed if id(value) not in kept]


def keeps_draws(objects: Mapping[str, object]) -> bool:
    """Returns True if the shared generators are saved, or others in a way of the program's own."""
    is_named = any(word in name.lower() for name in objects for word in _GENERATORS)
    return is_named or any(isinstance(obj, RNG) for _, obj, _ in list_members(objects))


def is_own_class(obj: object, adapter: Adapter | None) -> bool:
    """Returns True if an object is of the program's own class, which may store anything; a schedule does not."""
    is_other = type(obj).__module__.startswith("torch.") or hasattr(getattr(obj, "scheduler", obj), "last_epoch")
    return isinstance(adapter, StateDictAdapter) and not is_other


def list_values(obj: object) -> Iterator[object]:
    """Yields a value and those in its dicts, lists and tuples."""
    seen: dict[int, object] = {}  # A tree may contain itself.
    ahead = [obj]
    while ahead:
        value = ahead.pop()
        yield value
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen[id(value)] = value
            ahead += value.values() if isinstance(value, dict) else value


def list_reached(obj: object) -> list[object]:
    """Returns the values that an object has, at any depth, in attributes and containers; the nearest of very many.

    Of objects with an adapter of their own, such as modules and optimizers, only those and their parameters.
    """
    reached = {id(obj): obj}
    ahead = deque([obj])
    while ahead and len(reached) < _MOST_REACHED:
        value = ahead.popleft()
        adapter = adapter_of(value)
        parts: Any = ()
        if adapter is not None and not isinstance(adapter, StateDictAdapter):
            parts = adapter.oversights_of(value).holds
        elif isinstance(value, dict):
            parts = list(value.values())
        elif isinstance(value, list | tuple | set | deque):
            parts = list(value)
        elif not isinstance(value, type | ModuleType):
            parts = list(getattr(value, "__dict__", {}).values())
        new = {id(part): part for part in parts if id(part) not in reached}
        reached.update(new)
        ahead.extend(new.values())
    return list(reached.values())


class StrayOptimizers:
    """Detects optimizers that are not saved themselves: of a saved module, or of parameters that are not saved either.

    Attributes:
        step: Grows with each counted step.
        updates: How often optimizers that are not saved have stepped saved modules, by the optimizer's name.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        """Knows none yet.

        Args:
            objects: The saved objects, by name; more may be added.
        """
        self._objects = objects
        self._known: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        # Those that may train what no saved object has, with the first and the newest step in which they stepped.
        self._unheld: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.step = 0
        self.updates: dict[str, int] = {}

    def find(self, optimizer: Any) -> tuple[str, str]:
        """Returns the saved module that an unsaved optimizer trains, and a warning about it at the first step.

        Both are empty if there is nothing to report. An optimizer without any state loses nothing.
        """
        if (known := self._known.get(optimizer)) is not None:
            if self._unheld and optimizer in self._unheld:
                self._unheld[optimizer] = self._unheld[optimizer][0], self.step
            return known, ""
        # A program that makes optimizers all the time tries steps out, on copies say.
        is_one_of_many = len(self._known) > _MOST_STEPPED
        path = "" if is_one_of_many else self._find_module(optimizer)
        self._known[optimizer] = path
        if not path and not is_one_of_many:
            self._unheld[optimizer] = self.step, self.step
        if not path or not _has_state(optimizer):
            return path, self._find_scaler()
        return path, (
            f"{type(optimizer).__name__} updates the parameters of {path} but is not saved, so a restart begins "
            "with a new one: pass it too, optimizer=optimizer"
        )

    def list_lost(self) -> list[str]:
        """Returns a warning about each optimizer that trains what no saved object has, once; called at a save.

        One that has stepped within a single step only may be made again in each, on a copy say.
        """
        texts = []
        for optimizer, (first, newest) in list(self._unheld.items()):
            if newest > first:
                del self._unheld[optimizer]
                if self._is_lost(optimizer):
                    number = len(_list_parameters(optimizer))
                    texts.append(
                        f"{type(optimizer).__name__} updates {number} {'parameter' if number == 1 else 'parameters'} "
                        "that no saved object holds, so a restart begins with new values: pass the module and the "
                        "optimizer too. If this training does not need them, ignore this"
                    )
        return texts

    def _is_lost(self, optimizer: Any) -> bool:
        members = list_members(self._objects)
        found = [adapter.oversights_of(obj) for _, obj, adapter in members]
        saved = {id(one) for each in found for one in (*each.holds, *each.trains)}
        # A wrapper may hide which parameters its optimizer has.
        saved.update(id(part) for _, obj, _ in members for part in getattr(obj, "__dict__", {}).values())
        own = _list_parameters(optimizer)
        if id(optimizer) in saved or not own or not own.isdisjoint(saved):
            return False
        kept = _list_kept(self._objects, members)
        return id(optimizer) not in kept and own.isdisjoint(kept)

    def _find_scaler(self) -> str:
        """Returns a warning about a scaler of gradients that makes this step and is not saved; "" if there is none."""
        frame, scaler = sys._getframe().f_back, None
        while frame is not None and scaler is None:
            caller: Any = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
            scaler = caller if type(caller).__name__.endswith("GradScaler") and caller.is_enabled() else None
            frame = frame.f_back
        members = [] if scaler is None else list_members(self._objects)
        reached = (part for _, obj, one in members for part in (list_reached(obj) if is_own_class(obj, one) else [obj]))
        if scaler is None or any(part is scaler for part in reached):
            return ""
        return (
            f"a {type(scaler).__name__} scales the gradients and is not saved, so a restart begins with its "
            "first scale: pass it too, scaler=scaler"
        )

    def _find_module(self, optimizer: Any) -> str:
        members = list_members(self._objects)
        own = _list_parameters(optimizer)
        for _, obj, adapter in members:
            # A wrapper has the parameters of what it wraps.
            if isinstance(getattr(obj, "param_groups", None), list):
                own -= _list_parameters(obj)
            elif is_own_class(obj, adapter) and any(part is optimizer for part in list_reached(obj)):
                return ""
        return next(
            (path for path, obj, one in members if own and not own.isdisjoint(map(id, one.oversights_of(obj).holds))),
            "",
        )


def _list_parameters(optimizer: Any) -> set[int]:
    return {id(one) for group in optimizer.param_groups for one in group["params"]}


def _has_state(optimizer: Any) -> bool:
    """Returns True if an optimizer has state that a restart would lack: moments, or a rate that a schedule changes."""
    moments = (value for state in optimizer.state.values() for value in list_values(state) if value is not state)
    return any(one is not None for one in moments) or any("initial_lr" in group for group in optimizer.param_groups)
