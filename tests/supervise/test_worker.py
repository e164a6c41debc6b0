"""`holdfast worker`: workers that a launcher starts, forked from one spare of their node."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from patience import is_alive, wait_until
from places import PROGRAMS


class Client:
    """A worker, as its launcher sees it."""

    def __init__(self, rank: int, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "worker", PROGRAMS / "worker_of_a_launcher.py", Path.cwd()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), **environment},
            start_new_session=True,
        )

    def read_trained(self) -> tuple[int, int]:
        """Waits until it has trained; returns its rank and its process."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["trained"], self.process.stderr.read()
        return int(words[1]), int(words[2])

    def tell(self, code: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(code + "\n")
        self.process.stdin.flush()


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Client]]:
    """Starts clients; at the end all of them are killed, and the spare is asked to end by the loss of its socket."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Paths of sockets are short.
    runtime = Path(tempfile.mkdtemp(prefix="holdfast-"))
    Path("runtime").symlink_to(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    started: list[Client] = []

    def start(rank: int, **environment: str) -> Client:
        started.append(Client(rank, **environment))
        return started[-1]

    yield start
    for client in started:
        with suppress(ProcessLookupError):
            os.killpg(client.process.pid, signal.SIGKILL)
        client.process.communicate()
    shutil.rmtree(runtime)


def find_spare() -> Path | None:
    found = [path for path in Path("runtime").iterdir() if path.is_socket() and not path.suffix]
    return found[0] if found else None


def test_workers_are_forked_and_end_as_their_clients_do(clients: Callable[..., Client]) -> None:
    first = clients(0)
    assert first.read_trained() == (0, first.process.pid)  # A fresh start: the client has become the worker.
    wait_until(lambda: find_spare() is not None)
    spare = find_spare()
    assert spare is not None
    assert spare.stat().st_mode & 0o777 == 0o600
    first.process.kill()

    workers = [clients(rank) for rank in range(4)]
    pids = []
    for rank, worker in enumerate(workers):
        said, pid = worker.read_trained()
        assert said == rank
        assert pid != worker.process.pid
        pids.append(pid)
    # An exit code, a signal, and an error.
    workers[0].tell("sys.exit(7)")
    workers[1].tell("os.kill(os.getpid(), 11)")
    workers[2].process.send_signal(signal.SIGTERM)
    assert workers[0].process.wait(60) == 7
    assert workers[1].process.wait(60) == -signal.SIGSEGV
    assert workers[2].process.communicate(timeout=60)[0] == "heard\n"
    assert workers[2].process.returncode == 5
    # A launcher that kills a client has killed the worker, and all that it had started.
    children = [int(word) for word in Path(f"/proc/{pids[3]}/task/{pids[3]}/children").read_text().split()]
    assert len(children) == 1
    workers[3].process.kill()
    wait_until(lambda: not any(map(is_alive, [pids[3], *children])))


@pytest.mark.long
def test_a_worker_that_cannot_be_forked_is_started_afresh(clients: Callable[..., Client]) -> None:
    first = clients(0)
    first.read_trained()
    wait_until(lambda: find_spare() is not None)
    other = clients(0, OMP_NUM_THREADS="1")
    assert other.read_trained()[1] == other.process.pid
    other.process.kill()
    assert other.process.communicate()[1] == (
        "holdfast: started without the spare: OMP_NUM_THREADS is not what it was when the spare was started\n"
    )


@pytest.mark.long
def test_the_spare_ends_with_its_launcher(clients: Callable[..., Client], tmp_path: Path) -> None:
    launcher = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-m", "holdfast", "worker", {str(PROGRAMS / "worker_of_a_launcher.py")!r},
    {str(tmp_path)!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(worker.stdout.readline(), flush=True)
sys.stdin.readline()
worker.kill()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "0"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("b'trained")
    wait_until(lambda: find_spare() is not None)
    process.communicate("\n", timeout=60)
    wait_until(lambda: not [*Path("runtime").iterdir()])
