"""A program, its spare and its supervisor are killed at random moments, and the end is that of an untouched run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS, killed_after
from places import TESTS
from repetitions import repeated


@pytest.mark.long
def test_kills_of_program_spare_and_supervisor(tmp_path: Path) -> None:
    kills = repeated(40, in_gate=6)
    command = [sys.executable, "-m", "crash.restarts", "--kills", str(kills), "--directory", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost, and nothing left" in done.stdout


WORKER = """
import os, torch, holdfast
holdfast.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.resumable("run", model=model, optimizer=optimizer, rng=holdfast.RNG(), save_every=10) as run:
    for step in run.steps(200):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 55:
            run.manager.wait()  # So that there is something to go on from.
        print(os.getpid(), step, loss.item().hex(), flush=True)
"""


def test_workers_that_each_supervise_themselves_come_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `srun`: one worker is killed, the other one ends with an error, and both go on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "holdfast", "run", "train.py"],
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with ExitStack() as held:
        for process in processes:
            held.callback(process.kill)
            held.enter_context(killed_after(PATIENCE_SECONDS, process))
        assert processes[1].stdout is not None
        before = list(islice(processes[1].stdout, 60))
        os.kill(int(before[0].split()[0]), signal.SIGKILL)
        for process in processes:
            out, err = process.communicate()
            assert process.returncode == 0, err
            assert re.search("; trains again from step [1-9]|; started again", err), err
            losses = {
                tuple(line.split()[1:]) for line in [*(before if process is processes[1] else []), *out.splitlines()]
            }
            assert [step for step, _ in sorted(losses, key=lambda one: int(one[0]))] == [str(n) for n in range(200)]
