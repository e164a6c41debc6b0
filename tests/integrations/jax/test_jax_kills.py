"""Two processes of JAX that are killed and asked to leave do what two do that are left alone, bit for bit."""

from __future__ import annotations

import random
import signal
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")

import holdfast as hf
import preloaded
from holdfast.testing.processes import Workers, python
from places import PROGRAMS
from repetitions import repeated

STEPS = 240
SIGNALS = [signal.SIGKILL] * repeated(5, in_gate=2) + [signal.SIGTERM] * repeated(2, in_gate=1)
LEFT = hf.TerminationConfig().exit_code
"""The exit code of a job that has saved and left."""


def start(workers: Workers, directory: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for rank in range(2):
        command = python(PROGRAMS / "jax_job.py", address, str(rank), "2", str(STEPS), directory)
        workers.start(command, {"XLA_FLAGS": ""}, preloaded.JaxPopen)


def read_steps(workers: Workers, rank: int) -> dict[int, str]:
    lines = [line.split() for line in workers.text(rank).splitlines()]
    # The last line of a process that was killed may be cut off.
    return {int(words[0]): words[1] for words in lines if len(words) == 2 and len(words[1]) == 64}


@pytest.mark.long
def test_two_processes_killed_and_asked_to_leave_end_as_if_left_alone(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    chosen = random.Random(seed)
    with Workers(tmp_path) as workers:
        start(workers, tmp_path / "untouched-run")
        assert workers.wait(200) == [0, 0], workers.report(0) + workers.report(1)
        untouched = [read_steps(workers, rank) for rank in range(2)]
    assert list(untouched[0]) == list(range(STEPS))
    left_at = None
    for number in (*chosen.sample(SIGNALS, len(SIGNALS)), None):
        with Workers(tmp_path) as workers:
            start(workers, tmp_path / "run")
            if number is not None:
                victim = chosen.randrange(2)
                workers.wait_line(victim, f"after {chosen.randrange(1, 20)} ", 200)
                workers.kill(victim, number)
            if number == signal.SIGKILL:
                workers.kill(1 - victim)
            codes = workers.wait(200)
            if number != signal.SIGKILL:
                assert codes == [0 if number is None else LEFT] * 2, workers.report(0) + workers.report(1)
            found = [read_steps(workers, rank) for rank in range(2)]
        assert all(found[rank].items() <= untouched[rank].items() for rank in range(2))
        if left_at is not None:  # No step is taken again, and none is left out.
            assert [min(steps) for steps in found] == [left_at] * 2
        left_at = None
        if number == signal.SIGTERM:
            left_at = max(found[0]) + 1
            assert max(found[1]) + 1 == left_at
    assert found[0].keys() == found[1].keys() < untouched[0].keys()
    # One process without the others reads what both have written.
    ends = [hf.load(tmp_path / name)["state"] for name in ("untouched-run", "run")]
    assert ends[0]["count"] == STEPS
    assert all((ends[0][name] == ends[1][name]).all() for name in ("w", "moment", "key", "count"))
