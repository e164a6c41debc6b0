"""Whether a save that was given up, as it was late say, has been committed after all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.preemption.departure import ATTEMPTS, Saves
from holdfast.preemption.rest import Rest
from holdfast.save.handle import SaveHandle


class Landing:
    """Belongs to whichever thread saves and leaves, one at a time."""

    def __init__(self, manager: Saves, keep: Callable[[int], SaveHandle | None]) -> None:
        """Takes note of who saves.

        Args:
            manager: Who knows what is committed.
            keep: Begins the save of a step, or gives the one that was made.
        """
        self._manager = manager
        self._keep = keep
        # Each attempt is a save of its own.
        self._kept: deque[SaveHandle | None] = deque(maxlen=ATTEMPTS)

    def keep(self, step: int) -> SaveHandle | None:
        """What it was given does, noted."""
        saved = self._keep(step)
        self._kept.append(saved)
        return saved

    def begin(self) -> None:
        """The last save is about to begin. What was noted before may be of a line that was left since."""
        self._kept.clear()

    def check(self, step: int | None, error: str, early: SaveHandle | None, rest: Rest | None) -> str:
        """**Blocks** for a moment. What is still to be said of an error that was met with in saving a step.

        Args:
            step: The step; None if there is none.
            error: Why it seems not to be saved; empty if it is.
            early: The save that was made when the notice came.
            rest: What the training thread rests in.

        Returns:
            The error; an empty string if the step is committed, for all workers.
        """
        saves = (*self._kept, early, None if rest is None else rest.saved)
        self._kept.clear()
        of_step = [saved for saved in saves if saved is not None and saved.step == step]
        if not error or any(saved.committed for saved in of_step):
            return ""
        # Without a place, a step of that number may be one that was there before this job went back.
        is_placed = any(saved.placed for saved in of_step)
        return "" if is_placed and self._newest() == step else error

    def _newest(self) -> int | None:
        try:
            return self._manager.latest_step()
        except HoldfastError:
            return None
