"""The objects of a framework's checkpoint, with the names that a holdfast job uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.convert.leaf_tree import LeftOut
from holdfast.convert.torch_file import ArchivedTree, TorchArchive

MODEL = "model"


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
