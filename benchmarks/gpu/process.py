"""One part in a process of its own, which cannot hang the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DYING_SECONDS: Final = 10.0
"""How long a killed process may take: one that waits for a device's driver cannot be killed, and is left behind."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a part has ended.

    Attributes:
        state: `done`, `failed`, `crashed` or `timed out`.
        seconds: How long it took.
        text: The end of what it printed.
    """

    state: str
    seconds: float
    text: str


_running: set[int] = set()


def run(command: Sequence[str], env: Mapping[str, str], cwd: Path, limit_seconds: float, log: Path) -> Ended:
    """**Blocks.** Runs a command in a process group of its own, and ends the whole group after the time limit."""
    begun_at = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(child.pid)
        state = "timed out"
        try:
            code = child.wait(limit_seconds)
            state = "done" if code == 0 else "crashed" if code < 0 else "failed"
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also what a part that has ended left behind.
            end_group(child.pid)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_DYING_SECONDS)
            _running.discard(child.pid)
    text = log.read_bytes()[-100_000:].decode(errors="replace")
    if state == "timed out" and child.poll() is None:
        text += "\nthe process could not be ended, and still runs"
    return Ended(state, time.monotonic() - begun_at, text)


def end_group(pid: int) -> None:
    """Kills all processes of a group, if there are any."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_all() -> None:
    """Kills what runs now: the kit itself is to end."""
    for pid in tuple(_running):
        end_group(pid)
