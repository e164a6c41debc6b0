"""How far a snapshot has been copied: what is there already may be written while the rest is still being copied."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from holdfast.concurrency import Latch


class CalledOffError(Exception):
    """The copy will never be complete, since the save was interrupted; nothing has failed."""


class CopyProgress:
    """**Thread-safe.** Up to which byte an image is complete, from the first one on.

    Copies are made in any order: it is the lowest byte of those that are not made yet.

    Attributes:
        ended: Opens when all copies are made, or never will be.
        completed_at: When they were made, by the monotonic clock.
        error: Why they never will be, or None.
    """

    def __init__(self, begins: Sequence[int] = ()) -> None:
        """Everything is there but what some copies bring, which `begin` comes before.

        Args:
            begins: For each copy the lowest byte that it fills; `make` goes by its number in here.
        """
        self.ended = Latch()
        self.completed_at = time.monotonic()
        self.error: BaseException | None = None
        self._is_called_off = False
        self._begins = begins
        self._order = sorted(range(len(begins)), key=begins.__getitem__)
        # Guards all below.
        self._lock = threading.Lock()
        self._made = bytearray(len(begins))
        self._first = 0
        self._waiting: list[tuple[float, Latch]] = []

    def begin(self) -> None:
        """The copies are made from now on; where there are none, that has ended."""
        if not self._begins:
            self.completed_at = time.monotonic()
            self.ended.open()

    def make(self, number: int, copy: Callable[[], object]) -> None:
        """**Blocks.** Makes the copy of that number, unless the save was called off."""
        try:
            if self._is_called_off:
                raise CalledOffError
            copy()
        except BaseException as error:
            self.fail(error)
            raise
        with self._lock:
            self._made[number] = True
            while self._first < len(self._order) and self._made[self._order[self._first]]:
                self._first += 1
            if self._first == len(self._order) and self.error is None:
                self.completed_at = time.monotonic()
                self.ended.open()
            self._wake()

    def call_off(self) -> None:
        """No further copy begins. It takes no lock, so that it may be interrupted as well."""
        self._is_called_off = True

    def fail(self, error: BaseException) -> None:
        """The copy will never be complete."""
        with self._lock:
            if not self.ended.is_open:
                self.error = error
                self.ended.open()
            self._wake()

    def wait(self, end: float = math.inf) -> None:
        """**Blocks** until the image is complete up to that byte, exclusive; by default, until all is copied.

        Raises:
            BaseException: What has ended the copy before.
        """
        latch = Latch()
        with self._lock:
            self._waiting.append((end, latch))
            self._wake()
        latch.wait(threading.TIMEOUT_MAX)
        if self.error is not None:
            raise self.error

    def while_copied(self, jobs: Iterator[Callable[[], object]]) -> Iterator[Callable[[], object]]:
        """As many of the jobs as are taken before all is copied; the others stay where they are."""
        while not self.ended.is_open and (job := next(jobs, None)) is not None:
            yield job

    def _wake(self) -> None:
        """Lets those go on who wait for no more than there is."""
        if self._waiting:
            level = self._find_level()
            for end, latch in self._waiting:
                if end <= level:
                    latch.open()
            self._waiting = [(end, latch) for end, latch in self._waiting if end > level]

    def _find_level(self) -> float:
        if self.ended.is_open:
            return math.inf
        return self._begins[self._order[self._first]] if self._first < len(self._order) else sys.maxsize
