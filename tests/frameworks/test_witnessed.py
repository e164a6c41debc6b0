"""In each framework, a restart compares what it repeats with what the killed process had done."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from lives import PROGRAMS

FRAMEWORKS = {"lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate", "keras": "keras"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_restart_says_whether_its_steps_are_the_same(tmp_path: Path, framework: str) -> None:
    if find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"needs {FRAMEWORKS[framework]}")
    done = subprocess.run(
        [sys.executable, PROGRAMS / "witnessed_frameworks.py", tmp_path, framework],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    # The save of step 12 may be in progress when the process is killed.
    expected = [
        r"none: WitnessAgreed steps (7|13) to 16 were repeated with the same data and the same loss",
        r"none: exit 0",
        r"data: WitnessDiffers step (7|13) was repeated with other data of ",
        r"data: exit 0",
        r"loss: WitnessDiffers step (7|13) was repeated with the same data, but the loss ",
        r"loss: exit 0",
        *([] if framework == "keras" else [r"size: exit 0"]),
    ]
    lines = [line.removeprefix(f"{framework} ") for line in done.stdout.splitlines() if line.startswith(framework)]
    assert len(lines) == len(expected), done.stdout + done.stderr
    assert all(re.match(one, line) for one, line in zip(expected, lines, strict=True)), lines
