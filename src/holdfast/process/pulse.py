"""Notes what this process does now (a step, a wait for data, the copy of a save) for those who watch it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from holdfast.supervise.board import BETWEEN, DATA, ENDED, ENVIRONMENT, EVALUATE, NONE, STEP, Board

Batch = TypeVar("Batch")


class Pulse:
    """Writes to the board of this process, if it has one. Only the thread that joined last changes the phase.

    Attributes:
        is_on: True while there is a board. Code that is called for each save asks this first.
        board: The board, or None.
        is_supervised: True if the board is inherited, so that another process watches it.
        dump_thread: A thread that writes stacks without delay to training; 0 for none.
        after_batch: The phase that begins with a batch: a step, if it is known where steps end.
        on_first_step: Called once, when this process has completed its first step, or else has begun its first save.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.board: Board | None = None
        self.on_first_step: Callable[[], object] | None = None
        self.is_supervised = False
        self.dump_thread = 0
        self.after_batch = BETWEEN
        self._thread = self._step = 0

    def join(self, *, make: bool = False) -> Board | None:
        """Lets this thread note its phases, on the inherited board if it is meant for this process.

        Args:
            make: True to make a board if there is none.
        """
        self._thread = threading.get_ident()
        if self.board is None:
            with suppress(OSError, ValueError):
                self.board = _open_inherited()
                self.is_supervised = self.board is not None
                if make and self.board is None:
                    self.board = Board.create()
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

    def note_update(self) -> None:
        """Called when an optimizer has stepped: what follows may be an evaluation."""
        self.after_batch = STEP
        self.enter(BETWEEN)

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
        self.is_supervised = False


def take_batch(batches: Iterator[Batch]) -> Batch:
    """Returns the next batch, noted as a wait for data."""
    if not PULSE.is_on:
        return next(batches)
    PULSE.enter(DATA)
    try:
        return next(batches)
    finally:
        PULSE.enter(PULSE.after_batch)


@contextmanager
def evaluating() -> Iterator[None]:
    """A block in which training evaluates."""
    before, after = PULSE.enter(EVALUATE), PULSE.after_batch
    PULSE.after_batch = EVALUATE
    try:
        yield
    finally:
        PULSE.after_batch = after
        PULSE.enter(before)


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
