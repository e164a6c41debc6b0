"""Removes the directory and ends the processes of a run, regardless of how that run ends.

The guard is a process that holds one end of a pipe. When the other end closes, because the process that compares has
ended or was killed, it ends the contenders and all that they have started, and removes what they have written.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).parent.parent.parent

_END_SECONDS: Final = 10.0
_PREFIX: Final = "work-"


class Guard:
    """The guard, seen from the process that compares."""

    def __init__(self, scratch: Path, lock: int) -> None:
        """Starts it.

        Args:
            scratch: The directory to remove at the end.
            lock: The descriptor that says the directory is in use; the guard holds it as well, until it has ended.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.guard", str(scratch)],
            stdin=subprocess.PIPE,
            pass_fds=[lock],
            # Ctrl-C is for the process that compares.
            start_new_session=True,
            cwd=ROOT,
        )

    def watch(self, group: int) -> None:
        """A group of processes is to be ended at the end."""
        self._send(f"watch {group}")

    def release(self, group: int) -> None:
        """A group of processes has ended."""
        self._send(f"release {group}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()


@contextmanager
def open_scratch(out: Path) -> Iterator[tuple[Path, Guard]]:
    """A new directory below `out`, and the guard that removes it; removes those that killed runs have left."""
    out.mkdir(parents=True, exist_ok=True)
    # Two runs that begin at once must not take each other's directory for an old one, before its lock is taken.
    with _locked(out):
        for stale in out.glob(f"{_PREFIX}*"):
            _remove_unused(stale)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=out))
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with Guard(directory, lock) as guard:
            yield directory, guard
    finally:
        os.close(lock)


def _remove_unused(directory: Path) -> None:
    """Removes a directory that neither a run nor its guard holds."""
    try:
        with _locked(directory, fcntl.LOCK_NB):
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        return


@contextmanager
def _locked(directory: Path, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)


def end_group(group: int) -> None:
    """**Blocks.** Kills a group of processes, and waits until none of them runs."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
    # A process that waits for a device's driver cannot be killed, and is left.
    deadline = time.monotonic() + _END_SECONDS
    while _runs(group) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold anything: state, parent, group.
            state, _, own_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # It has ended meanwhile.
        if int(own_group) == group and state not in "ZX":
            return True
    return False


def main(scratch: Path) -> int:
    """Serves until the input ends."""
    groups: set[int] = set()
    for line in sys.stdin:
        verb, group = line.split()
        (groups.add if verb == "watch" else groups.discard)(int(group))
    for group in groups:
        end_group(group)
    shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
