"""`checkpointable`: a block around what takes long and changes no state."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from holdfast.preemption.guard import Guard
from holdfast.save.handle import SaveHandle
from holdfast.save.mark import Mark


class Checkpointable:
    """A block in which the process may be saved and left at any moment, since nothing in it changes what is kept."""

    def __init__(
        self,
        guard: Guard,
        step: int,
        *,
        mark: Mark | None,
        saved: SaveHandle | None,
        note: Callable[[SaveHandle], None],
    ) -> None:
        """Made by `checkpointable`.

        Args:
            guard: Whose loop rests.
            step: How many steps are complete.
            mark: Their state; None if it is saved.
            saved: The save of that step, if one is under way or done.
            note: Told of a save that was made in the block.
        """
        self._guard = guard
        self._step = step
        self._mark = mark
        self._saved = saved
        self._note = note
        self._is_outer = True

    def __enter__(self) -> None:
        # Within another block that one's promise holds, for all that comes until its end.
        self._is_outer = not self._guard.in_block
        if self._is_outer:
            self._guard.in_block = True
            self._guard.pause(self._step, mark=self._mark, saved=self._saved)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_outer:
            return
        self._guard.in_block = False
        saved = self._guard.begin_steps()
        if saved is not None and saved is not self._saved:
            self._note(saved)
