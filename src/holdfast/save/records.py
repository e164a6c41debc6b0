"""The records that pass from one stage of a save to the next: what is requested, the image, the proof."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from holdfast.format.index import Layout
from holdfast.format.names import StepName
from holdfast.process.latch import Latch
from holdfast.state.leaves import Captured


class Origin(msgspec.Struct, frozen=True):
    """Where the next generation of a manager begins.

    Attributes:
        base: The checkpoint that it continues from: the restored one, else the newest that the manager saw when it was
            created. None for the beginning.
        seen_generation: The newest generation of the run at that time; 0 if there was none. A job that has opened a
            newer one since continues from steps that this manager does not know.
        sources: Checkpoints to keep while the manager lives: those that were partly restored, and those that were
            restored by their number, which may be requested again.
        start_from: The step that the program last went back to on request, now or earlier in the lineage, or None.
    """

    base: StepName | None = None
    seen_generation: int = 0
    sources: tuple[StepName, ...] = ()
    start_from: int | None = None


class CalledOffError(Exception):
    """The copy will never be complete, because the save was interrupted; nothing has failed."""


class CopyProgress:
    """**Thread-safe.** Up to which byte an image is complete, from the beginning.

    Copies are made in any order: this is the lowest byte of those that are not made yet.

    Attributes:
        copy_ended: Opens when all copies are made, or never will be.
        completed_at: When they were made, by the monotonic clock.
        error: Why they never will be, or None.
    """

    def __init__(self, begins: Sequence[int] = ()) -> None:
        """`begins` has for each copy, by its number, the lowest byte that it fills; all else is there."""
        self.copy_ended = Latch()
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
        """Starts the copies; if there are none, that ends at once."""
        if not self._begins:
            self.completed_at = time.monotonic()
            self.copy_ended.open()

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
                self.copy_ended.open()
            self._wake()

    def call_off(self) -> None:
        """Prevents further copies. It takes no lock, so that it may be interrupted as well."""
        self._is_called_off = True

    def fail(self, error: BaseException) -> None:
        """Called when the copy will never be complete."""
        with self._lock:
            if not self.copy_ended.is_open:
                self.error = error
                self.copy_ended.open()
            self._wake()

    def wait(self, end: float = math.inf) -> None:
        """**Blocks** until the image is complete up to that byte, exclusive, or whole; raises what ended the copy."""
        latch = Latch()
        with self._lock:
            self._waiting.append((end, latch))
            self._wake()
        latch.wait(threading.TIMEOUT_MAX)
        if self.error is not None:
            raise self.error

    def while_copied(self, jobs: Iterator[Callable[[], object]]) -> Iterator[Callable[[], object]]:
        """Yields jobs as they are requested until all is copied; the rest stay where they are."""
        while not self.copy_ended.is_open and (job := next(jobs, None)) is not None:
            yield job

    def _wake(self) -> None:
        """Wakes waiters whose range is complete."""
        if self._waiting:
            level = math.inf
            if not self.copy_ended.is_open:
                level = self._begins[self._order[self._first]] if self._first < len(self._order) else sys.maxsize
            for end, latch in self._waiting:
                if end <= level:
                    latch.open()
            self._waiting = [(end, latch) for end, latch in self._waiting if end > level]


class Snapshot(msgspec.Struct, frozen=True):
    """One worker's state in host memory, laid out as its data file.

    Attributes:
        layout: The position of each array.
        image: The data file's bytes, padded with zeros to whole blocks.
        state: What was captured, without the arrays and their descriptions.
        copied: Up to where the image is complete.
    """

    layout: Layout
    image: memoryview
    state: Captured
    copied: CopyProgress


class LeftOutError(Exception):
    """All workers skip the save, because one of them could not take part; none has failed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
