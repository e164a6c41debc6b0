"""Watches one trainer by its board, and reports when it hangs; in a process of its own, or in a supervisor."""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.supervise import stacks
from holdfast.supervise.board import ENDED, Board, Reading
from holdfast.supervise.hang import HangVerdict, Limits, decide

_LOOKS: Final = 8
_PAUSES_SECONDS: Final = (0.1, 5.0)
"""A limit is looked at that many times before it is over, within these bounds."""

_MOST_REPORTS: Final = 20
_KEPT_OPEN: Final = 3


class HangWatch:
    """Looks at a board again and again, and finds each hang once."""

    def __init__(self, seen_at: float | None = None) -> None:
        """Begins; `seen_at` is the time of that, None for now."""
        self._seen_at = time.monotonic() if seen_at is None else seen_at
        self._phases = -1
        self._forgiven_seconds = 0.0
        self._reported = -1
        self._restarted = -1

    def look(self, reading: Reading, now: float, pause_seconds: float) -> HangVerdict | None:
        """Returns a hang that was not returned before; None if there is none.

        Args:
            reading: The board.
            now: The time, by `time.monotonic`.
            pause_seconds: How long the caller meant to sleep since the look before. If it was much longer, all
                processes were stopped, by Ctrl-Z say, and that time does not count.
        """
        if reading.phases != self._phases:
            self._phases, self._forgiven_seconds = reading.phases, 0.0
        late = now - self._seen_at - pause_seconds
        if late > max(1.0, pause_seconds):
            self._forgiven_seconds += late
        self._seen_at = now
        verdict = decide(reading, now, self._forgiven_seconds)
        if verdict.restarts and self._restarted != reading.phases:
            self._restarted = self._reported = reading.phases
            return verdict
        if verdict.hangs and self._reported != reading.phases:
            self._reported = reading.phases
            return verdict
        return None


def pause_of(reading: Reading) -> float:
    """**Pure.** Returns how long to sleep until the next look."""
    limits = Limits(*reading.limits[: len(Limits._fields)])
    least = min(limits.least_seconds, limits.unmarked_seconds, limits.first_step_seconds)
    return min(max(least / _LOOKS, _PAUSES_SECONDS[0]), _PAUSES_SECONDS[1])


def report(reading: Reading, verdict: HangVerdict) -> str:
    """**Blocks** for seconds at most. Writes the stacks of all workers of the machine that train in this run.

    Returns:
        What to say: what hangs, and where the stacks are.
    """
    directory, _, rest = reading.text.partition("\n")
    url, _, rank = rest.partition("\n")
    worker = f" of worker {rank}" if rank else ""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = os.path.join(directory, f"{stamp}-{rank or 0}-{reading.pid}.txt")  # noqa: PTH118
    found = f"no progress{worker} of {url} since step {reading.step}: {verdict.reason}"
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)  # noqa: PTH103
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        return f"{found}; the stacks cannot be written to {path}: {error.strerror}"
    try:
        os.write(file, f"{found}\n\n".encode())
        stacks.collect(reading.pid, file, reading)
        for pid, other in sorted(stacks.find_workers(url)):
            if pid != reading.pid:
                os.write(file, b"\n")
                stacks.collect(pid, file, other)
    finally:
        os.close(file)
    return f"{found}; the stacks of all threads are in {path}"


def main(descriptor: int, end: int, pid: int) -> None:
    """The process beside a trainer that no supervisor watches; it ends with the trainer.

    Args:
        descriptor: The board.
        end: A pipe that is closed when the trainer ends, or begins another program.
        pid: The trainer.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():  # A child of the trainer would be one that the trainer did not start.
        os._exit(0)
    _close_all_but(descriptor, end)
    os.chdir("/")
    poll = select.poll()
    poll.register(end, select.POLLIN)
    with suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(pid), select.POLLIN)
    board, watch, left = Board.open(descriptor), HangWatch(), _MOST_REPORTS
    pause = _PAUSES_SECONDS[0]
    while not poll.poll(pause * 1000):
        reading = board.read()
        if reading.pid not in (0, pid) or reading.phase == ENDED:
            return
        verdict = watch.look(reading, time.monotonic(), pause)
        pause = pause_of(reading)
        if verdict is not None and left:
            left -= 1
            _say(pid, f"holdfast: {report(reading, verdict)}")
    return


def _close_all_but(*kept: int) -> None:
    """Closes what was inherited: a pipe or a socket must not seem open for as long as this process lives."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if _is_file(2) else (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if descriptor >= _KEPT_OPEN and descriptor not in kept:
            with suppress(OSError):
                os.close(descriptor)


def _is_file(descriptor: int) -> bool:
    """Returns True for a file, which has one end for all who have inherited it, and no reader who waits for them."""
    with suppress(OSError):
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    return False


def _say(pid: int, text: str) -> None:
    """Writes a line to the trainer's standard error."""
    line = f"{text}\n".encode(errors="backslashreplace")
    with suppress(OSError):
        if _is_file(2):
            os.write(2, line)
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        stream = os.open(f"/proc/{pid}/fd/2", flags)
        try:
            os.write(stream, line)
        finally:
            os.close(stream)
