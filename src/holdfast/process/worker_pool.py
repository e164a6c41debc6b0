"""Threads that share jobs of copying, reading and writing."""

from __future__ import annotations

import _thread
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from holdfast.process.latch import Latch

_LOOK_SECONDS: Final = 0.05
_START_SECONDS: Final = 5.0


class WorkerPool:
    """A few threads that share jobs, for as long as their owner lives.

    `concurrent.futures` is not used: it refuses work once the interpreter has begun to shut down, when a last save may
    still have to be written, and it loses jobs if a thread cannot be started.

    Attributes:
        put: Gives the threads something to do. A single call of C, so that no signal handler can raise inside it.
    """

    def __init__(self, size: int, name: str) -> None:
        """Starts nothing yet. The caller of a `run` does a share of its jobs, besides `size` - 1 threads."""
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.put: Callable[[Callable[[], object]], None] = self._work.put
        self._arrivals = [Latch() for _ in range(size)]
        self._threads = [
            threading.Thread(target=_serve, args=(self._work, arrival), name=f"{name}-{number}", daemon=True)
            for number, arrival in enumerate(self._arrivals)
        ]
        self._size = size
        self._count = 0
        # Guards that each is started once: a start may be interrupted, and asked for again.
        self._starting = threading.Lock()

    def __del__(self) -> None:
        # The threads know the queue alone.
        try:  # noqa: SIM105  At the interpreter's end this module's names, `suppress` say, may be gone.
            self.end()
        except AttributeError:
            pass  # `__init__` may have been interrupted.

    def start(self) -> bool:
        """**Blocks.** Starts as many of the threads as possible, unless some run; returns True if there is one."""
        if self._count:
            return True
        started = Latch()
        # Once `sign` is deleted here, only the thread that starts the others holds it: it goes when that thread ends.
        sign = _Sign()
        lives = weakref.ref(sign)
        # `Thread.start` waits for the thread in Python code, and interrupted there it leaves a lock locked and the
        # thread hanging. Signal handlers run in the main thread only, so another one does it.
        try:
            _thread.start_new_thread(self._start_all, (started, sign))
        except (RuntimeError, MemoryError):
            return False  # No thread can be started: the callers of `run` do the work alone.
        del sign
        # A thread that lacks memory dies unheard: that one too, or one of those for which it would wait for ever.
        end_at = time.monotonic() + _START_SECONDS
        while not started.wait(_LOOK_SECONDS):
            if lives() is None or time.monotonic() > end_at:
                self._count = sum(arrival.is_open for arrival in self._arrivals)
                break
        return self._count > 0

    def run(self, jobs: Iterable[Callable[[], object]], most_helpers: int = sys.maxsize) -> None:
        """**Blocks.** Does all jobs, in about their order, and returns when each has ended; the caller does its share.

        The first error ends the round: later jobs are skipped, and the error is raised.
        """
        share = self.begin(jobs, min(self._size - 1, most_helpers))
        try:
            share.work()
        except BaseException as error:
            # Ctrl-C between two jobs: the helpers begin no further one.
            share.end(error)
            raise
        share.wait()

    def begin(self, jobs: Iterable[Callable[[], object]], most_helpers: int = sys.maxsize) -> Round:
        """Like `run`, but only the threads do the jobs, and the caller continues. There must be some: see `start`."""
        share = Round(iter(jobs))
        for _ in range(min(self._count, most_helpers)):
            self._work.put(share.work)
        return share

    def close(self) -> None:
        """**Blocks.** Ends the threads, after their jobs; may be repeated."""
        self.end()
        self.join(threading.TIMEOUT_MAX)

    def end(self) -> None:
        """Like `close`, but waits for nothing."""
        for _ in range(self._size):
            self._work.put(None)

    def join(self, timeout_seconds: float) -> None:
        """**Blocks.** Waits that long for the threads to end."""
        end_at = time.monotonic() + timeout_seconds
        # Where `start` was interrupted, those that come yet find that there is no work.
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(min(end_at - time.monotonic(), threading.TIMEOUT_MAX), 0.0))

    def _start_all(self, started: Latch, _: _Sign) -> None:
        with self._starting:
            try:
                for thread, arrival in zip(self._threads, self._arrivals, strict=True):
                    if not arrival.is_open:
                        thread.start()
            except (RuntimeError, MemoryError):
                pass  # No more threads can be started: fewer do the work.
            finally:
                self._count = sum(map(self._has_come, self._threads, self._arrivals))
                started.open()

    def _has_come(self, thread: threading.Thread, arrival: Latch) -> bool:
        """**Blocks** until a thread is at work, or certainly will not be: one that lacks memory dies without a sign."""
        while not arrival.is_open and thread.is_alive():
            arrival.wait(_LOOK_SECONDS)
        return arrival.is_open


def _serve(queued: queue.SimpleQueue[Callable[[], object] | None], arrival: Latch) -> None:
    arrival.open()
    while (work := queued.get()) is not None:
        try:
            work()
        except BaseException:  # noqa: BLE001  As Python tells it where it ends a thread; this one goes on.
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        # It may be what keeps the pool, or a whole save, alive.
        del work


class _Sign:
    """See `WorkerPool.start`."""


class Round:
    """Some jobs in progress. It waits for no thread that has not come, because that one may have died on the way."""

    def __init__(self, jobs: Iterator[Callable[[], object]]) -> None:
        self._error: BaseException | None = None
        self._jobs = jobs
        # Guards the iterator, the error and the count of jobs that are being done.
        self._lock = threading.Lock()
        self._under_way = 0
        self._is_over = False
        self._ended = Latch()

    def work(self) -> None:
        """**Blocks.** Does jobs as long as there are any."""
        ended = 0
        while True:
            with self._lock:
                self._under_way -= ended
                job = None
                if self._error is None and not self._is_over:
                    try:
                        job = next(self._jobs, None)
                    except BaseException as error:  # noqa: BLE001  As those of the jobs.
                        self._error = error
                if job is None:
                    self._is_over = True
                    # Those who come late must not keep alive what was left undone.
                    self._jobs = iter(())
                    if not self._under_way:
                        self._ended.open()
                    return
                self._under_way += 1
            try:
                job()
            except BaseException as error:  # noqa: BLE001  The round's caller gets any error.
                self.end(error)
            ended = 1

    def end(self, error: BaseException) -> None:
        """Begins no further job."""
        with self._lock:
            self._error = self._error or error

    def wait(self) -> None:
        """**Blocks.** Waits until all jobs have ended; raises the first error."""
        self._ended.wait(threading.TIMEOUT_MAX)
        if self._error is not None:
            raise self._error
