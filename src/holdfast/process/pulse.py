"""Notes what this process does now (a step, a wait for data, the copy of a save) for those who watch it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from holdfast.supervise.board import ENDED, ENVIRONMENT, NONE, Board


class Pulse:
    """Writes to the board of this process, if it has one. Only the thread that joined last changes the phase.

    Attributes:
        is_on: True while there is a board. Code that is called for each save asks this first.
        board: The board, or None.
        on_first_step: Called once, when this process has completed its first step, or else has begun its first save.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.board: Board | None = None
        self.on_first_step: Callable[[], object] | None = None
        self._thread = 0
        self._step = 0

    def join(self, *, make: bool = False) -> Board | None:
        """Lets this thread note its phases, on the inherited board if it is meant for this process.

        Args:
            make: True to make a board if there is none.
        """
        self._thread = threading.get_ident()
        if self.board is None:
            with suppress(OSError, ValueError):
                self.board = _open_inherited() or (Board.create() if make else None)
        self.is_on = self.board is not None
        return self.board

    def enter(self, phase: int, step: int | None = None, *, completed: int = 0) -> int:
        """Begins a phase; other threads change nothing.

        Args:
            phase: What begins, as in `Board.enter`.
            step: How many steps are complete; None for as many as before.
            completed: How many of them were completed just now.

        Returns:
            The phase that has ended.
        """
        if completed and self.on_first_step is not None:
            self.note_first()
        board = self.board
        if board is None or threading.get_ident() != self._thread:
            return NONE
        if step is not None:
            self._step = step
        return board.enter(phase, self._step, completed=completed)

    def note_first(self) -> None:
        """Calls `on_first_step`, once."""
        call, self.on_first_step = self.on_first_step, None
        if call is not None:
            call()

    def end(self) -> None:
        """Called when a run is left: nothing is to be waited for any more."""
        self.enter(ENDED)

    def leave_to_parent(self) -> None:
        """Called in a forked child, which is not watched by what watches its parent."""
        self.board, self.is_on, self.on_first_step = None, False, None


def _open_inherited() -> Board | None:
    """Returns the board that the environment names, if it is meant for this process."""
    descriptor, _, owner = os.environ.get(ENVIRONMENT, "").partition(":")
    if not descriptor or int(owner) not in (0, os.getpid()):
        return None
    board = Board.open(int(descriptor))
    if int(owner) == 0 and board.read().pid not in (0, os.getpid()):
        return None  # A process started by the trainer has inherited the environment.
    os.set_inheritable(board.fd, False)
    return board


PULSE: Final = Pulse()
os.register_at_fork(after_in_child=PULSE.leave_to_parent)
