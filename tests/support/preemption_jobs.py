"""Processes of a job that is sent signals, and jobs of several such processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import preloaded
from patience import PATIENCE_SECONDS, killed_after
from places import PROGRAMS

JOB = PROGRAMS / "preemptible_job.py"
TOTAL = 9


class Job:
    """One process of the job."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        self.directory = directory
        options = {"directory": str(directory), "total": TOTAL, **options}
        self.process: subprocess.Popen[str] = preloaded.Popen(
            [sys.executable, str(JOB), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.said: list[str] = []
        self.errors = ""

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        with killed_after(PATIENCE_SECONDS, self.process):
            for line in self.process.stdout:
                self.said.append(line.strip())
                if line.startswith(word):
                    return
        raise AssertionError(f"it never said {word!r}: {self.end()}\n{self.errors}")

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_for_error(self, text: str) -> None:
        assert self.process.stderr is not None
        with killed_after(PATIENCE_SECONDS, self.process):
            for line in self.process.stderr:
                self.errors += line
                if text in line:
                    return
        raise AssertionError(f"it never wrote {text!r}: {self.errors}")

    def end(self) -> int:
        said, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        self.said += said.splitlines()
        self.errors += errors
        return self.process.returncode


class Jobs:
    """The workers of one job, which meet in a directory. None of them outlives the `with` block."""

    def __init__(self, directory: Path, world_size: int = 2, *, each: Any = None, **options: Any) -> None:
        """Starts them.

        Args:
            directory: The run's.
            world_size: How many.
            each: Options of some workers alone, by rank.
            options: Those of all.
        """
        self.directory = directory
        store = directory.parent / f"store-{os.urandom(4).hex()}"
        self.workers = [
            Job(
                directory,
                {"RANK": str(rank), "WORLD_SIZE": str(world_size)},
                **{"store": str(store), **options, **(each or {}).get(rank, {})},
            )
            for rank in range(world_size)
        ]

    def end(self) -> list[int]:
        """Waits until all have ended; gives their exit codes."""
        return [worker.end() for worker in self.workers]

    def report(self) -> str:
        """What all have said, for people."""
        return "\n".join(f"rank {rank}: {job.said}\n{job.errors}" for rank, job in enumerate(self.workers))

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.communicate(timeout=PATIENCE_SECONDS)
