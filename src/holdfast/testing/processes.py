"""Real processes as the workers of a job: started together, watched, and always ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

_LOOK_SECONDS: Final = 0.01

_REAPED_SECONDS: Final = 60.0
"""How long a killed process may take to be gone; one that hangs in the kernel is not waited for longer."""

_SHOWN_CHARACTERS: Final = 4000


_MARK: Final = "HOLDFAST_TESTING_WORKERS"
"""A variable that all of them have, and what they start: a launcher's children have groups of their own."""


class Workers:
    """Some processes, each with its output in files. Leaving the `with` block kills what still runs, and theirs."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="workers-", dir=directory))
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    ) -> int:
        """Starts one more, with these variables besides those of this process; returns its number, from 0."""
        number = len(self._processes)
        with self._path(number, "out").open("wb") as out, self._path(number, "err").open("wb") as err:
            self._processes.append(
                popen(
                    [str(part) for part in command],
                    env={**os.environ, _MARK: str(self._directory), **(environment or {})},
                    stdout=out,
                    stderr=err,
                    stdin=subprocess.DEVNULL,
                    # A signal for all of them, a launcher's children too, is to reach no others.
                    start_new_session=True,
                )
            )
        return number

    def wait_said(self, number: int, key: str, timeout_seconds: float) -> Any:
        """**Blocks.** Waits until a process has printed a record, a line of JSON, with that key; returns its value.

        Raises:
            AssertionError: If it does not, or ends before.
        """
        end_at = time.monotonic() + timeout_seconds
        while True:
            ended = self._processes[number].poll() is not None
            for record in self.records(number):
                if key in record:
                    return record[key]
            if ended or time.monotonic() > end_at:
                raise AssertionError(f"process {number} has not said {key!r}\n{self.report(number)}")
            time.sleep(_LOOK_SECONDS)  # It prints into a file, which cannot be waited for.

    def wait_line(self, number: int, beginning: str, timeout_seconds: float) -> None:
        """**Blocks.** Waits until a process has printed a line with that beginning.

        Raises:
            AssertionError: If it does not, or ends before.
        """
        end_at = time.monotonic() + timeout_seconds
        while not any(line.startswith(beginning) for line in self.text(number).splitlines()):
            if self._processes[number].poll() is not None or time.monotonic() > end_at:
                raise AssertionError(f"process {number} has not printed {beginning!r}\n{self.report(number)}")
            time.sleep(_LOOK_SECONDS)  # As above.

    def wait(self, timeout_seconds: float, numbers: Sequence[int] | None = None) -> list[int]:
        """**Blocks.** Waits until these processes, or all, have ended.

        Returns:
            Their exit codes; for a process that a signal has killed its number, negative.

        Raises:
            AssertionError: If one still runs when the time is up.
        """
        end_at = time.monotonic() + timeout_seconds
        codes = []
        for number in range(len(self._processes)) if numbers is None else numbers:
            try:
                codes.append(self._processes[number].wait(max(end_at - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"process {number} still runs\n{self.report(number)}") from None
        return codes

    def kill(self, number: int, signal_number: int = signal.SIGKILL) -> None:
        """Sends one of them a signal."""
        self._processes[number].send_signal(signal_number)

    def pid(self, number: int) -> int:
        """Returns the process's number for the system."""
        return self._processes[number].pid

    def records(self, number: int) -> list[dict[str, Any]]:
        """Returns the records of a process: each whole line that is a JSON object."""
        records = []
        for line in self._path(number, "out").read_bytes().split(b"\n")[:-1]:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    records.append(record)
        return records

    def text(self, number: int) -> str:
        """Returns the standard output of a process."""
        return self._path(number, "out").read_text(errors="replace")

    def errors(self, number: int) -> str:
        """Returns the standard error of a process."""
        return self._path(number, "err").read_text(errors="replace")

    def report(self, number: int) -> str:
        """Returns what a person needs to see of a process that failed."""
        out = self.text(number)
        code = self._processes[number].poll()
        return (
            f"process {number}, exit code {code}\n"
            f"{out[-_SHOWN_CHARACTERS:]}\n{self.errors(number)[-_SHOWN_CHARACTERS:]}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The number of one that has ended goes to no new process while its group has members: who has it is a stranger.
        ended = {process.pid for process in self._processes if process.poll() is not None}
        strangers = ended.intersection(_running())
        for process in self._processes:
            if process.pid not in strangers:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(_REAPED_SECONDS)
        mark = f"{_MARK}={self._directory}".encode()
        # Again, as long as one may have started another before it was killed.
        while left := [pid for pid in _running() if mark in _environment_of(pid)]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_SECONDS)  # They are not children of this process, which so cannot wait for them.

    def _path(self, number: int, kind: str) -> Path:
        return self._directory / f"{number}.{kind}"


def _running() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _environment_of(pid: int) -> list[bytes]:
    """Returns the environment of a process; nothing if it has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def python(*arguments: str | Path) -> list[str | Path]:
    """The command that runs this Python."""
    return [sys.executable, *arguments]
