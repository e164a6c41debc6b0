"""The policy of `BackupAndRestore(save_freq=n)`: a save after so many batches, of which a step may have several."""

from __future__ import annotations

from holdfast.policies import SavePolicy
from holdfast.policies.saving import SaveDecision, SaveMoment


class EveryBatches(SavePolicy):
    """Saves when that many batches were trained since the previous save.

    Attributes:
        batches: After how many batches; 0 for never.
    """

    # Workers find the same by themselves.
    by_step = True

    def __init__(self, batches: int) -> None:
        self.batches, self._since = batches, 0

    def note(self, batches: int) -> None:
        """Counts a step with that many batches."""
        self._since += batches

    def decide_save(self, moment: SaveMoment) -> SaveDecision:
        """Returns whether to save at this moment, and why."""
        if self.batches and self._since >= self.batches:
            self._since = 0
            return SaveDecision(True, f"{self.batches} batches were trained")
        return SaveDecision(False, "too few batches were trained")

    def __repr__(self) -> str:
        return f"EveryBatches({self.batches})"
