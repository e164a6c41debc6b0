"""A stream of Hugging Face's datasets, taken by `run.batches`, goes on after a kill as if there had been none."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

import preloaded
from places import PROGRAMS

pytest.importorskip("datasets")

PROGRAM = PROGRAMS / "own_loaders.py"


@pytest.mark.parametrize("data", ["datasets", "datasets shuffled", "datasets shuffled in a loader"])
def test_a_killed_run_takes_the_stream_of_an_untouched_one(data: str, tmp_path: Path) -> None:
    def live(name: str, *options: str, code: int = 0) -> None:
        command = [sys.executable, str(PROGRAM), str(tmp_path / f"{name}.run"), str(tmp_path / name), f"--data={data}"]
        preload = (*preloaded.TRAINING, "datasets")
        ended = preloaded.run([*command, *options], capture_output=True, text=True, timeout=60, preload=preload)
        assert ended.returncode == code, ended.stderr

    live("untouched")
    live("killed", "--ends-at=5", "--by=SIGTERM", code=42)
    live("killed", "--ends-at=9", code=-signal.SIGKILL)
    live("killed")
    assert {*(tmp_path / "killed").read_text().splitlines()} == {*(tmp_path / "untouched").read_text().splitlines()}
