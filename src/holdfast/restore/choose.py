"""Which checkpoints to try, and in which order. Pure."""

from __future__ import annotations

from holdfast.catalog import Catalog
from holdfast.format.names import StepName


def choose_candidates(catalog: Catalog, step: int | None) -> tuple[StepName, ...]:
    """**Pure.** The checkpoints to try, the best first.

    Args:
        catalog: What lies there.
        step: The step that was asked for, and then no other is offered; None for the newest whole one.

    Raises:
        NoCheckpointError: If the step that was asked for is not there.
    """
    if step is not None:
        return (catalog.find(step),)
    return tuple(reversed(catalog.living))
