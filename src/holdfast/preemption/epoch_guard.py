"""The guard of a training whose epochs are saved whole, and which exits in the middle of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.preemption.config import TerminationConfig
from holdfast.preemption.consensus.single import SingleConsensus
from holdfast.preemption.final_save import Saves
from holdfast.preemption.guard import Guard
from holdfast.save.handle import SaveHandle


class EpochGuard(Guard):
    """Exits as soon as the save in progress has ended, even in the middle of an epoch: that epoch is trained again.

    If another run or handler handles notices in the same thread, that one exits, and this guard does nothing.
    """

    yields = True

    def __init__(
        self,
        manager: Saves,
        config: TerminationConfig,
        keep: Callable[[int], SaveHandle | None],
        name: Callable[[int], str],
        note_exit: Callable[[SystemExit], object],
    ) -> None:
        """Stores its arguments, as `Guard` does.

        Args:
            manager: As there.
            config: As there.
            keep: As there.
            name: Returns the name of a step, for people.
            note_exit: Called with the exit that is about to end this worker.
        """
        super().__init__(manager, config, keep, SingleConsensus())
        self._note_exit = note_exit
        self._final_save.name = name
        self._final_save.nothing = "no epoch is saved yet, and the one in progress will be trained again"

    def hold(self) -> None:
        """Called when the training thread saves, and no other thread may do so. Ctrl-C has its usual effect."""
        self.begin_steps()
        self.inbox.patient = False

    def _leave(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._leave(*arguments, **options)
        except SystemExit as leaving:
            self._note_exit(leaving)
            raise

    def _warn_if_late(self) -> None:
        """Does nothing: a save may take long, and so may a batch."""
