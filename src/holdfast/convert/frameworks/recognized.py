"""The objects of a framework's checkpoint, with the names that a holdfast job uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.convert.leaf_tree import LeftOut
from holdfast.convert.torch_file import ArchivedTree, TorchArchive

MODEL = "model"

_OPTIMIZER: Final = {"state", "param_groups"}
_MOST_SPLIT: Final = 16
"""A list of more is one object."""


@dataclass(eq=False, slots=True)
class Recognized:
    """The objects of a source.

    Attributes:
        objects: Everything that can be imported, by name.
        taken: The names that are imported if no others are requested.
        former: By the name in the source, the object's name here.
        step: The step of the source; None if it has none.
        left: What is never imported, and why.
        progress: The framework's own progress, as JSON.
    """

    objects: dict[str, ArchivedTree]
    taken: list[str]
    former: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    left: list[LeftOut] = field(default_factory=list)
    progress: Any = None

    def take(self, name: str, value: Any, archive: TorchArchive | None, former: str = "") -> None:
        """Adds an object that is imported by default."""
        self.objects[name] = ArchivedTree(value, archive)
        self.taken.append(name)
        if former:
            self.former[former] = name

    def take_each(self, kind: str, states: Sequence[Any], archive: TorchArchive | None, former: str) -> None:
        """Adds the states of several objects of a kind: after the first one, names get a number."""
        for number, state in enumerate(states):
            self.take(f"{kind}_{number}" if number else kind, state, archive, former * (len(states) == 1))

    def offer(self, name: str, value: Any, archive: TorchArchive | None) -> None:
        """Adds an object that is imported only on request."""
        self.objects.setdefault(name, ArchivedTree(value, archive))


def step_of(value: Any) -> int | None:
    """**Pure.** Returns a number of steps; None if it is not one."""
    return value if type(value) is int and value >= 0 else None


def split_list(
    values: Any, archive: TorchArchive | None, name: str, is_array: Callable[[Any, TorchArchive | None], bool]
) -> Recognized | None:
    """Returns the objects in a list, named by their content or else by position; None if it has no state."""

    def role(part: Any) -> str:
        if type(part) is dict and part:
            is_optimizer, is_model = part.keys() >= _OPTIMIZER, all(is_array(one, archive) for one in part.values())
            return "optimizer" if is_optimizer else name if is_model else ""
        return "step" if type(part) is int else ""

    roles = [role(part) for part in values] if len(values) <= _MOST_SPLIT else []
    if not {name, "optimizer"} & set(roles):
        return None
    names = [one if one and roles.count(one) == 1 else str(number) for number, one in enumerate(roles)]
    found = Recognized({one: ArchivedTree(part, archive) for one, part in zip(names, values, strict=True)}, names)
    found.former = {str(number): one for number, one in enumerate(names) if one != str(number)}
    return found
