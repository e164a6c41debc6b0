"""A process that uses a bucket forks, as DataLoader does for its workers."""

from __future__ import annotations

import subprocess
import sys

import holdfast
from places import PROGRAMS


def test_forks_harm_neither_the_run_nor_the_child(url: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "bucket_forks.py", url], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("children 0 0") == 4
    assert "a worker was killed" in done.stdout
    assert "uploaded True" in done.stdout
    # A child that would use the bucket could only hang.
    assert done.stdout.count("this process was forked from one that has used a bucket") == 3
    assert (holdfast.load(f"{url}/run")["model"]["bias"] == 3).all()
