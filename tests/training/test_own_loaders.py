"""A loader of the program's own, taken by `run.batches`, goes on after a kill as if there had been none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import preloaded
from jobs import find_port
from places import PROGRAMS

PROGRAM = PROGRAMS / "own_loaders.py"
PRELOAD = (*preloaded.TRAINING, "holdfast.integrations.torch.places", "torchdata.stateful_dataloader")


def begin(log: Path, *options: str, **variables: str) -> Any:
    command = [sys.executable, str(PROGRAM), str(log.with_suffix(".run")), str(log), *options]
    environment = {**os.environ, **variables}
    return preloaded.Popen(command, stderr=subprocess.PIPE, text=True, preload=PRELOAD, env=environment)


def end(process: Any, code: int) -> str:
    """Waits for a process; what it has written to standard error."""
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    return str(errors)


def live(log: Path, *options: str, code: int = 0) -> str:
    """One process of the program, from its start to its end."""
    return end(begin(log, *options), code)


def live_together(log: Path, *options: str, codes: tuple[int, int] = (0, 0)) -> str:
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    workers = [begin(log, *options, **job, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    return "".join(end(worker, code) for worker, code in zip(workers, codes, strict=True))


def read(log: Path) -> Mapping[Any, Any]:
    """The lines of a log by what they are about; of each the newest."""
    found: dict[Any, Any] = {}
    for line in map(json.loads, log.read_text().splitlines()):
        key = (line["step"], *line["batch"]) if "loss" in line else line.get("evaluated", "end")
        found[key] = line
    return found


CASES = [
    *((data, "plain") for data in ("plain", "workers", "weighted", "stateful", "own", "stream")),
    *((data, "plain") for data in ("list", "function", "shuffled", "resumable")),
    *(("plain", loop) for loop in ("validated", "two", "accumulated", "broken", "remade", "steps", "batches")),
    *(("generator", loop) for loop in ("steps first", "batches first", "without end")),
    *((data, "batches first") for data in ("stream", "kept", "function")),
]


@pytest.mark.parametrize(("data", "loop"), CASES)
def test_a_killed_run_takes_the_batches_of_an_untouched_one(data: str, loop: str, tmp_path: Path) -> None:
    last, epochs = (3, 5) if loop == "accumulated" else (5, 3)
    options = (f"--data={data}", f"--loop={loop}", f"--epochs={epochs}")
    live(tmp_path / "untouched", *options)
    killed = tmp_path / "killed"
    live(killed, *options, f"--ends-at={last}", "--by=SIGTERM", code=42)  # The last step of an epoch.
    live(killed, *options, f"--ends-at={last + 4}", code=-signal.SIGKILL)
    live(killed, *options)
    assert read(killed) == read(tmp_path / "untouched")


def test_each_of_several_workers_continues_at_its_own_batch(tmp_path: Path) -> None:
    options = ("--data=distributed", "--epochs=2")
    live_together(tmp_path / "untouched", *options)
    live_together(tmp_path / "left", *options, "--ends-at=3", "--by=SIGTERM", codes=(42, 42))
    errors = live(tmp_path / "left", "--data=plain", code=1)
    assert "another number of workers" in errors
    assert "ResumableDataLoader" in errors
    live_together(tmp_path / "left", *options)
    for rank in "01":
        assert read(tmp_path / f"left{rank}") == read(tmp_path / f"untouched{rank}")
