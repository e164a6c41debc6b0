"""How an action ended on one node, as the others are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from holdfast.errors import (
    ApplyError,
    DamageError,
    HoldfastError,
    MismatchError,
    NoWholeCheckpointError,
    StorageError,
    UsageError,
)
from holdfast.jobs.keeper import NodeDurations
from holdfast.state import Differences

_KINDS: Final[Mapping[str, Callable[[str, str], HoldfastError]]] = {
    "NoWholeCheckpointError": lambda text, hint: NoWholeCheckpointError(text, damages=(DamageError(text),), hint=hint),
    "MismatchError": lambda text, hint: MismatchError(text, differences=Differences(), hint=hint),
    "StorageError": lambda text, hint: StorageError(text, hint=hint),
    "StorageFullError": lambda text, hint: StorageError(text, hint=hint),
    "ApplyError": lambda text, hint: ApplyError(text, hint=hint),
    "UsageError": lambda text, hint: UsageError(text, hint=hint),
    "UnsupportedValueError": lambda text, hint: UsageError(text, hint=hint),
}


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How it ended.

    Attributes:
        seconds: How long it took; None if the node had no part in it.
        kind: The name of the error's type; empty if there was none.
        text: What the error says.
        hint: What to do about it.
        is_fenced: Whether another job has taken over.
    """

    seconds: float | None = None
    kind: str = ""
    text: str = ""
    hint: str = ""
    is_fenced: bool = False


def failed(error: HoldfastError, *, is_fenced: bool = False) -> Outcome:
    """**Pure.** The outcome of an action that raised."""
    return Outcome(None, type(error).__name__, error.message, error.hint, is_fenced)


def check_outcomes(outcomes: Mapping[str, Outcome]) -> NodeDurations:
    """**Pure.** The times of all nodes that had a part, if all went well.

    Raises:
        HoldfastError: What the first of them met with that did not; it names the node.
    """
    wrong = [(node, outcome) for node, outcome in outcomes.items() if outcome.kind]
    if wrong:
        node, outcome = wrong[0]
        make = _KINDS.get(outcome.kind)
        text = f"{node}: {outcome.text}"
        error = make(text, outcome.hint) if make is not None else HoldfastError(text, hint=outcome.hint)
        for other, also in wrong[1:]:
            error.add_note(f"{other} too: {also.text}")
        raise error
    return NodeDurations({node: one.seconds for node, one in outcomes.items() if one.seconds is not None})
