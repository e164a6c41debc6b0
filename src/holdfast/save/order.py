"""What a save is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.format.names import StepName

if TYPE_CHECKING:
    from holdfast.save.joint.protocol import Exchange


class Origin(msgspec.Struct, frozen=True):
    """Where the next generation of a manager begins.

    Attributes:
        base: The checkpoint that it goes on from: the one that was restored, else the newest that the manager saw when
            it was made. None if it begins anew.
        seen_generation: The newest generation of the run at that time; 0 if there was none. Whoever has opened a newer
            one since goes on from steps that this manager does not know of.
        sources: Checkpoints that stay while the manager lives: those of which a part was restored, and those that were
            restored by their number, which may be asked for again.
    """

    base: StepName | None = None
    seen_generation: int = 0
    sources: tuple[StepName, ...] = ()


class SaveOrder(msgspec.Struct, frozen=True):
    """One save that is to be made.

    Attributes:
        step: The step.
        metrics: Figures for the manifest.
        metadata: What else goes into the manifest.
        origin: Where a generation that this save opens would begin.
        asked_at: When the save was asked for, by the monotonic clock.
        waited_seconds: How long it had to wait for the save before.
        reason: Why a policy wanted it; empty if the user asked for it.
        exchange: What is said about it between workers; None if there is one alone.
    """

    step: int
    metrics: Mapping[str, float]
    metadata: Mapping[str, Any]
    origin: Origin
    asked_at: float
    waited_seconds: float = 0.0
    reason: str = ""
    exchange: Exchange | None = None
