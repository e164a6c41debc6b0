"""A page of shared memory on which a trainer notes what it does, for other processes to read without its help."""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Final, NamedTuple, Self

PHASES: Final = (
    "not begun",
    "starting",
    "restoring",
    "in a step",
    "waiting for data",
    "copying a save",
    "waiting for a save",
    "in the program's own code",
    "leaving",
    "ended",
    "evaluating",
)
"""The phases of a trainer, in words; a phase is an index of these."""

(NONE, STARTING, RESTORE, STEP, DATA, COPY, COMMIT, BETWEEN, LEAVING, ENDED, EVALUATE) = range(len(PHASES))

ENVIRONMENT: Final = "HOLDFAST_BOARD"
"""Names the board that a trainer inherits: `descriptor:pid`, where 0 means the first process that uses it."""

NAME: Final = "holdfast-board"
SIZE_BYTES: Final = 4096
KEPT: Final = 32
"""How many of the newest durations of each phase are kept."""

# The places of all. All but a slot and the text are numbers of 8 bytes, which a store changes as a whole.
_MAGIC: Final = int.from_bytes(b"hfboard1", "little")
_AT_SEQUENCE, _AT_COMMITTED, _AT_BEGUN, _AT_ENDED, _AT_BEAT, _AT_SIGNAL, _AT_THREAD = range(1, 8)
_SLOT: Final = struct.Struct("6q2d")
_SLOTS: Final = (64, 128)
_COUNTS: Final = 192 // 8
_SLOWEST: Final = 288 // 8
_RINGS: Final = 384 // 8
_LIMITS: Final = _RINGS + len(PHASES) * KEPT
_LIMITS_KEPT: Final = 8
_TEXT: Final = (_LIMITS + _LIMITS_KEPT) * 8
MOST_TEXT_BYTES: Final = SIZE_BYTES - _TEXT - 8


class Reading(NamedTuple):
    """The content of a board at one moment. Times are those of `time.monotonic`, which a machine has one of.

    Attributes:
        pid: The trainer's; 0 if none has used the board.
        phase: What it does; an index of `PHASES`.
        step: How many steps of the whole training were complete at the last change.
        phases: How many phases it has entered.
        steps_done: How many steps this process has completed.
        since: When the phase began.
        first_step_at: When the process completed its first step; 0 before that.
        committed: The newest step that this process committed or restored; -1 if none.
        saves_in_flight: How many saves are begun and not over.
        beat: When work within a phase last said that it goes on; 0 if never.
        last: The newest durations of this phase, in seconds, in no order.
        slowest: The longest duration of this phase; 0 if it is the first.
        limits: What the trainer has set for a watchdog; see `decide.Limits`.
        text: What it has set as text.
        dump_signal: The signal at which it writes its stacks; 0 for none.
        dump_thread: The thread that is to get the signal; 0 for any.
    """

    pid: int
    phase: int
    step: int
    phases: int
    steps_done: int
    since: float
    first_step_at: float
    committed: int
    saves_in_flight: int
    beat: float
    last: tuple[float, ...]
    slowest: float
    limits: tuple[float, ...]
    text: str
    dump_signal: int
    dump_thread: int


