"""Going back, within the running process, to a step before training went wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.catalog import StoredRun
from holdfast.policies import find_good

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager


def find_newest_good(manager: CheckpointManager) -> int | None:
    """**Blocks.** Returns the newest step of the current lineage that is good; see `LastGood`. None if none is."""
    run = StoredRun(manager.storage)
    good = find_good(manager.options.keep, run.history.candidates(run.look().living))
    return good[-1].step if good else None
