"""A job of several workers, seen from the process that compares."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.contender import ContenderError, ContenderMissingError
from benchmarks.guard import Guard, end_group
from benchmarks.several_workers.orders import WorkerReply, WorkersOrder

_START_SECONDS: Final = 120.0
_CLOSE_SECONDS: Final = 10.0


class WorkersJob:
    """Starts torchrun, gives orders to all workers, and ends them; each order has a time limit."""

    def __init__(self, name: str, workers: int, guard: Guard) -> None:
        """Starts it; call `wait_ready` next."""
        self.name = name
        self.workers = workers
        self._guard = guard
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  It lives as long as the job.
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lines: dict[int, _Line] = {}
        self._groups: list[int] = []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        self._process = subprocess.Popen(
            [*command, "-m", "benchmarks.several_workers.worker", str(self._listener.getsockname()[1])],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            # A group of its own; torchrun gives one to each worker, too.
            start_new_session=True,
            cwd=Path(__file__).parent.parent.parent,
        )
        self._watch(self._process.pid)

    def wait_ready(self) -> None:
        """**Blocks.** Waits until all workers are there.

        Raises:
            ContenderError: If one of them is not. Then all have been ended.
        """
        deadline = time.monotonic() + _START_SECONDS
        try:
            while len(self._lines) < self.workers:
                line = self._accept(deadline)
                reply = self._receive(line, deadline, "a worker")
                self._watch(reply.pid)
                self._lines[reply.rank] = line
        except BaseException:
            self.kill()
            raise

    def order(self, order: WorkersOrder, most_seconds: float) -> list[WorkerReply]:
        """**Blocks.** Has all workers do something.

        Returns:
            What came of it, by rank.

        Raises:
            ContenderMissingError: If something that it needs is not installed. The job lives on.
            ContenderError: If a worker failed, or took longer than allowed. Then all have been ended.
        """
        deadline = time.monotonic() + most_seconds
        try:
            for line in self._lines.values():
                line.send(msgspec.json.encode(order))
            replies = self._gather(order, deadline, most_seconds)
        except OSError as error:
            self.kill()
            raise ContenderError(f"a worker has ended: {error}") from None
        except BaseException:
            self.kill()
            raise
        if missing := next((reply.missing for reply in replies if reply.missing), ""):
            raise ContenderMissingError(missing)
        return replies

    @property
    def has_ended(self) -> bool:
        """True once it was ended."""
        return not self._groups

    def close(self) -> None:
        """Ends it, in order if it can."""
        for line in self._lines.values():
            line.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all of its processes at once; harmless twice."""
        groups, self._groups = self._groups, []
        for group in groups:
            end_group(group)
            self._guard.release(group)
        if groups:
            self._process.wait()
            for line in self._lines.values():
                line.close()
            self._listener.close()
            self._log.close()

    def _gather(self, order: WorkersOrder, deadline: float, most_seconds: float) -> list[WorkerReply]:
        """One reply of each; the first failure counts at once, as the others may wait for that worker."""
        replies: dict[int, WorkerReply] = {}
        while len(replies) < self.workers:
            waiting = {line.socket: rank for rank, line in self._lines.items() if rank not in replies}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, sorted(waiting.values())))
                raise ContenderError(f"ranks {ranks} did not {order.verb} within {most_seconds:g} s")
            for one in ready:
                rank = waiting[one]
                reply = self._receive(self._lines[rank], deadline, f"rank {rank}")
                if reply.error:
                    raise ContenderError(f"rank {rank}: {reply.error}")
                replies[rank] = reply
        return [replies[rank] for rank in sorted(replies)]

    def _accept(self, deadline: float) -> _Line:
        while True:
            ready, _, _ = select.select([self._listener], [], [], 0.5)
            if ready:
                return _Line(self._listener.accept()[0])
            if self._process.poll() is not None:
                raise ContenderError(f"the workers could not be started: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ContenderError(f"the workers were not there within {_START_SECONDS:g} s")

    def _receive(self, line: _Line, deadline: float, who: str) -> WorkerReply:
        text = line.receive(deadline)
        if not text:
            raise ContenderError(f"{who} has ended: {self._last_words()}")
        return msgspec.json.decode(text, type=WorkerReply)

    def _watch(self, group: int) -> None:
        self._groups.append(group)
        self._guard.watch(group)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "without a word")


class _Line:
    """The connection to one worker."""

    def __init__(self, connection: Any) -> None:
        self.socket: socket.socket = connection
        self._buffered = b""

    def send(self, message: bytes) -> None:
        """One line."""
        self.socket.sendall(message + b"\n")

    def receive(self, deadline: float) -> bytes:
        """One line; empty if the worker has ended, or says nothing until then."""
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))
            part = self.socket.recv(1 << 16) if ready else b""
            if not part:
                return b""
            self._buffered += part
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line

    def close(self) -> None:
        """Lets the worker end."""
        self.socket.close()
