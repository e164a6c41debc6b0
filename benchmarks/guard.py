"""Cleans up behind the process that compares, however that ends. `python -m benchmarks.guard`.

It holds one end of a pipe. When the other end closes, be it because the process that compares has ended or because it
was killed, the guard ends the contenders and what they have started, and removes what they have written.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

_END_SECONDS: Final = 10.0


class Guard:
    """The guard, seen from the process that compares."""

    def __init__(self, scratch: Path, lock: int) -> None:
        """Starts it.

        Args:
            scratch: The directory to remove at the end.
            lock: The descriptor that says the directory is in use; the guard holds it as well, until it has ended.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.guard", str(scratch)],
            stdin=subprocess.PIPE,
            pass_fds=[lock],
            # Ctrl-C is for the process that compares.
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )

    def watch(self, group: int) -> None:
        """A group of processes is to be ended at the end."""
        self._tell(f"watch {group}")

    def release(self, group: int) -> None:
        """A group of processes has ended."""
        self._tell(f"release {group}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()


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


def end_group(group: int) -> None:
    """**Blocks.** Kills a group of processes, and waits until none of them runs."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + _END_SECONDS
    while _runs(group) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(group: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # Behind the name, which may hold anything: state, parent, group.
            state, _, own_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # It has ended meanwhile.
        if int(own_group) == group and state not in "ZX":
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
