"""Which checkpoints to try, and in which order. Pure."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.catalog import Catalog, make_lost_error
from holdfast.format.names import StepName


def choose_candidates(catalog: Catalog, lost: Collection[StepName], step: int | None, url: str) -> tuple[StepName, ...]:
    """**Pure.** The checkpoints to try, the best first.

    Steps that have lost their manifests are among them, to be passed over like any other damage.

    Args:
        catalog: What lies there.
        lost: Steps of the living line that have lost their manifests.
        step: The step that was asked for, and then no other is offered; None for the newest whole one.
        url: Where the run lies, for the error.

    Raises:
        NoCheckpointError: If the step that was asked for is not there.
        NoWholeCheckpointError: If it has lost its manifest; or if there is nothing else to go on from.
    """
    if step is not None:
        if asked := [name for name in lost if name.step == step]:
            raise make_lost_error(asked, url)
        return (catalog.find(step),)
    if lost and not catalog.living:
        raise make_lost_error(sorted(lost), url)
    return tuple(sorted((*catalog.living, *lost), reverse=True))
