"""The processes of one contender, seen from the process that compares."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from benchmarks.harness.guard import ROOT, Guard, end_group
from benchmarks.harness.memory import Held, MemoryWatch, count_held, held_bytes
from benchmarks.harness.messages import Order, Reply

THREADS: Final = 2
"""How many threads a contender of one process computes with."""

_START_SECONDS: Final = 120.0
_ORDER_SECONDS: Final = 300.0
_CLOSE_SECONDS: Final = 10.0
_LOG_BYTES: Final = 100_000


class ContenderError(Exception):
    """A contender could not carry out an order; its processes are gone."""


class ContenderMissingError(ContenderError):
    """A package that a contender needs is not installed. Its processes live on."""


class Contender:
    """Gives orders to one process, or to the workers of a torchrun job; each order has a time limit.

    Attributes:
        name: Its name.
        directory: Where it writes.
        note: What it has said last besides figures: what it makes durable by itself.
        has_ended: True once it was ended.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        guard: Guard,
        *,
        workers: int = 1,
        threads: int | None = THREADS,
        order_seconds: float = _ORDER_SECONDS,
        passed: Sequence[int] = (),
        count_memory: Callable[[], int] | None = None,
    ) -> None:
        """Starts the processes; call `wait_started` next.

        Args:
            name: Its name.
            directory: Where it writes.
            guard: Ends the processes if this one is killed.
            workers: How many processes there are.
            threads: How many threads each computes with, of several one; None for as many as there are cores.
            order_seconds: No order takes longer, or the contender has failed.
            passed: Descriptors that the process gets.
            count_memory: Counts the memory that is held; by default that of the process and its children. What several
                workers hold is not counted.
        """
        self.name, self.directory = name, directory
        directory.mkdir(parents=True, exist_ok=True)
        self.note = ""
        self.has_ended = False
        self._workers, self._order_seconds, self._guard = workers, order_seconds, guard
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  It lives as long as this object.
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lines: dict[int, _Line] = {}
        job = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads if workers == 1 else 1))
        self._process = subprocess.Popen(
            [sys.executable, *job, "-m", "benchmarks.harness.worker", str(self._listener.getsockname()[1])],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            pass_fds=passed,
            env={**os.environ, **(limits if threads else {})},
            # A group of its own, so that what a peer starts can be ended with it; torchrun gives one to each worker.
            start_new_session=True,
            cwd=ROOT,
        )
        self._groups: set[int] = set()
        self._watch(self._process.pid)
        count = count_memory or partial(held_bytes, self._process.pid)
        self._memory = MemoryWatch(count) if workers == 1 else None
        self._idle_bytes = 0

    def wait_started(self) -> None:
        """**Blocks.** Waits until all processes are there.

        Raises:
            ContenderError: If one of them is not. Then all have been ended.
        """
        deadline = time.monotonic() + _START_SECONDS
        with self._ending():
            while len(self._lines) < self._workers:
                line = self._accept(deadline)
                reply = self._receive(line, deadline, "a process")
                self._watch(reply.pid)
                self._lines[reply.rank] = line

    def send(self, verb: str, **arguments: Any) -> None:
        """Has all processes do something; call `receive` next."""
        message = msgspec.json.encode(Order(verb, arguments))
        with self._ending():
            for line in self._lines.values():
                line.send(message)

    def receive(self, verb: str, seconds: float | None = None) -> list[Reply]:
        """**Blocks.** Waits until all processes have carried out an order.

        Returns:
            Their replies, by rank.

        Raises:
            ContenderMissingError: If something that it needs is not installed.
            ContenderError: If one failed, or took longer than allowed. Then all have been ended.
        """
        with self._ending():
            replies = self._gather(verb, self._order_seconds if seconds is None else seconds)
        if missing := next((reply.missing for reply in replies if reply.missing), ""):
            raise ContenderMissingError(missing)
        self.note = replies[0].note
        return replies

    def order_each(self, verb: str, *, seconds: float | None = None, **arguments: Any) -> list[Reply]:
        """**Blocks.** Has all processes do something. As `send` and `receive`."""
        self.send(verb, **arguments)
        return self.receive(verb, seconds)

    def order(self, verb: str, *, seconds: float | None = None, **arguments: Any) -> dict[str, float]:
        """**Blocks.** Has all processes do something. Raises as `receive` does.

        Returns:
            The measured figures, those of the slowest process; and of a contender of one process `extra_bytes`: how
            much more memory was held meanwhile, at most, than before it was opened.
        """
        with self._memory.watch() if self._memory else nullcontext():
            replies = self.order_each(verb, seconds=seconds, **arguments)
        figures = {key: max(reply.figures[key] for reply in replies) for key in replies[0].figures}
        if self._memory:
            figures["extra_bytes"] = float(max(0, self._memory.peak_bytes - self._idle_bytes))
        return figures

    def open(self, seconds: float | None = None) -> None:
        """**Blocks.** Has it open what is measured, once it has its state. Raises as `receive` does."""
        if self._memory:
            self._idle_bytes = self._memory.count()
        self.order_each("open", seconds=seconds)

    def count_held(self) -> Held:
        """Counts what it holds now: memory beyond that before it was opened, and all descriptors and threads."""
        held = count_held(self._process.pid)
        return Held(max(0, held.size_bytes - self._idle_bytes), held.descriptors, held.threads)

    @property
    def pid(self) -> int:
        """The process, or torchrun."""
        return self._process.pid

    def close(self) -> None:
        """Ends it, in order if it can."""
        try:
            if not self.has_ended and self._process.poll() is None:
                self.order_each("close")
                for line in self._lines.values():
                    line.close()
                self._process.wait(_CLOSE_SECONDS)
        except (ContenderError, subprocess.TimeoutExpired):
            return
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends all of its processes at once; harmless twice."""
        if self.has_ended:
            return  # Their numbers may belong to others by now.
        self.has_ended = True
        for group in self._groups:
            end_group(group)
            self._guard.release(group)
        self._process.wait()
        for line in self._lines.values():
            line.close()
        self._listener.close()

    def read_log(self) -> str:
        """The end of what its processes have printed so far."""
        # Not by a seek, as the processes write at the place where this descriptor is.
        descriptor = self._log.fileno()
        begin = max(0, os.fstat(descriptor).st_size - _LOG_BYTES)
        return os.pread(descriptor, _LOG_BYTES, begin).decode(errors="replace")

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Ends all processes if one fails meanwhile; a connection that broke is a failure as well."""
        try:
            yield
        except OSError as error:
            self.kill()
            raise ContenderError(f"{self.name} has ended: {error}") from None
        except BaseException:
            self.kill()
            raise

    def _gather(self, verb: str, seconds: float) -> list[Reply]:
        """One reply of each; the first failure counts at once, as the others may wait for that process."""
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        while len(replies) < self._workers:
            waiting = {line.socket: rank for rank, line in self._lines.items() if rank not in replies}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, sorted(waiting.values())))
                who = f"ranks {ranks} did not" if self._workers > 1 else f"{self.name} did not"
                raise ContenderError(f"{who} {verb} within {seconds:g} s")
            for one in ready:
                rank = waiting[one]
                who = f"rank {rank}" if self._workers > 1 else self.name
                reply = self._receive(self._lines[rank], deadline, who)
                if reply.error:
                    raise ContenderError(f"{who}: {reply.error}" if self._workers > 1 else reply.error)
                replies[rank] = reply
        return [replies[rank] for rank in sorted(replies)]

    def _accept(self, deadline: float) -> _Line:
        while True:
            ready, _, _ = select.select([self._listener], [], [], 0.5)
            if ready:
                return _Line(self._listener.accept()[0])
            if self._process.poll() is not None:
                raise ContenderError(f"{self.name} could not be started: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ContenderError(f"{self.name} was not there within {_START_SECONDS:g} s")

    def _receive(self, line: _Line, deadline: float, who: str) -> Reply:
        text = line.receive(deadline)
        if not text:
            raise ContenderError(f"{who} has ended: {self._last_words()}")
        return msgspec.json.decode(text, type=Reply)

    def _watch(self, group: int) -> None:
        if group not in self._groups:
            self._groups.add(group)
            self._guard.watch(group)

    def _last_words(self) -> str:
        lines = self.read_log().strip().splitlines()
        return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it printed nothing")


class _Line:
    """The connection to one process."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffered = b""

    def send(self, message: bytes) -> None:
        """One line."""
        self.socket.sendall(message + b"\n")

    def receive(self, deadline: float) -> bytes:
        """One line; empty if the process has ended, or is silent until then."""
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([self.socket], [], [], max(0.0, deadline - time.monotonic()))
            part = self.socket.recv(1 << 16) if ready else b""
            if not part:
                return b""
            self._buffered += part
        line, _, self._buffered = self._buffered.partition(b"\n")
        return line

    def close(self) -> None:
        """Lets the process end."""
        self.socket.close()
