"""The process of one contender, seen from the process that compares."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.guard import Guard, end_group
from benchmarks.live import THREADS
from benchmarks.memory import Held, MemoryWatch, count_held, held_bytes
from benchmarks.messages import Order, Reply, Start

_TIMEOUT_SECONDS: Final = 300.0


class ContenderError(Exception):
    """A contender could not do what it was told; its process is gone."""


class ContenderMissingError(ContenderError):
    """What a contender needs is not installed."""


class Contender:
    """Gives orders to a process of its own, and watches its memory; call `wait_ready` first."""

    def __init__(self, start: Start, guard: Guard) -> None:
        self.name = start.contender
        self.directory = Path(start.directory)
        self.directory.mkdir(parents=True)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  It lives as long as the process.
        threads = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=[start.memory] if start.memory >= 0 else [],
            env={**os.environ, **threads},
            # A group of its own, so that what a peer starts can be ended with it.
            start_new_session=True,
            cwd=Path(__file__).parent.parent,
        )
        self._guard = guard
        self._guard.watch(self._process.pid)
        self._send(msgspec.json.encode(start))
        self._idle_bytes = 0
        self._ended = False

    def wait_ready(self) -> str:
        """**Blocks.** Waits until the process has its state; then has it open what is measured.

        Returns:
            What is to be said beside its figures.

        Raises:
            ContenderMissingError: If what it needs is not installed. Then the process has been ended.
            ContenderError: If it failed or took too long. Then the process has been ended.
        """
        try:
            note = self._receive().note
        except BaseException:
            self.kill()
            raise
        self._idle_bytes = held_bytes(self._process.pid)
        self.order(Order(verb="open"))
        return note

    def order(self, order: Order) -> dict[str, float]:
        """**Blocks.** Has something done.

        Returns:
            What the contender has measured, and `extra_bytes`: how much more memory was held meanwhile, at most, than
            before the first order.

        Raises:
            ContenderError: If it failed or took too long. Then the process has been ended.
        """
        watch = MemoryWatch(self._process.pid)
        try:
            with watch.watch():
                self._send(msgspec.json.encode(order))
                figures = self._receive().figures
        except BaseException:
            self.kill()
            raise
        return {**figures, "extra_bytes": float(max(0, watch.peak_bytes - self._idle_bytes))}

    def count_held(self) -> Held:
        """What it holds now beyond what it held before the first order: memory; and descriptors and threads, all."""
        held = count_held(self._process.pid)
        return Held(max(0, held.size_bytes - self._idle_bytes), held.descriptors, held.threads)

    def close(self) -> None:
        """Ends the process, in order if it can."""
        try:
            if self._process.poll() is None:
                self.order(Order(verb="close"))
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(5)
        except (ContenderError, subprocess.TimeoutExpired):
            return
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the process and what it has started, at once; harmless twice."""
        if self._ended:
            return  # Its number may be another's by now.
        end_group(self._process.pid)
        self._process.wait()
        self._ended = True
        self._guard.release(self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def _send(self, message: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(message + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderError(f"{self.name} has ended: {self._last_words()}") from None

    def _receive(self) -> Reply:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT_SECONDS)
        if not ready:
            raise ContenderError(f"{self.name} did not answer within {_TIMEOUT_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise ContenderError(f"{self.name} has ended: {self._last_words()}")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.missing:
            raise ContenderMissingError(reply.missing)
        if reply.error:
            raise ContenderError(reply.error)
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a word"
