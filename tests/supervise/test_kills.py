"""A program, its spare and its supervisor are killed at random moments, and the end is that of an untouched run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from places import TESTS
from repetitions import repeated


@pytest.mark.long
def test_kills_of_program_spare_and_supervisor(tmp_path: Path) -> None:
    kills = repeated(40, in_gate=6)
    command = [sys.executable, "-m", "crash.restarts", "--kills", str(kills), "--directory", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost, and nothing left" in done.stdout
