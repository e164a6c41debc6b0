"""Programs that are killed, begun again, and compared with one that was left alone."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import patience
import preloaded

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    """JAX compiles what the processes of a file train once."""
    with tempfile.TemporaryDirectory() as directory:
        variables = {
            "JAX_COMPILATION_CACHE_DIR": directory,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        with mock.patch.dict(os.environ, variables):
            yield


class Life:
    """A program that tells each step in a line, from its start to its end.

    Attributes:
        lines: What it has told.
        last: The last line that it has written, whatever it is.
    """

    def __init__(
        self,
        program: str | Path,
        *options: str | Path,
        preload: tuple[str, ...],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.last = ""
        # A file, so that nothing waits for it to be read.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it goes with this object
        backend = {name: value for name, value in (variables or {}).items() if name == "KERAS_BACKEND"}
        # The interpreter that is forked imports Keras, which looks at the variable then.
        with mock.patch.dict(os.environ, backend):
            popen: Any = functools.partial(preloaded.Popen, preload=preload) if preload else subprocess.Popen
            self.process = popen(
                [sys.executable, str(PROGRAMS / program), *map(str, options)],
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
                start_new_session=True,
            )

    def wait_steps(self, count: int, beginning: str | tuple[str, ...] = '{"step"') -> None:
        """Reads until so many steps are reported, or the program ends."""
        found = 0
        while found < count and (line := patience.read_line(self.process)):
            self._take(line)
            found += line.startswith(beginning)

    def send(self, number: int) -> None:
        """Sends a signal. SIGKILL ends loader workers too, which would hold the pipe for seconds."""
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def end(self) -> int:
        """Reads what is left, and gives the exit code.

        A program that says nothing for long is killed, so that its test fails: pytest ends a process of its own for a
        test that takes too long, with all that this process was to test.
        """
        assert self.process.stdout is not None
        with self.process.stdout:
            while line := patience.read_line(self.process):
                self._take(line)
        return int(self.process.wait(timeout=120))

    def _take(self, line: str) -> None:
        self.last = line
        # The framework prints as well, and a process that was killed may have been in the middle of a line.
        if line.startswith('{"') and line.endswith("}\n"):
            self.lines.append(line)

    @property
    def errors(self) -> str:
        """What it has written to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def first_step(self) -> str:
        """The first line of a step."""
        return next(line for line in self.lines if line.startswith('{"step"'))


def live(program: str | Path, *options: str | Path, preload: tuple[str, ...]) -> Life:
    """A whole life, which ends well."""
    life = Life(program, *options, preload=preload)
    assert life.end() == 0, life.errors
    return life


def join_two() -> tuple[dict[str, str], dict[str, str]]:
    """The variables of the two workers of a job on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return {**job, "RANK": "0", "LOCAL_RANK": "0"}, {**job, "RANK": "1", "LOCAL_RANK": "1"}


def live_together(
    program: str, *options: str | Path, preload: tuple[str, ...], kill_after: int | None = None, ends_with: int = 0
) -> tuple[Life, Life]:
    """Two workers of one job, as torchrun would start them; the second one is killed after so many steps.

    Unless it is, both end with the exit code `ends_with`.
    """
    first, second = (Life(program, *options, preload=preload, variables=variables) for variables in join_two())
    if kill_after is not None:
        second.wait_steps(kill_after)
        second.send(signal.SIGKILL)
    codes = [second.end(), first.end()]
    assert kill_after is not None or codes == [ends_with] * 2, first.errors + second.errors
    assert kill_after is None or all(codes)
    return first, second


def check_same(lives: Sequence[Life], untouched: Life) -> None:
    """Together the lives have told what the untouched one has, nothing else, and the last one ends as it does."""
    expected = set(untouched.lines)
    for number, life in enumerate(lives):
        strange = [line for line in life.lines if line not in expected]
        assert not strange, f"life {number}: {strange[:3]}"
        # The witness says the same of it.
        assert " was repeated with " not in re.sub("was repeated with the same (data|loss)", "", life.errors), (
            life.errors
        )
    assert lives[-1].lines[-1] == untouched.lines[-1]
    assert expected == {line for life in lives for line in life.lines}


def interrupt(begin: Callable[[], Life], signals: Sequence[int], first: int, last: int) -> list[Life]:
    """Lives that follow each other, each ended by a signal after `first` to `last` steps; prints the seed."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201
    moments = random.Random(seed)
    lives = []
    for number in signals:
        life = begin()
        life.wait_steps(moments.randint(first, last))
        life.send(number)
        # It may have come to its end meanwhile.
        assert life.end() in (0, 42 if number == signal.SIGTERM else -number), life.errors
        lives.append(life)
    return lives
