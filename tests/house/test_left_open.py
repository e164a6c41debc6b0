"""A test that leaves something open which hears notices fails, and no later one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from places import SUPPORT

PROGRAM: Final = """
import numpy as np
import holdfast as hf

kept = []

def listen(place):
    manager = hf.CheckpointManager(place, hf.Checkpoint(weights=np.zeros(3)))
    kept.append(hf.PreemptionCheckpointHandler(manager))

def test_one_is_closed(tmp_path):
    listen(tmp_path)
    kept.pop().close()

def test_one_is_left_open(tmp_path):
    listen(tmp_path)

def test_no_other_fails():
    kept.pop().close()
"""


def test_what_hears_notices_and_is_left_open_fails_its_test(tmp_path: Path) -> None:
    (tmp_path / "test_open.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-p", "left_open", "-p", "no:cacheprovider", "-p", "no:xdist", "-rE"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PYTHONPATH"] = str(SUPPORT)
    done = subprocess.run(
        [*command, "test_open.py"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Failed: what hears notices was left open" in done.stdout, done.stdout + done.stderr
    assert "ERROR test_open.py::test_one_is_left_open" in done.stdout
    assert "3 passed, 1 error" in done.stdout
