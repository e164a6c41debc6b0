"""Up to where a snapshot has been copied: who writes it may begin while the rest is still being copied."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from holdfast.gate import Gate

_LOOK_SECONDS: Final = 1.0


class CalledOffError(Exception):
    """The copy will never be complete, since the save was called off; nobody has failed."""


class Watermark:
    """**Thread-safe.** Up to which byte an image is complete, from the first one on.

    Copies are made in any order: it is the lowest byte of those that are not made yet.
    """

    def __init__(self, begins: Sequence[int] = ()) -> None:
        """Everything is there but what some copies bring.

        Args:
            begins: For each copy the lowest byte that it fills; `make` goes by its number in here.
        """
        self._begins = begins
        self._order = sorted(range(len(begins)), key=begins.__getitem__)
        # Guards all below.
        self._lock = threading.Lock()
        self._made = bytearray(len(begins))
        self._first = 0
        self._waiting: list[tuple[float, Gate]] = []
        self._is_called_off = False
        self._is_complete = not begins
        self._completed_at = time.monotonic()
        self._duty: Callable[[], None] | None = None

    @property
    def completed_at(self) -> float:
        """When they were, by the monotonic clock."""
        return self._completed_at

    def make(self, number: int, copy: Callable[[], object]) -> None:
        """**Blocks.** Makes the copy of that number."""
        copy()
        with self._lock:
            self._made[number] = True
            while self._first < len(self._order) and self._made[self._order[self._first]]:
                self._first += 1
            self._wake()

    def finish(self) -> None:
        """All copies are made, also those that did not go by way of `make`."""
        with self._lock:
            if not self._is_complete:
                self._completed_at = time.monotonic()
                self._is_complete = True
            self._wake()

    def call_off(self) -> None:
        """No further copy will be made; harmless if all are, and twice."""
        with self._lock:
            self._is_called_off = not self._is_complete
            self._wake()

    def wait(self, end: float = math.inf) -> None:
        """**Blocks** until the image is complete up to that byte, exclusive; by default, until `finish` is called.

        Raises:
            CalledOffError: If it never will be.
        """
        gate = Gate()
        with self._lock:
            self._waiting.append((end, gate))
            self._wake()
        # Who calls off may be interrupted in that, again.
        while not gate.wait(_LOOK_SECONDS) and not self._is_called_off:
            pass
        if self._is_called_off:
            raise CalledOffError

    def set_duty(self, duty: Callable[[], None] | None) -> None:
        """Sets what is to be done once all is copied, by whoever writes: what it raises ends the writing."""
        self._duty = duty

    def while_copied(self, jobs: Iterator[Callable[[], object]]) -> Iterator[Callable[[], object]]:
        """As many of the jobs as are taken before all is copied; the others stay where they are."""
        while not self._is_complete and (job := next(jobs, None)) is not None:
            yield job

    def wait_complete(self) -> None:
        """**Blocks** until all is copied, and does the duty unless it is done.

        Raises:
            CalledOffError: If it never will be.
        """
        self.wait()
        with self._lock:
            duty, self._duty = self._duty, None
        if duty is not None:
            duty()

    def _wake(self) -> None:
        """Lets those go on who wait for no more than there is.

        It may be interrupted where it is called by the training thread: then the next call finds them all again.
        """
        if self._waiting:
            level = self._find_level()
            for end, gate in self._waiting:
                if end <= level:
                    gate.open()
            self._waiting = [(end, gate) for end, gate in self._waiting if end > level]

    def _find_level(self) -> float:
        if self._is_complete or self._is_called_off:
            return math.inf
        return self._begins[self._order[self._first]] if self._first < len(self._order) else sys.maxsize
