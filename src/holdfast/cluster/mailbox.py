"""The one thread of a worker that writes to the store of the job, and polls it for news.

Other threads need not wait for the store. The training thread posts what to write, and continues at once. Each query
that is repeated is a `Watch`; all watches share the thread.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from holdfast.cluster.polling import NEWS, URGENT_NEWS, Backoff
from holdfast.cluster.protocol import ANSWER_SECONDS
from holdfast.errors import ClosedError, ClusterError, HoldfastError
from holdfast.process.latch import Latch

_CLOSE_SECONDS: Final = 2.0

_ASK_SECONDS: Final = 3.0
"""How long a thread waits for the store's answer, if others must learn of something before it ends."""

_T = TypeVar("_T")


@dataclass(eq=False)
class Watch:
    """A repeated query.

    Attributes:
        look: The query, called in the mailbox's thread; if it raises `HoldfastError`, it is called again.
        pauses: The usual time between two queries.
        is_urgent: True while something is in progress. Then it is queried more often, as in `URGENT_NEWS`.
        on_silence: Called in the mailbox's thread with the seconds without a response, and the error.
    """

    look: Callable[[], object]
    pauses: Backoff = NEWS
    is_urgent: Callable[[], bool] = lambda: False
    on_silence: Callable[[float, str], object] = lambda seconds, error: None
    due_at: float = field(default=0.0, init=False)


class StoreMailbox:
    """**Thread-safe.** Writes what is posted, in order, each until the store has responded, and polls in between.

    Attributes:
        trouble: Why the store cannot be reached; empty if it can.
        changed: Opened when there is something new; another latch has taken its place by then.
    """

    def __init__(self, world_size: int) -> None:
        """Starts the thread; waits for nothing.

        Args:
            world_size: How many workers use the store.
        """
        self.trouble = ""
        self.changed = Latch()
        self._world_size = world_size
        self._urgent = URGENT_NEWS.spread(world_size, 2)
        # Guards that each watch is added and removed once; they are replaced whole, and read without it.
        self._lock = threading.Lock()
        self._watches: tuple[Watch, ...] = ()
        self._writes: deque[Callable[[], object]] = deque()
        self._is_closed = self._is_woken = False
        # Anything in it ends the thread's pause.
        self._inbox: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = Latch()
        self._woken_at = time.monotonic()
        self._silent_since: float | None = None
        try:
            # Unlike `Thread.start` this cannot be interrupted half-way.
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            # No thread can be started: the interpreter shuts down, or the system has no room.
            self.trouble = f"cannot start a thread to query the store: {error}"
            self._ended.open()

    def post(self, write: Callable[[], object]) -> None:
        """Schedules a write, which is repeated until the store has responded; returns at once.

        A write without a response is performed a second time. So it must be a record, not a count.
        """
        self._writes.append(write)
        self._inbox.put(None)

    def ask(self, question: Callable[[], _T]) -> _T | None:
        """**Blocks** for a moment. Posts a question and waits for its answer; returns None if there is none in time."""
        answers: list[_T] = []
        self.post(lambda: answers.append(question()))
        self.wait(lambda: bool(answers), time.monotonic() + _ASK_SECONDS)
        return answers[0] if answers else None

    def watch(self, watch: Watch) -> Watch:
        """Starts a repeated query, and returns it."""
        watch.pauses = watch.pauses.spread(self._world_size)
        with self._lock:
            self._watches = (*self._watches, watch)
        self._inbox.put(None)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Stops a repeated query, but not one in progress. A second call does nothing."""
        with self._lock:
            self._watches = tuple(one for one in self._watches if one is not watch)

    def wake(self) -> None:
        """Lets the thread perform all queries at once."""
        self._is_woken = True
        self._inbox.put(None)

    def notify(self) -> None:
        """Wakes the waiting threads: there is something new."""
        changed, self.changed = self.changed, Latch()
        changed.open()

    def wait(self, holds: Callable[[], bool], end_at: float) -> bool:
        """**Blocks.** Waits until a condition holds, or the store cannot be reached, or the time is over.

        Args:
            holds: The condition, checked whenever there is something new.
            end_at: When the time is over, by the monotonic clock.
        """
        while True:
            changed = self.changed
            if holds():
                return True
            if self.trouble or time.monotonic() >= end_at:
                return False
            changed.wait(NEWS.longest_seconds)

    def close(self) -> None:
        """**Blocks** for a moment. Ends the thread, once it has written what was posted; may be repeated."""
        self._is_closed = True
        self._inbox.put(None)
        self._ended.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        end = "the cluster was closed"
        try:
            is_open = True
            while is_open:
                is_open = self._wait_turn()
                begun_at = time.monotonic()
                try:
                    self._write_all()
                    if is_open:
                        self._look_around()
                except ClosedError:
                    return
                except HoldfastError as error:
                    # A store that hangs is silent from the moment in which it was asked.
                    self._silent_since = self._silent_since or begun_at
                    self._note_silence(time.monotonic(), self._silent_since, error.message)
                else:
                    self._silent_since, self.trouble = None, ""
        except BaseException as error:
            end = f"{type(error).__name__}: {error}"
            raise
        finally:
            # Nothing is written or looked at any more: the threads that wait have to know.
            self.trouble = end
            self.notify()
            self._ended.open()

    def _wait_turn(self) -> bool:
        """Waits until there is something to do; returns False for the last turn."""
        now = time.monotonic()
        due_at = [watch.due_at for watch in self._watches]
        if self._writes:
            due_at.append(now + NEWS.shortest_seconds)
        try:
            self._inbox.get(timeout=max(min(due_at) - now, 0.0) if due_at else None)
        except queue.Empty:
            return True
        if self._is_woken:
            self._is_woken = False
            self._woken_at = time.monotonic()
            for watch in self._watches:
                watch.due_at = self._woken_at
        return not self._is_closed

    def _write_all(self) -> None:
        while self._writes:
            try:
                self._writes[0]()
            except (ClusterError, ClosedError):
                raise
            except HoldfastError:
                pass  # It cannot be written like this, however often it is tried.
            self._writes.popleft()
            self.notify()

    def _look_around(self) -> None:
        for watch in self._watches:
            if watch.due_at <= time.monotonic():
                watch.look()
                self._put_off(watch, time.monotonic())

    def _put_off(self, watch: Watch, now: float) -> None:
        pauses = self._urgent if watch.is_urgent() else watch.pauses
        watch.due_at = now + pauses.pause_seconds(now - self._woken_at)

    def _note_silence(self, now: float, since: float, error: str) -> None:
        for watch in self._watches:
            self._put_off(watch, now)
        if now - since >= ANSWER_SECONDS / 2:
            self.trouble = error
            for watch in self._watches:
                watch.on_silence(now - since, error)
            self.notify()
