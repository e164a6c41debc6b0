"""What the checkpoint of a framework holds, under the names that a job of holdfast gives it."""

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
        objects: All that can be taken, by name.
        taken: The names of those that are taken if no others are asked for.
        former: By the name that it has in the source, what an object is called here.
        step: The step that the source says it is of; None if it does not say.
        left: What is never taken, and why.
    """

    objects: dict[str, ArchivedTree]
    taken: list[str]
    former: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    left: list[LeftOut] = field(default_factory=list)

    def take(self, name: str, value: Any, archive: TorchArchive | None, former: str = "") -> None:
        """Adds an object that is taken."""
        self.objects[name] = ArchivedTree(value, archive)
        self.taken.append(name)
        if former:
            self.former[former] = name

    def take_each(self, kind: str, states: Sequence[Any], archive: TorchArchive | None, former: str) -> None:
        """Adds the states of several objects of a kind: one has its name, more have numbers behind it."""
        for number, state in enumerate(states):
            self.take(kind if len(states) == 1 else f"{kind}_{number}", state, archive, former * (len(states) == 1))

    def offer(self, name: str, value: Any, archive: TorchArchive | None) -> None:
        """Adds an object that is taken only where it is asked for."""
        self.objects.setdefault(name, ArchivedTree(value, archive))


def step_of(value: Any) -> int | None:
    """**Pure.** A number of steps; None if it is none."""
    return value if type(value) is int and value >= 0 else None
