"""The thread of one worker that speaks with the others through the store of the job, and the wait for what it hears."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.cluster.protocol import ANSWER_SECONDS
from holdfast.errors import ClosedError, HoldfastError
from holdfast.gate import Gate
from holdfast.preemption.background import start_thread

_LOOK_SECONDS: Final = 0.25
"""How often to look whether there is something new."""

_SHORTEST_PAUSE_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 0.05
_MANY: Final = 256
"""While something is under way it is looked at more often, as long as there are not very many who ask one store."""

_END_SECONDS: Final = 2.0


class Herald:
    """**Thread-safe.** Does errands one after the other, each until the store has answered, and looks between them.

    Attributes:
        trouble: Why the others cannot be reached; empty if they can.
        changed: Opened when there is something new; another gate has taken its place by then.
    """

    def __init__(
        self,
        look: Callable[[], None],
        is_busy: Callable[[], bool],
        stir: Callable[[], object],
        note_silence: Callable[[float, str], object],
        world_size: int,
    ) -> None:
        """Starts nothing yet.

        Args:
            look: Looks whether there is something new, in the thread; it may raise `HoldfastError`.
            is_busy: Whether to look again soon.
            stir: Called when there is something new.
            note_silence: Called, in the thread, with the seconds for which the store has not answered, and its error.
            world_size: How many there are.
        """
        self.trouble = ""
        self.changed = Gate()
        self._look = look
        self._is_busy = is_busy
        self._stir = stir
        self._note_silence = note_silence
        self._longest_pause_seconds = _LONGEST_PAUSE_SECONDS if world_size <= _MANY else _LOOK_SECONDS
        self._errands: deque[Callable[[], object]] = deque()
        self._inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended: Gate | None = None
        self._silent_since: float | None = None
        self._pause_seconds = _LOOK_SECONDS

    def open(self) -> None:
        """Begins; waits for nothing."""
        self._ended = start_thread(self._serve, "holdfast-herald")

    def close(self) -> None:
        """**Blocks** for a moment. Says no more; harmless twice."""
        self._inbox.put(False)
        if self._ended is not None:
            self._ended.wait(_END_SECONDS)

    def wake(self) -> None:
        """Has the thread look at once."""
        self._inbox.put(True)

    def send(self, errand: Callable[[], object]) -> None:
        """Has something done soon, again and again until it raises no error."""
        self._errands.append(errand)
        self._inbox.put(True)

    def tell_change(self) -> None:
        """There is something new."""
        gate, self.changed = self.changed, Gate()
        gate.open()
        self._stir()

    def wait(self, holds: Callable[[], bool], end_at: float | None) -> bool:
        """**Blocks.** Waits until something holds, or the others cannot be reached, or the time is over.

        Args:
            holds: Looked at whenever there is something new.
            end_at: When the time is over, by the monotonic clock; None if it never is.
        """
        while True:
            changed = self.changed
            if holds():
                return True
            if self.trouble or (end_at is not None and time.monotonic() >= end_at):
                return False
            changed.wait(_LOOK_SECONDS)

    def _serve(self) -> None:
        while self._is_open():
            begun_at = time.monotonic()
            try:
                while self._errands:
                    self._errands[0]()
                    self._errands.popleft()
                    self.tell_change()
                self._look()
            except ClosedError:
                self.trouble = "the cluster was closed"
                return
            except HoldfastError as error:
                # A store that hangs is silent from the moment in which it was asked.
                self._silent_since = self._silent_since or begun_at
                silent_seconds = time.monotonic() - self._silent_since
                if silent_seconds >= ANSWER_SECONDS / 2:
                    self.trouble = error.message
                    self._note_silence(silent_seconds, error.message)
                    self.tell_change()
            except BaseException as error:
                # Nobody speaks with the others any more: whoever waits for them has to know.
                self.trouble = f"{type(error).__name__}: {error}"
                self.tell_change()
                raise
            else:
                self._silent_since, self.trouble = None, ""

    def _is_open(self) -> bool:
        """Waits until there is something to do, or it is time to look."""
        try:
            is_open = self._inbox.get(timeout=self._pause_seconds)
        except queue.Empty:
            is_open = True
            self._pause_seconds = min(1.5 * self._pause_seconds, self._longest_pause_seconds)
        else:
            self._pause_seconds = _SHORTEST_PAUSE_SECONDS
        if not self._is_busy():
            self._pause_seconds = _LOOK_SECONDS
        return is_open
