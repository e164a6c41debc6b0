"""A program, its spare and its supervisor are killed at random moments, and the end is that of an untouched run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS, wait_until
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
import os, time, torch, holdfast
holdfast.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
with holdfast.resumable("run", model=model, optimizer=optimizer, rng=holdfast.RNG(), save_every=10) as run:
    for step in run.steps(1_000_000):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.005)
        print(os.getpid(), step, loss.item().hex(), flush=True)
"""


def has_ready_spare(supervisor: int) -> bool:
    """True if a spare sleeps at many looks in a row: it has imported all."""
    return all(has_sleeping_spare(supervisor) for _ in range(20))


def has_sleeping_spare(supervisor: int) -> bool:
    time.sleep(0.005)
    for child in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        try:
            is_spare = b"import spare as" in Path(f"/proc/{child}/cmdline").read_bytes()
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_spare and state == "S":
            return True
    return False


def test_workers_that_each_supervise_themselves_come_back_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under `srun`: one is killed, and is back before the other one has ended, whose store it must not join."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def read(rank: int) -> list[list[str]]:
        return [line.split() for line in Path(f"out{rank}").read_text().splitlines() if len(line.split()) == 3]

    with ExitStack() as held:
        processes = []
        for rank in range(2):
            out, err = (held.enter_context(Path(f"{name}{rank}").open("wb")) for name in ("out", "err"))
            place = job | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "holdfast", "run", "train.py"]
            processes.append(process := subprocess.Popen(command, env=os.environ | place, stdout=out, stderr=err))
            held.callback(process.wait)
            held.callback(process.kill)
        wait_until(lambda: len(read(1)) > 60 and all(has_ready_spare(process.pid) for process in processes))
        killed, reached, _ = read(1)[-1]
        os.kill(int(killed), signal.SIGKILL)
        wait_until(lambda: all(int(read(rank)[-1][1]) > int(reached) + 20 for rank in range(2)))
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_SECONDS) for process in processes] == [42, 42]
    for rank in range(2):
        assert re.search("; (trains|started) again", Path(f"err{rank}").read_text())
        assert len({pid for pid, _, _ in read(rank)}) >= 2
        losses = {(step, loss) for _, step, loss in read(rank)}
        assert len({step for step, _ in losses}) == len(losses), "a step that was repeated had another loss"
