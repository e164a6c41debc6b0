"""A loader of the program's own, taken by `run.batches`, goes on after a kill as if there had been none."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import preloaded
from places import PROGRAMS

PROGRAM = PROGRAMS / "own_loaders.py"
PRELOAD = (*preloaded.TRAINING, "holdfast.integrations.torch.places", "torchdata.stateful_dataloader")


def live(log: Path, *options: str, code: int = 0) -> str:
    """One process of the program, from its start to its end; what it has written to standard error."""
    command = [sys.executable, str(PROGRAM), str(log.with_suffix(".run")), str(log), *options]
    ended = preloaded.run(command, capture_output=True, text=True, timeout=60, preload=PRELOAD)
    assert ended.returncode == code, ended.stderr
    return str(ended.stderr)


def read(log: Path) -> dict[Any, Any]:
    """The lines of a log by what they are about; of each the newest."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found: dict[Any, Any] = {}
    for line in lines:
        if "loss" in line:
            found[line["step"], *line["batch"]] = line
        else:
            found[line.get("evaluated", "end")] = line
    return found


CASES = [
    *((data, "plain") for data in ("plain", "workers", "weighted", "stateful", "generator", "own", "stream")),
    *((data, "plain") for data in ("list", "function", "shuffled", "kept", "resumable", "buckets")),
    *(("plain", loop) for loop in ("validated", "two", "accumulated", "broken", "remade", "steps", "batches")),
    *(("plain", loop) for loop in ("steps first", "batches first", "without end")),
    *((data, "batches first") for data in ("stream", "kept", "function")),
]


@pytest.mark.parametrize(("data", "loop"), CASES)
def test_a_killed_run_takes_the_batches_of_an_untouched_one(data: str, loop: str, tmp_path: Path) -> None:
    last, epochs = (3, 5) if loop == "accumulated" else (5, 3)
    options = (f"--data={data}", f"--loop={loop}", f"--epochs={epochs}")
    live(tmp_path / "untouched", *options)
    killed = tmp_path / "killed"
    live(killed, *options, f"--ends-at={last - 2}", code=-signal.SIGKILL)
    live(killed, *options, f"--ends-at={last}", "--by=SIGTERM", code=42)  # The last step of an epoch.
    live(killed, *options, f"--ends-at={last + 4}", code=-signal.SIGKILL)
    live(killed, *options)
    assert read(killed) == read(tmp_path / "untouched")
