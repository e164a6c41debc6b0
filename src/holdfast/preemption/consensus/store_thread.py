"""The thread of one worker that speaks with the others through the store of the job."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

from holdfast.cluster.protocol import ANSWER_SECONDS
from holdfast.concurrency import Latch, start_thread
from holdfast.errors import ClosedError, HoldfastError

_LOOK_SECONDS: Final = 0.25
"""How often to look whether there is something new."""

_SHORTEST_PAUSE_SECONDS: Final = 0.002
_LONGEST_PAUSE_SECONDS: Final = 0.05
_MANY: Final = 256
"""While something is under way it is looked at more often, as long as there are not very many who ask one store."""

_ANSWER_SECONDS: Final = 3.0
"""How long to wait for what is asked of the store."""

_COUNT_SECONDS: Final = 0.03
_END_SECONDS: Final = 2.0

_T = TypeVar("_T")


class StoreThread:
    """**Thread-safe.** Does what it is asked, one after the other, each until the store has answered; looks between.

    Attributes:
        trouble: Why the others cannot be reached; empty if they can.
        changed: Opened when there is something new; another latch has taken its place by then.
        is_open: Whether it was opened.
    """

    def __init__(self, world_size: int) -> None:
        """Starts nothing yet; what is sent is done when it is open.

        Args:
            world_size: How many workers there are.
        """
        self.trouble = ""
        self.changed = Latch()
        self.is_open = False
        self._longest_pause_seconds = _LONGEST_PAUSE_SECONDS if world_size <= _MANY else _LOOK_SECONDS
        self._tasks: deque[Callable[[], object]] = deque()
        self._inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ended: Latch | None = None
        self._silent_since: float | None = None
        self._pause_seconds = _LOOK_SECONDS
        self._on_change: Callable[[], object] = lambda: None

    def open(
        self,
        look: Callable[[], None],
        is_busy: Callable[[], bool],
        on_change: Callable[[], object],
        on_silence: Callable[[float, str], object],
    ) -> None:
        """Begins; waits for nothing.

        Args:
            look: Looks whether there is something new, in the thread; it may raise `HoldfastError`.
            is_busy: Whether to look again soon.
            on_change: Called when there is something new.
            on_silence: Called, in the thread, with the seconds for which the store has not answered, and its error.
        """
        self._look = look
        self._is_busy = is_busy
        self._on_change = on_change
        self._on_silence = on_silence
        self._ended = start_thread(self._serve, "holdfast-consensus")
        self.is_open = True

    def close(self) -> None:
        """**Blocks** for a moment. Says no more; harmless twice."""
        self._inbox.put(False)
        if self._ended is not None:
            self._ended.wait(_END_SECONDS)

    def wake(self) -> None:
        """Has the thread look at once."""
        self._inbox.put(True)

    def send(self, task: Callable[[], object]) -> None:
        """Has something done soon, again and again until it raises no error."""
        self._tasks.append(task)
        self._inbox.put(True)

    def ask(self, question: Callable[[], _T], end_at: float | None = None) -> _T | None:
        """**Blocks.** Sends a question, and gives its answer; None if there is none in time.

        Args:
            question: The question.
            end_at: Until when to wait, by the monotonic clock; None for a moment.
        """
        answers: list[_T] = []
        self.send(lambda: answers.append(question()))
        self.wait(lambda: bool(answers), time.monotonic() + _ANSWER_SECONDS if end_at is None else end_at)
        return answers[0] if answers else None

    def note_change(self) -> None:
        """There is something new."""
        latch, self.changed = self.changed, Latch()
        latch.open()
        self._on_change()

    def wait(self, holds: Callable[[], bool], end_at: float) -> bool:
        """**Blocks.** Waits until something holds, or the others cannot be reached, or the time is over.

        Args:
            holds: Looked at whenever there is something new.
            end_at: When the time is over, by the monotonic clock.
        """
        while True:
            changed = self.changed
            if holds():
                return True
            if self.trouble or time.monotonic() >= end_at:
                return False
            changed.wait(_LOOK_SECONDS)

    def wait_counted(
        self, count: Callable[[], int], find_least: Callable[[], int], end_at: float | None = None
    ) -> None:
        """**Blocks.** Waits until a counter of the store has come so far, or the time is over."""
        end_at = time.monotonic() + _ANSWER_SECONDS if end_at is None else end_at
        counted = 0

        def ask() -> None:
            nonlocal counted
            counted = count()

        while counted < find_least() and time.monotonic() < end_at and not self.trouble:
            self.send(ask)
            self.changed.wait(_COUNT_SECONDS)

    def _serve(self) -> None:
        while self._wait_turn():
            begun_at = time.monotonic()
            try:
                while self._tasks:
                    self._tasks[0]()
                    self._tasks.popleft()
                    self.note_change()
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
                    self._on_silence(silent_seconds, error.message)
                    self.note_change()
            except BaseException as error:
                # Nothing is heard of the others any more: what waits for them has to know.
                self.trouble = f"{type(error).__name__}: {error}"
                self.note_change()
                raise
            else:
                self._silent_since, self.trouble = None, ""

    def _wait_turn(self) -> bool:
        """Waits until there is something to do, or it is time to look."""
        try:
            goes_on = self._inbox.get(timeout=self._pause_seconds)
        except queue.Empty:
            goes_on = True
            self._pause_seconds = min(1.5 * self._pause_seconds, self._longest_pause_seconds)
        else:
            self._pause_seconds = _SHORTEST_PAUSE_SECONDS
        if not self._is_busy():
            self._pause_seconds = _LOOK_SECONDS
        return goes_on
