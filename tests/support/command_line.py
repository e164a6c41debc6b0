"""Runs the command `holdfast`, as a program and within this process, and makes runs for it to look at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner, Result

import holdfast as hf
import preloaded
from holdfast.cli.main import holdfast
from places import PROGRAMS

PROGRAM: Final = Path(sys.executable).with_name("holdfast")
DATA: Final = "data-00000-of-00001.safetensors"
INDEX: Final = "index-00000-of-00001.json"
FIRST_300: Final = "step-000000300.g0001"
NEWEST: Final = "step-000000300.g0002"

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `make_run`, which no test changes."""
    return make_run(tmp_path_factory.mktemp("made") / "gpt")


@pytest.fixture
def run(made_run: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(made_run, tmp_path / "gpt"))


@contextmanager
def after_first_return(function: Callable[..., Any], act: Callable[[], object]) -> Iterator[None]:
    """Lets something happen in the very moment in which a function returns for the first time."""
    acts = [act]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "return" and acts:
            acts.pop()()
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
    assert not acts, "the function was not called"


@contextmanager
def job_that_cannot_be_joined() -> Iterator[dict[str, str]]:
    """What the environment says in a job whose store cannot be opened: whoever tries to join it fails at once."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        yield {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def lines_of(text: str) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in text.splitlines()]


def complaint(*arguments: str | Path) -> tuple[int, str]:
    """The exit code and the words of a verb that writes nothing but an error."""
    result = call(*arguments)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.exit_code, result.stderr


def call(*arguments: str | Path) -> Result:
    """Runs the command in this process, with its output in a pipe."""
    return CliRunner().invoke(holdfast, [str(argument) for argument in arguments], prog_name="holdfast")


def call_json(*arguments: str | Path, exit_code: int = 0) -> dict[str, Any]:
    """The document that a verb writes."""
    result = call(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def run_program(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the installed program."""
    return subprocess.run(
        [PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def run_python(
    program: str, *arguments: str, preload: tuple[str, ...] | None = preloaded.HOLDFAST
) -> subprocess.CompletedProcess[str]:
    """Runs a program text, which may be indented, in a Python process of its own; a fresh one if `preload` is None."""
    run: Any = subprocess.run if preload is None else partial(preloaded.run, preload=preload)
    done: subprocess.CompletedProcess[str] = run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done


def run_file(
    name: str, *arguments: str | Path, preload: tuple[str, ...] | None = preloaded.HOLDFAST
) -> subprocess.CompletedProcess[str]:
    """Runs a program of `tests/programs` in a Python process of its own; a fresh one if `preload` is None."""
    run: Any = subprocess.run if preload is None else partial(preloaded.run, preload=preload)
    done: subprocess.CompletedProcess[str] = run(
        [sys.executable, str(PROGRAMS / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done


@dataclass(frozen=True, slots=True)
class Shown:
    """What a terminal got: as it came, and without what steers the terminal."""

    exit_code: int
    raw: str
    output: str = ""

    @property
    def text(self) -> str:
        return _CONTROLS.sub("", self.raw)


class Terminal:
    """The installed program on a terminal of its own."""

    def __init__(
        self,
        *arguments: str | Path,
        columns: int = 100,
        environment: Mapping[str, str] = {},
        pipe_output: bool = False,
        working_directory: Path | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
        self.process = subprocess.Popen(
            [PROGRAM, *arguments],
            stdin=slave,
            stdout=subprocess.PIPE if pipe_output else slave,
            stderr=slave,
            env={**inherited, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment},
            start_new_session=True,
            cwd=working_directory,
        )
        os.close(slave)
        self._seen = b""

    def read_until(self, text: str) -> None:
        """Reads until the program has written a text."""
        while text.encode() not in self._seen:
            assert self._read(), f"{text!r} never came: {self._seen!r}"

    def write(self, text: str) -> None:
        """Types something."""
        os.write(self._master, text.encode())

    def finish(self) -> Shown:
        """Reads the rest and waits for the program to end."""
        while self._read():
            pass
        output = self.process.communicate(timeout=60)[0] if self.process.stdout else b""
        os.close(self._master)
        return Shown(self.process.wait(60), self._seen.decode(), output.decode())

    def _read(self) -> bytes:
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # What Linux says when nobody has the other end any more.
            data = b""
        self._seen += data
        return data


def show_on_terminal(*arguments: str | Path, **options: Any) -> Shown:
    """Runs the installed program on a terminal, to its end."""
    return Terminal(*arguments, **options).finish()


def make_objects(epoch: int) -> dict[str, Any]:
    """Some state: arrays of several sizes, and plain values."""
    generator = np.random.default_rng(epoch)
    layers = {f"layers.{place}.weight": generator.standard_normal((40, 25)) for place in range(12)}
    return {
        "model": {"embedding": np.ones((300, 10), np.float32), **layers},
        "optimizer": {"lr": 1e-3, "betas": (0.9, 0.99), "moments": [np.zeros(5), np.ones((2, 0))]},
        "epoch": epoch,
    }


def make_run(directory: Path) -> Path:
    """A run that was begun, and went on from an earlier step once.

    Steps 100 and 200 by generation 1 and 250 and 300 by generation 2 are its current lineage; step 300 of generation 1
    lies off it.
    """
    with hf.CheckpointManager(directory, hf.Checkpoint(**make_objects(1))) as manager:
        for step in (100, 200, 300):
            manager.save(
                step, metrics={"val_loss": 3 - step / 200}, metadata={"note": f"after {step}", "git": {"dirty": True}}
            )
    with hf.CheckpointManager(directory, hf.Checkpoint(**make_objects(1))) as manager:
        manager.restore(200)
        for step in (250, 300):
            manager.save(step, metrics={"val_loss": 2.5 - step / 400, "accuracy": step / 1000})
    return directory


def flip_bit(path: Path, offset_bytes: int) -> None:
    """Changes one bit of a file; a negative offset counts from its end."""
    with path.open("r+b") as file:
        file.seek(offset_bytes, os.SEEK_SET if offset_bytes >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
