"""A training process, or one that `holdfast run` starts again and again, seen from the demo."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from demo.reports import EVIDENCE, REPORTS, Evidence, Report, Settings

_SILENCE_SECONDS: Final = 120.0
_LOG_LINES: Final = 15


class DemoError(Exception):
    """The demo could not be carried out; the message is for the person at the terminal."""


def make_environment() -> dict[str, str]:
    """The variables for another process of the demo, which finds this package wherever it is started."""
    places = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def kill(process: int) -> float | None:
    """**Blocks.** Kills a process without a warning (SIGKILL), and waits until it is dead.

    Returns:
        When it was killed, by the monotonic clock; None if it had ended before.
    """
    try:
        watch = os.pidfd_open(process)
    except ProcessLookupError:
        return None
    try:
        killed_at = time.monotonic()
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        select.select([watch], [], [])
        return killed_at
    except ProcessLookupError:
        return None
    finally:
        os.close(watch)


class Process:
    """A training process, which ends with the block at the latest, and with this process in any case.

    With a directory to save in it runs under `holdfast run`, which starts it again when it is killed. It leads a group
    of its own: Ctrl-C in the terminal does not reach it, and the loader's processes end with it.
    """

    def __init__(self, settings: Settings, files: Path, name: str, directory: Path | None, scratch: str) -> None:
        """Starts it.

        Args:
            settings: What it trains.
            files: Where its log and its evidence go.
            name: What these are called.
            directory: The run's directory; None for a process that saves nothing.
            scratch: Where it has its temporary files, which only the demo can remove when it is killed.
        """
        self._name = name
        self._log = files / f"{name}.log"
        self._evidence = files / f"{name}.json"
        self._lines = b""
        arguments = ["-m", "demo.child", msgspec.json.encode(settings).decode(), str(self._evidence)]
        if directory is not None:
            arguments = ["-m", "holdfast", "run", *arguments, str(directory)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**make_environment(), "TMPDIR": scratch, "XDG_CACHE_HOME": scratch},
            )
        assert self._process.stdout is not None, "it is a pipe"
        self._reports = self._process.stdout.fileno()

    def reports(self) -> Iterator[Report]:
        """What it tells, as it tells it, until it has ended.

        Raises:
            DemoError: If it is silent for too long.
        """
        while True:
            if not select.select([self._reports], [], [], _SILENCE_SECONDS)[0]:
                raise DemoError(f"process {self._name} has been silent for {_SILENCE_SECONDS:.0f} s{self._log_tail()}")
            told = os.read(self._reports, 1 << 16)
            if not told:
                return
            *whole, self._lines = (self._lines + told).split(b"\n")
            for line in whole:
                yield REPORTS.decode(line)

    def kill(self) -> None:
        """**Blocks.** Kills it without a warning (SIGKILL), and all that it has started, and waits until it is gone."""
        if self._process.returncode is None:  # Else its number may be another's by now.
            # Where a process has ended of itself but was not waited for, the system may refuse.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait_evidence(self) -> Evidence:
        """**Blocks.** What it has ended with.

        Raises:
            DemoError: If it has failed.
        """
        try:
            code = self._process.wait(_SILENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(f"process {self._name} does not end{self._log_tail()}") from None
        if code != 0:
            raise DemoError(f"process {self._name} failed with exit code {code}{self._log_tail()}")
        return EVIDENCE.decode(self._evidence.read_bytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "".join(["; the end of its log:", *(f"\n  {line}" for line in lines)]) if lines else ""
