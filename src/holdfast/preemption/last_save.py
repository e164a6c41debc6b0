"""Which step a loop has saved last, and whether that save holds all of it."""

from __future__ import annotations

from holdfast.save.handle import SaveHandle


class LastSave:
    """The step that was saved last. One that was restored, or saved by somebody else, has no save here."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._saved: SaveHandle | None = None

    def note(self, step: int | None, saved: SaveHandle | None) -> None:
        """A save of that step was begun, unless it was left out.

        Args:
            step: The step; None if nothing is saved.
            saved: Its save; None if it was committed without one.
        """
        if saved is None or not saved.skipped:
            self._step, self._saved = step, saved

    def is_begun(self, step: int) -> bool:
        """Whether a save of the step is committed, or on its way."""
        return self._step == step and (self._saved is None or not self._saved.failed)

    def is_whole(self, step: int, provisional: int | None) -> bool:
        """Whether that save holds all of the step.

        Args:
            step: The step.
            provisional: The one that was saved in the midst of it; None if there is none.
        """
        return self.is_begun(step) and (self._saved is None or step != provisional)

    def is_there(self, step: int) -> bool:
        """Whether another save of the step has to replace a checkpoint."""
        return self._step == step and self._saved is not None and self._saved.stands

    def find(self, step: int) -> SaveHandle | None:
        """The save of the step, if one was begun and has not failed."""
        return self._saved if self.is_begun(step) else None
