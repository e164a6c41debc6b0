"""Collects from outside what the threads of a process do: their Python stacks, and what the kernel knows of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.supervise.board import NAME, PHASES, Board, Reading

DUMP_NAME: Final = "holdfast-stacks"
"""The file in memory to which a trainer's C code writes the Python stacks."""

_WAIT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.02
_MOST_THREADS: Final = 64
_PROC: Final = Path("/proc")
_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a disk",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, and not waited for",
    "I": "idle",
}


def collect(pid: int, file: int, reading: Reading) -> None:
    """**Blocks** for two seconds at most. Writes what all threads of a trainer do to an open file.

    Args:
        pid: The trainer.
        file: The descriptor to write to.
        reading: Its board, which says how to ask it for its stacks.
    """
    text = f"process {pid}: step {reading.step}, {PHASES[reading.phase]}\n"
    text += f"newest committed step: {reading.committed if reading.committed >= 0 else 'none'}; "
    text += f"saves in progress: {reading.saves_in_flight}\n\n"
    os.write(file, text.encode())
    stacks = _take_stacks(pid, reading)
    os.write(file, (stacks or b"Python stacks: none, the process does not answer\n") + b"\n")
    for thread in _list_threads(pid):
        os.write(file, _describe(thread).encode())


def find_workers(url: str) -> Iterator[tuple[int, Reading]]:
    """Yields the trainers on this machine that the caller may look into and that train in a run."""
    for place in _PROC.glob("[0-9]*"):
        descriptor = _open_memory(int(place.name), NAME)
        if descriptor is None:
            continue
        try:
            board = Board.open(descriptor)
            reading = board.read()
            board.close()
        except OSError:
            continue
        if reading.pid == int(place.name) and reading.text.split("\n")[1:2] == [url]:
            yield reading.pid, reading


def _take_stacks(pid: int, reading: Reading) -> bytes:
    """Has the trainer write its Python stacks, and returns them; nothing if it does not."""
    number = reading.dump_signal
    descriptor = _open_memory(pid, DUMP_NAME)
    if descriptor is None:
        return b""
    try:
        # A process that has begun another program would die of it.
        if not number or not int(_read(_PROC / str(pid) / "status", "SigCgt") or "0", 16) >> (number - 1) & 1:
            return b""
        if _read(_PROC / str(pid) / "status", "State")[:1] in ("T", "t"):
            return b"Python stacks: none, the process is stopped\n"
        before = seen = os.fstat(descriptor).st_size
        _send(pid, reading.dump_thread, number)
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            size = os.fstat(descriptor).st_size
            if size == seen > before:
                break
            seen = size
        return os.pread(descriptor, seen - before, before)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _send(pid: int, thread: int, number: int) -> None:
    """Sends a signal to one thread, so that no call of another one is interrupted; to any if that one has ended."""
    if thread and (_PROC / str(pid) / "task" / str(thread)).exists():
        with contextlib.suppress(ImportError, AttributeError, OSError):
            import ctypes

            if ctypes.CDLL(None).tgkill(pid, thread, number) == 0:
                return
    os.kill(pid, number)


def _open_memory(pid: int, name: str) -> int | None:
    """Returns a descriptor of a file in memory that a process has; None if it has none, or may not be looked into."""
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:{name}"):  # noqa: PTH115
                    return os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pass
    return None


def _list_threads(pid: int) -> list[Path]:
    try:
        return sorted((_PROC / str(pid) / "task").iterdir(), key=lambda one: int(one.name))[:_MOST_THREADS]
    except OSError:
        return []


def _describe(thread: Path) -> str:
    """Returns what the kernel knows of a thread; what it may not be asked is left out."""
    state = _read(thread / "status", "State")[:1]
    facts = [
        f"thread {thread.name} ({_read(thread / 'comm')}): {_STATES.get(state, state)}",
        *(f"{name} {value}" for name in ("wchan", "syscall") if (value := _read(thread / name)) not in ("", "0")),
    ]
    stack = _read(thread / "stack", whole=True)
    return ", ".join(facts) + "\n" + "".join(f"    {line}\n" for line in stack.splitlines())


def _read(path: Path, field: str = "", *, whole: bool = False) -> str:
    """Returns the first line of a file, all of it, or what it has for a field; nothing if it cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    if whole:
        return text
    lines = text.splitlines()
    if not field:
        return lines[0].strip() if lines else ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:")), "")
