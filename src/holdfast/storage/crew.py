"""Threads that share out jobs of reading and writing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator


class Crew:
    """A few threads that share out jobs, the calling thread among them.

    They are started before there is work, since a thread cannot be started any more once the interpreter has begun to
    shut down, which is when a last save may still have to be written.
    """

    def __init__(self, size: int, name: str) -> None:
        """Starts nothing yet; `start` comes next, and `close` in any case."""
        self._rounds: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._size = size
        self._name = name
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts `size - 1` threads, or as many as can be had; the caller of `run` is the last of the crew."""
        for number in range(1, self._size):
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True)
            # Noted before it is started: Ctrl-C may come when it runs but `start` has not returned.
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError:
                self._threads.pop()  # No more can be had: the others, or the caller alone, do the work.
                return

    def run(self, jobs: Iterable[Callable[[], None]]) -> None:
        """**Blocks.** Does all jobs, in about their order, and returns when each has ended.

        The first error ends the round: jobs that are not begun by then are left out, and the error is raised.
        """
        share = _Round(iter(jobs), len(self._threads))
        for _ in self._threads:
            self._rounds.put(share.help)
        try:
            share.work()
            share.wait()
        except BaseException as error:
            # Ctrl-C between two jobs: the helpers begin no further one.
            share.end(error)
            raise
        if share.error is not None:
            raise share.error

    def close(self) -> None:
        """**Blocks.** Ends the threads; harmless twice."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._rounds.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def _serve(self) -> None:
        while (work := self._rounds.get()) is not None:
            work()


class _Round:
    """One round of jobs; the lock guards the iterator, the error and the count of helpers that still work."""

    def __init__(self, jobs: Iterator[Callable[[], None]], helpers: int) -> None:
        self.error: BaseException | None = None
        self._jobs = jobs
        self._helpers = helpers
        self._changed = threading.Condition()

    def help(self) -> None:
        try:
            self.work()
        finally:
            with self._changed:
                self._helpers -= 1
                self._changed.notify_all()

    def work(self) -> None:
        while True:
            with self._changed:
                job = next(self._jobs, None) if self.error is None else None
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001  Whatever it is, the round's caller gets it.
                self.end(error)

    def end(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error

    def wait(self) -> None:
        """Waits for helpers in the middle of a job; each job is one bounded piece of I/O."""
        with self._changed:
            self._changed.wait_for(lambda: self._helpers == 0)
