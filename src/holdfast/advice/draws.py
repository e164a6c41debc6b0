"""Detects steps that draw from the random generators that the whole process shares, while these are not saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.advice.strays import keeps_draws, list_values
from holdfast.state.registry import list_members
from holdfast.state.rng import RNG

_LOOKED_AT: Final = (2, 3, 4)
"""The counted steps that are compared. A loader may draw a seed in the first one."""


class DrawWatch:
    """Compares the states of the shared generators at three steps in a row, and then no more.

    Attributes:
        is_looking: True until that is done.
    """

    def __init__(self) -> None:
        self.is_looking = True
        self._counted = 0
        self._states: list[dict[str, list[object]]] = []

    def look(self, objects: Mapping[str, object]) -> str:
        """Called when a step is counted; returns a warning if each step draws, "" else.

        A single step may begin an epoch, for which a loader draws a seed.
        """
        self._counted += 1
        if self._counted < _LOOKED_AT[0]:
            return ""
        is_last = self._counted == _LOOKED_AT[-1]
        # Modules that draw are named at the first save.
        if keeps_draws(objects) or any(one.oversights_of(obj).draws for _, obj, one in list_members(objects)):
            self.is_looking, self._states = False, []
            return ""
        self._states.append({name: _flatten(state) for name, state in RNG().state_dict().items()})
        if not is_last:
            return ""
        first, second, third = self._states
        self.is_looking, self._states = False, []
        drawn = [name for name in third if name in first and first[name] != second[name] != third[name]]
        if not drawn:
            return ""
        return (
            f"each step draws from random generators that are not saved ({', '.join(drawn)}), so a restart draws other "
            "numbers: pass rng=hf.RNG() as well. If your program seeds them in each step, ignore this"
        )


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
