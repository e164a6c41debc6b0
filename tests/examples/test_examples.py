"""The examples do what their first lines say: killed and started again, they end as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import preloaded
from holdfast.testing.processes import Workers, python
from patience import PATIENCE_SECONDS, killed_after
from places import EXAMPLES


def train(directory: Path, *, example: str, kill_at: str | None = None) -> list[str]:
    """What an example prints, up to the line at which it is killed."""
    command: list[str | Path] = [sys.executable, EXAMPLES / example, directory]
    # One thread is the fastest for a network of this size, and leaves the others to other tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with preloaded.TrainingPopen(command, env=environment, **pipes) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        lines = []
        with killed_after(PATIENCE_SECONDS, child):
            for line in child.stdout:
                lines.append(line.rstrip())
                if kill_at is not None and line.startswith(kill_at):
                    child.kill()
                    break
            problems = child.stderr.read()
            assert child.wait() == 0 or kill_at is not None, problems
    return lines


def test_an_epoch_job_killed_once_ends_the_same(tmp_path: Path) -> None:
    untouched = train(tmp_path / "untouched", example="epoch_job.py")
    train(tmp_path / "killed", example="epoch_job.py", kill_at="epoch 5, ")
    after = train(tmp_path / "killed", example="epoch_job.py")
    assert untouched[-2] == "began with epoch None, ended with epoch 8"
    # The save of epoch 4 had ended before epoch 5 began. The child may have got further than it was heard.
    assert after[-2] in [f"began with epoch {epoch}, ended with epoch 8" for epoch in (4, 5, 6, 7, 8)]
    assert after[-1] == untouched[-1]
    assert {line for line in after if line.startswith("epoch 8,")} <= set(untouched)


def test_killed_job_resumes_exactly_from_a_dcp_save(tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.9", reason="holdfast.dcp needs torch 2.9")
    untouched = train(tmp_path / "untouched", example="dcp_training.py")
    before = train(tmp_path / "killed", example="dcp_training.py", kill_at="step 200:")
    after = train(tmp_path / "killed", example="dcp_training.py")
    assert untouched[-1].startswith("step 600: loss ")
    assert before == untouched[: len(before)]
    # The save of step 100 had ended before that of step 150 began. The child may have got further than it was heard.
    assert after in [untouched[steps // 50 :] for steps in range(100, 600, 50)]


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_killed_the_job_ends_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def train(workers: Workers, count: int, directory: Path) -> int:
        launch = python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "--max-restarts=1")
        return workers.start([*launch, EXAMPLES / "train_ddp.py", directory], {"OMP_NUM_THREADS": "1"})

    with Workers(tmp_path) as workers:
        untouched = train(workers, 2, tmp_path / "untouched")
        assert workers.wait(240, [untouched]) == [0], workers.report(untouched)
        killed = train(workers, 2, tmp_path / "killed")
        workers.wait_line(killed, "step 700:", PATIENCE_SECONDS)
        pid = re.search(r"worker 1 of 2, process (\d+)", workers.text(killed))
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        assert workers.wait(240, [killed]) == [0], workers.report(killed)
        assert "begins with step" in workers.text(killed).partition("step 700:")[2]
        losses = [
            re.findall(r"^step 5000: loss .*$", workers.text(number), re.MULTILINE) for number in (untouched, killed)
        ]
        assert losses[0] == losses[1] != []
