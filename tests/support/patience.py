"""How long tests wait for processes: long, and not for ever."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 120.0
"""After so long a process that says nothing is killed."""


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kills the process if the block takes longer: as a platform does, and so that nobody reads from it for ever."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints; empty if it ends, or says nothing until it is killed."""
    assert process.stdout is not None
    with killed_after(PATIENCE_SECONDS, process):
        return process.stdout.readline()


def wait_until(is_true: Callable[[], bool]) -> None:
    """Looks again and again, as no file says when a process has ended."""
    end_at = time.monotonic() + PATIENCE_SECONDS
    while not is_true():
        assert time.monotonic() < end_at
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """True if a process runs: one that has ended and is not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
