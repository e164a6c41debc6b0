"""Several workers without a shared disk: nothing but one bucket is common to them."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

from bucket_runs import SEED

from command_line import call
from places import PROGRAMS

SIZE_BYTES = 256 << 20


def run_workers(
    url: str, tmp_path: Path, count: int, *args: object, program: str = "bucket_workers.py"
) -> list[subprocess.CompletedProcess[str]]:
    """Starts the workers, each in a directory of its own, as if on a machine of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = []
    for rank in range(count):
        home = tmp_path / f"machine-{rank}"
        home.mkdir(exist_ok=True)
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HOME": str(home), "TMPDIR": str(home),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, str(PROGRAMS / program), url, *map(str, args)]
        environment = {**os.environ, **variables}
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, cwd=home, env=environment, text=True, stdout=pipe, stderr=pipe))
    ends = [(worker, *worker.communicate(timeout=150)) for worker in workers]
    return [subprocess.CompletedProcess(worker.args, worker.returncode, out, err) for worker, out, err in ends]


def test_workers_killed_anywhere_go_on_as_one_two_or_three(url: str, tmp_path: Path) -> None:
    untouched = run_workers(f"{url}-untouched", tmp_path, 2, 20)
    expected = {worker.stdout for worker in untouched}
    assert len(expected) == 1, [worker.stderr for worker in untouched]
    rng = random.Random(SEED)
    for number, count in enumerate((2, 1, 3)):
        step, rank = rng.randint(4 * number + 5, 4 * number + 7), rng.randrange(count)
        killed = run_workers(url, tmp_path, count, 20, rank, step)
        assert killed[rank].returncode == -9, killed[rank].stderr
        assert all(worker.returncode for worker in killed)
        if number:
            resumed = re.search(r"resumed \S+ at step (\d+)", killed[0].stderr)
            assert resumed, killed[0].stderr
    for worker in run_workers(url, tmp_path, 2, 20):
        assert worker.returncode == 0, worker.stderr
        assert worker.stdout in expected
    assert "whole" in call("verify", url).stdout


def test_four_workers_read_one_copy_of_replicated_state(url: str, tmp_path: Path) -> None:
    run = partial(run_workers, url, tmp_path, 4, program="passing_workers.py")
    saved, restored = run("save"), run("restore")
    assert [worker.returncode for worker in (*saved, *restored)] == [0] * 8, [worker.stderr for worker in restored]
    expected = {worker.stdout.strip() for worker in saved}
    found = [worker.stdout.split() for worker in restored]
    assert {digest for digest, _, _ in found} == expected
    assert sum(int(read_bytes) for _, read_bytes, _ in found) < 1.05 * SIZE_BYTES
    assert sum(int(requests) for _, _, requests in found) < 40
    assert not any("did not pass on" in worker.stderr for worker in restored)