class Board:
    """The page. One thread of one process calls `enter`; `note_*` may be called by all threads of that process.

    What changes together is in one of two slots: the other one is written, and then a counter says that it is the
    valid one. So a writer that is killed at any point leaves a page that can be read.

    Attributes:
        fd: The descriptor of the page.
        first_spent: The seconds in each phase when this process had completed its first step; empty before.
    """

    def __init__(self, descriptor: int, page: mmap.mmap) -> None:
        self.fd = descriptor
        self._page = page
        self._whole = memoryview(page).cast("q")
        self._real = memoryview(page).cast("d")
        self._phase, self._since, self._first_step_at = NONE, 0.0, 0.0
        self._step = self._phases = self._steps_done = 0
        self._spent = [0.0] * len(PHASES)
        self.first_spent: list[float] = []
        self._pid = 0

    @classmethod
    def create(cls) -> Self:
        """Returns a new board in memory of its own; its descriptor is inherited by forks only.

        Raises:
            OSError: If there is no memory, or the platform has no such files.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this platform has no files in memory")
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, SIZE_BYTES)
            board = cls(descriptor, mmap.mmap(descriptor, SIZE_BYTES))
        except BaseException:
            os.close(descriptor)
            raise
        board.clear()
        return board

    @classmethod
    def open(cls, descriptor: int) -> Self:
        """Returns the board of an inherited descriptor.

        Raises:
            OSError: If it is not one.
        """
        if os.fstat(descriptor).st_size != SIZE_BYTES:
            raise OSError("this is not a board")
        board = cls(descriptor, mmap.mmap(descriptor, SIZE_BYTES))
        if board._whole[0] != _MAGIC:
            raise OSError("this is not a board")
        return board

    def clear(self) -> None:
        """Makes it ready for a new trainer. None may be writing to it."""
        self._page[:] = bytes(SIZE_BYTES)
        self._whole[_AT_COMMITTED] = -1
        self._whole[0] = _MAGIC

    def close(self) -> None:
        """Gives up the page and its descriptor."""
        self._whole.release()
        self._real.release()
        self._page.close()
        os.close(self.fd)

    # The trainer's side.

    def enter(self, phase: int, step: int, *, completed: int = 0, at: float | None = None) -> int:
        """Ends one phase and begins another one.

        Args:
            phase: What begins; an index of `PHASES`.
            step: How many steps of the whole training are complete.
            completed: How many of them were completed just now.
            at: When that is; None for now.

        Returns:
            The phase that has ended.
        """
        now, before, whole, real = time.monotonic() if at is None else at, self._phase, self._whole, self._real
        seconds = now - self._since if self._pid else 0.0
        self._spent[before] += seconds
        if self._pid and not (before == STEP and not self._first_step_at):  # The first step may compile.
            count = whole[_COUNTS + before]
            real[_RINGS + before * KEPT + count % KEPT] = seconds
            whole[_COUNTS + before] = count + 1
            if seconds > real[_SLOWEST + before]:
                real[_SLOWEST + before] = seconds
        self._pid = self._pid or os.getpid()
        if completed:
            self._steps_done += completed
            if not self._first_step_at:
                self._first_step_at, self.first_spent = now, [*self._spent]
        self._phase, self._step, self._since, self._phases = phase, step, now, self._phases + 1
        sequence = whole[_AT_SEQUENCE] + 1
        _SLOT.pack_into(
            self._page,
            _SLOTS[sequence & 1],
            sequence,
            self._pid,
            phase,
            step,
            self._phases,
            self._steps_done,
            now,
            self._first_step_at,
        )
        whole[_AT_SEQUENCE] = sequence
        return before

    def spent(self) -> list[float]:
        """**Thread-safe.** Returns how many seconds this process has been in each phase so far."""
        found, phase, since = [*self._spent], self._phase, self._since
        if self._pid:
            found[phase] += max(time.monotonic() - since, 0.0)
        return found

    def note_beat(self) -> None:
        """Says that the work of this phase goes on."""
        self._real[_AT_BEAT] = time.monotonic()

    def note_saves(self, *, begun: int = 0, ended: int = 0) -> None:
        """Adds saves that were begun, or that are over."""
        self._whole[_AT_BEGUN] += begun
        self._whole[_AT_ENDED] += ended

    def note_committed(self, step: int) -> None:
        """Says that the step is committed, or that it was restored."""
        self._whole[_AT_COMMITTED] = step

    def set_watch(self, limits: tuple[float, ...], text: str, dump_signal: int = 0, dump_thread: int = 0) -> None:
        """Says what a watchdog is to do; text that is too long is cut."""
        for place, value in enumerate(limits):
            self._real[_LIMITS + place] = value
        encoded = text.encode(errors="surrogateescape")[:MOST_TEXT_BYTES]
        self._whole[_TEXT // 8] = 0
        self._page[_TEXT + 8 : _TEXT + 8 + len(encoded)] = encoded
        self._whole[_TEXT // 8] = len(encoded)
        self._whole[_AT_THREAD], self._whole[_AT_SIGNAL] = dump_thread, dump_signal

    # The side of others.

    def read(self) -> Reading:
        """**Thread-safe.** Returns what the board says now, or said when its writer was killed."""
        whole, real = self._whole, self._real
        slot = (0,) * 6 + (0.0,) * 2
        # The slot that the counter names is written again two changes later, so that a second look nearly always
        # suffices; where it never does, the trainer makes progress, and the newest look is good enough.
        for _ in range(100):
            sequence = whole[_AT_SEQUENCE]
            slot = _SLOT.unpack_from(self._page, _SLOTS[sequence & 1])
            if slot[0] == sequence == whole[_AT_SEQUENCE]:
                break
        _, pid, phase, step, phases, steps_done, since, first_step_at = slot
        phase = phase if 0 <= phase < len(PHASES) else NONE
        known, ring = min(whole[_COUNTS + phase], KEPT), _RINGS + phase * KEPT
        size = min(max(whole[_TEXT // 8], 0), MOST_TEXT_BYTES)
        return Reading(
            pid=pid,
            phase=phase,
            step=step,
            phases=phases,
            steps_done=steps_done,
            since=since,
            first_step_at=first_step_at,
            committed=whole[_AT_COMMITTED],
            saves_in_flight=max(whole[_AT_BEGUN] - whole[_AT_ENDED], 0),
            beat=real[_AT_BEAT],
            last=tuple(real[ring : ring + known]),
            slowest=real[_SLOWEST + phase],
            limits=tuple(real[_LIMITS : _LIMITS + _LIMITS_KEPT]),
            text=self._page[_TEXT + 8 : _TEXT + 8 + size].decode(errors="surrogateescape"),
            dump_signal=whole[_AT_SIGNAL],
            dump_thread=whole[_AT_THREAD],
        )
