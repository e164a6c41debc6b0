"""The count of complete steps, and what was saved of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from holdfast.advice.watch import count_taken
from holdfast.checkpoint import objects_of
from holdfast.save.handle import SaveHandle

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager
    from holdfast.restore.records import Restoration

_MOST_DRAWN: Final = 1000


class StepCount:
    """How many steps are complete, and which of them was saved last. Each handler of a checkpoint goes on with it.

    Attributes:
        done: How many steps are complete.
        saved_step: The step that was saved last; None if nothing is saved.
        saved: Its save; None if it was restored, or saved by other code.
        late_metrics: Its metrics that were reported since.
        measured: By metric, how many steps were complete when it was reported.
        taken: How many batches had been taken from each saved sampler when that save was begun.
        drawn: The same for the newest steps that were saved or restored here.
    """

    def __init__(self) -> None:
        self.done = 0
        self.saved_step: int | None = None
        self.saved: SaveHandle | None = None
        self.late_metrics: dict[str, Any] = {}
        self.measured: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.drawn: dict[int, dict[str, int]] = {}
        self._manager: CheckpointManager | None = None
        self._restored: Restoration | None = None
        self._stored: dict[str, Any] = {}

    def join(self, manager: CheckpointManager) -> None:
        """Called when a loop begins to count, after its restore.

        Args:
            manager: The manager that saves. Saves of another manager are in another directory.
        """
        if manager is not self._manager or manager.restored is not self._restored:
            self._manager, self._restored = manager, manager.restored
            self.note(None if manager.restored is None else self.done, None)

    def counts_for(self, manager: CheckpointManager) -> bool:
        """Returns True if the last loop that joined saves with that manager: then the objects are at that count."""
        return manager is self._manager

    def note(self, step: int | None, saved: SaveHandle | None) -> None:
        """Records that a save of that step was begun, unless it was skipped; sets `saved_step` and `saved`."""
        if saved is None or not saved.skipped:
            self.saved_step, self.saved, self.late_metrics = step, saved, {}
            if self._manager is not None:
                self.taken = count_taken(objects_of(self._manager.checkpoint).all())
                if step is not None:
                    self.drawn[step] = self.taken
                    if len(self.drawn) > _MOST_DRAWN:
                        del self.drawn[min(self.drawn)]

    def note_measured(self, names: Iterable[str]) -> None:
        """Records that metrics were reported now, unless it was warned of them."""
        for name in names:
            self.measured[name] = max(self.measured.get(name, 0), self.done)

    def store_metrics(self) -> bool:
        """Stores the late metrics with their step, unless it was restored and has them; returns True if any are."""
        step, restored, late = self.saved_step, self._restored, self.late_metrics
        if step is None or not late or self._manager is None or not self.is_begun(step):
            return False
        if self.saved is None and restored is not None and restored.step == step:
            late = {name: value for name, value in late.items() if name not in restored.manifest.metrics}
        if late and late != self._stored:
            self._manager.add_metrics(step if self.saved is None else self.saved.step, late)
        self._stored = dict(late)
        return bool(late)

    def find(self, step: int) -> SaveHandle | None:
        """Returns the save of the step, if one was begun and has not failed."""
        return self.saved if self.is_begun(step) else None

    def is_begun(self, step: int) -> bool:
        """Returns True if a save of the step is committed or in progress."""
        manager = self._manager
        if manager is not None and manager.restored is not self._restored:
            # The program has gone back: what was saved under a number since then is of another line.
            self._restored = manager.restored
            self.note(None if manager.restored is None else manager.restored.step, None)
        return self.saved_step == step and (self.saved is None or not self.saved.failed)
