"""Tiers whose farther one is a bucket: jobs are killed, and their machines lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import TESTS
from repetitions import repeated


def test_workers_whose_machines_are_lost_come_back_from_the_bucket(url: str, tmp_path: Path) -> None:
    rounds = repeated(100, in_gate=8)
    command = [sys.executable, "-m", "crash.tiers", "--rounds", str(rounds), "--far", url, "--span", "3"]
    command += ["--directory", str(tmp_path / "crash")]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{rounds} rounds" in done.stdout
