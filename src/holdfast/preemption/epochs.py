"""A guard for a loop whose state is saved at the end of its epochs only."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.consensus.single import SingleConsensus
from holdfast.preemption.final_save import Saves
from holdfast.preemption.guard import Guard
from holdfast.save.handle import SaveHandle


class EpochGuard(Guard):
    """Leaves as soon as the save in flight has ended, in the middle of an epoch too: that one is trained again.

    Where another run or handler listens in the same thread, that one leaves, and this guard does nothing.
    """

    def __init__(
        self,
        manager: Saves,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
        name: Callable[[int], str],
    ) -> None:
        """Takes note of what to guard, as `Guard` does; `name` gives what a step is called where people read of it."""
        super().__init__(manager, config, keep, SingleConsensus(), yields=True)
        self._final_save.name = name
        self._final_save.nothing = "no epoch is saved yet, and the one in progress will be trained again"

    def hold(self) -> None:
        """The training thread saves, and nothing is done beside it. Ctrl-C has the effect that it always had."""
        self.begin_steps()
        self.inbox.patient = False

    def _tell_if_late(self) -> None:
        """Nothing: a save may take long, and so may a batch."""
