"""What a program that saves seems to have forgotten: it saves and restores without an error, and goes on otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from holdfast.state.finding import find_stateful
from holdfast.state.rng import RNG

_GENERATORS: Final = ("rng", "random", "generator", "seed")
_EPOCHS: Final = ("epoch", "current_epoch")


def find_oversights(objects: Mapping[str, object]) -> list[str]:
    """What should be said of the objects at the first save, a sentence each.

    Args:
        objects: What is kept, by name.
    """
    members = [
        (path, obj, adapter)
        for name, root in objects.items()
        for path, obj, adapter in find_stateful(root, name)
        if adapter is not None
    ]
    # A program may keep the states of generators in a way of its own.
    keeps_draws = any(isinstance(obj, RNG) for _, obj, _ in members) or any(
        word in name.lower() for name in objects for word in _GENERATORS
    )
    found = {path: adapter.oversights_of(obj) for path, obj, adapter in members}
    texts = [f"{path}: {one.lack}" for path, one in found.items() if one.lack]
    texts += [
        f"{path}: {one.draws} draws from random generators that are not kept, so a restart draws other numbers: keep "
        "rng=hf.RNG() as well"
        for path, one in found.items()
        if one.draws and not keeps_draws
    ]
    return texts


def find_fixed_epoch(objects: Mapping[str, Any], assigned: frozenset[str]) -> str:
    """**Pure.** What should be said, at the end of training, of an epoch that is kept as a number; "" if nothing.

    Args:
        objects: What is kept, by name.
        assigned: The names that were given another object since.
    """
    for name in _EPOCHS:
        value = objects.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and name not in assigned:
            return (
                f"{name} is kept as the number {value}, which nothing has set since: a loop's own variable is another. "
                f"Set checkpoint.{name} in the loop (run.checkpoint, if run is resumable's) and begin with it, or take "
                "the epochs from a ResumableDataLoader's epochs()"
            )
    return ""
