"""Threads that share out jobs of reading and writing."""

from __future__ import annotations

import _thread
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from holdfast.gate import Gate

_LOOK_SECONDS: Final = 0.05
_START_SECONDS: Final = 5.0


class Crew:
    """A few threads that share out jobs.

    They are started before there is work, since a thread cannot be started any more once the interpreter has begun to
    shut down, which is when a last save may still have to be written.

    All of it may be interrupted at any point, by Ctrl-C say, as long as `close` comes in the end.
    """

    def __init__(self, size: int, name: str) -> None:
        """Starts nothing yet; `start` comes next, and `close` in any case.

        Args:
            size: How many threads there are, and how many work on the jobs of one `run`, its caller among them.
            name: What the threads are called, for debuggers.
        """
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._arrivals = [Gate() for _ in range(size)]
        self._threads = [
            threading.Thread(target=_serve, args=(self._work, arrival), name=f"{name}-{number}", daemon=True)
            for number, arrival in enumerate(self._arrivals)
        ]
        self._size = size
        self._count = 0
        self._started: Gate | None = None

    def __del__(self) -> None:
        # What would have closed it may have been interrupted itself. The threads know the queue alone.
        try:  # noqa: SIM105  At the interpreter's end this module's names, `suppress` say, may be gone.
            self.end()
        except AttributeError:
            pass  # `__init__` may have been interrupted, too.

    def start(self) -> None:
        """**Blocks.** Starts as many of the threads as can be had."""
        started = Gate()
        sign = _Sign()
        lives = weakref.ref(sign)
        # `Thread.start` waits for the thread in Python code, and interrupted there it leaves a lock locked and the
        # thread hanging. Signal handlers run in the main thread only, so another one does it.
        try:
            _thread.start_new_thread(self._start_all, (started, sign))
        except (RuntimeError, MemoryError):
            return  # None can be had any more: the callers of `run` do the work alone.
        del sign
        self._started = started
        # A thread that lacks memory dies unheard: that one too, or one of those for which it would wait for ever.
        end_at = time.monotonic() + _START_SECONDS
        while not started.wait(_LOOK_SECONDS):
            if lives() is None or time.monotonic() > end_at:
                self._started = None
                self._count = sum(arrival.is_open for arrival in self._arrivals)
                return

    def run(self, jobs: Iterable[Callable[[], object]], most_helpers: int = sys.maxsize) -> None:
        """**Blocks.** Does all jobs, in about their order, and returns when each has ended; the caller does its share.

        The first error ends the round: jobs that are not begun by then are left out, and the error is raised.

        Args:
            jobs: What is to be done.
            most_helpers: How many of the threads help at most; the others are left to other rounds.
        """
        share = _Round(iter(jobs))
        for _ in range(min(self._count, self._size - 1, most_helpers)):
            self._work.put(share.work)
        try:
            share.work()
            share.wait()
        except BaseException as error:
            # Ctrl-C between two jobs: the helpers begin no further one.
            share.end(error)
            raise
        if share.error is not None:
            raise share.error

    def try_hand_over(self, work: Callable[[], None]) -> bool:
        """Lets one of the threads do something that takes long, which may call `run` and, as its last act, `close`.

        Returns:
            False if there is no thread; then nothing is done.
        """
        if self._count:
            self._work.put(work)
        return self._count > 0

    def close(self) -> None:
        """**Blocks.** Ends the threads, once they have done what was handed over before; harmless twice."""
        self.end()
        self.join(threading.TIMEOUT_MAX)

    def end(self) -> None:
        """As `close`, but waits for nobody."""
        for _ in range(self._size):
            self._work.put(None)

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the threads to end, which somebody closes."""
        end_at = time.monotonic() + timeout_seconds
        if self._started is not None:
            self._started.wait(timeout_seconds)
        # Where `start` was interrupted, those that come yet find that there is no work.
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(min(end_at - time.monotonic(), threading.TIMEOUT_MAX), 0.0))

    def _start_all(self, started: Gate, _: _Sign) -> None:
        try:
            for thread in self._threads:
                thread.start()
        except (RuntimeError, MemoryError):
            pass  # No more can be had: fewer do the work.
        finally:
            self._count = sum(map(self._has_come, self._threads, self._arrivals))
            started.open()

    def _has_come(self, thread: threading.Thread, arrival: Gate) -> bool:
        """**Blocks** until a thread is at work, or for certain will not be: one that lacks memory dies unheard."""
        while not arrival.is_open and thread.is_alive():
            arrival.wait(_LOOK_SECONDS)
        return arrival.is_open


def _serve(queued: queue.SimpleQueue[Callable[[], None] | None], arrival: Gate) -> None:
    arrival.open()
    while (work := queued.get()) is not None:
        work()
        # It may be what keeps the crew, or a whole save, alive.
        del work


class _Sign:
    """Held by one thread alone, so that it goes when the thread does, whatever has ended that."""


class _Round:
    """One round of jobs. It waits for nobody who has not come, since a thread may have died on the way."""

    def __init__(self, jobs: Iterator[Callable[[], object]]) -> None:
        self.error: BaseException | None = None
        self._jobs = jobs
        # Guards the iterator, the error and the count of jobs that are being done.
        self._lock = threading.Lock()
        self._under_way = 0
        self._is_over = False
        self._ended = Gate()

    def work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001  Whatever it is, the round's caller gets it.
                self.end(error)
            finally:
                self._note_done()

    def end(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def wait(self) -> None:
        """Waits for helpers in the middle of a job; each is one bounded piece of I/O, and maybe a wait for a copy."""
        self._ended.wait(threading.TIMEOUT_MAX)

    def _take(self) -> Callable[[], object] | None:
        with self._lock:
            job = None
            if self.error is None and not self._is_over:
                try:
                    job = next(self._jobs, None)
                except BaseException as error:  # noqa: BLE001  As those of the jobs.
                    self.error = error
            if job is not None:
                self._under_way += 1
                return job
            self._is_over = True
            if not self._under_way:
                self._ended.open()
            return None

    def _note_done(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._is_over and not self._under_way:
                self._ended.open()
