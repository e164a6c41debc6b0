"""How an action ended on one node, as the others are told of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from holdfast.errors import (
    ApplyError,
    ClusterError,
    DamageError,
    DeadlineError,
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
    "DeadlineError": lambda text, hint: DeadlineError(text, hint=hint),
    "AbsentError": lambda text, hint: DeadlineError(text, hint=hint),
}
"""The errors that are made again for another process to raise; what is more to each is in the text."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """How it ended.

    Attributes:
        seconds: How long it took; None if the node had no part in it.
        kind: The name of the error's type; empty if there was none.
        text: What the error says.
        hint: What to do about it.
        is_fenced: Whether another job has taken over.
        trace: Where an error came from that is none of holdfast's; else empty.
    """

    seconds: float | None = None
    kind: str = ""
    text: str = ""
    hint: str = ""
    is_fenced: bool = False
    trace: str = ""


def failed(error: Exception, *, is_fenced: bool = False) -> Outcome:
    """**Pure.** The outcome of an action that raised."""
    kind = type(error).__name__
    if isinstance(error, HoldfastError):
        return Outcome(None, kind, error.message, error.hint, is_fenced)
    # Out of the state of a user's object, say.
    return Outcome(None, kind, f"{kind}: {error}", trace="".join(traceback.format_exception(error)))


def check_outcomes(outcomes: Mapping[str, Outcome]) -> NodeDurations:
    """**Pure.** The times of all nodes that had a part, if all went well.

    Raises:
        HoldfastError: What the first of them met with that did not; the text names the node.
    """
    wrong = [(node, outcome) for node, outcome in outcomes.items() if outcome.kind]
    if wrong:
        node, outcome = wrong[0]
        error = _make_error(outcome, f"{node}: {outcome.text}")
        for other, also in wrong[1:]:
            error.add_note(f"{other} too: {also.text}")
        raise error
    return NodeDurations({node: one.seconds for node, one in outcomes.items() if one.seconds is not None})


def _make_error(outcome: Outcome, text: str) -> HoldfastError:
    make = _KINDS.get(outcome.kind)
    if make is not None:
        return make(text, outcome.hint)
    if not outcome.trace:
        return ClusterError(text, hint=outcome.hint)
    error = UsageError(text, hint="An object of the program's own has raised this; see where below.")
    error.add_note(outcome.trace.rstrip())
    return error
