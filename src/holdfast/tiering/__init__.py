"""Runs in tiers: what copies committed steps on, and what the workers of a job do at its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.catalog import Catalog
from holdfast.events import Sink
from holdfast.options import SaveOptions
from holdfast.storage import Storage

if TYPE_CHECKING:
    from holdfast.save.joint.participant import JointParticipant
    from holdfast.tiering.copier import TierCopier


def open_tiers(
    storage: Storage, catalog: Catalog, options: SaveOptions, participant: JointParticipant | None, emit: Sink
) -> tuple[Catalog, TierCopier | None]:
    """**Collective.** **Blocks.** Returns what copies the steps of a run to farther tiers, or None if it has no tiers.

    With it comes what is in the run: `catalog`, unless the workers have completed a step by what each of them had.
    """
    if not storage.traits.has_tiers:
        return catalog, None
    # Most runs have none.
    from holdfast.tiering.copier import begin_tiers

    return begin_tiers(storage, catalog, options, participant, emit)
