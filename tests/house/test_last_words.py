"""A worker of pytest that dies leaves why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Final

import pytest

from places import SUPPORT

PROGRAM: Final = """
import os, signal, sys, time
import pytest

@pytest.mark.parametrize("way", ["exits", "crashes", "is killed", "hangs"])
def test_dying(way):
    print("said by a test that", way)
    if way == "exits":
        os._exit(3)
    if way == "hangs":
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGSEGV if way == "crashes" else signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest writes where its workers die, each in another way."""
    pytest.importorskip("xdist")
    directory = tmp_path_factory.mktemp("dying")
    (directory / "test_dying.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "pytest", "-n1", "-p", "last_words", "-p", "no:cacheprovider", "--timeout=2"]
    command += ["--timeout-method=thread", "test_dying.py"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PYTHONPATH"] = str(SUPPORT)
    done = subprocess.run(
        ["sh", "-c", 'ulimit -c 0; exec "$@"', "sh", *command],
        cwd=directory,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "4 failed" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("has ended with exit code 3", ["os._exit(3) was called", "in test_dying", "said by a test that exits"]),
        ("was killed by SIGSEGV", ["Fatal Python error: Segmentation fault", "in test_dying"]),
        ("was killed by SIGKILL", ["It has left no last words"]),
        ("has ended with exit code 1", ["in timeout_timer", "in test_dying"]),
    ],
)
def test_a_worker_of_pytest_that_dies_says_why(report: str, end: str, words: list[str]) -> None:
    told = re.search(rf"= gw\d {end} =+\n(.*?)\n=====", report, re.DOTALL)
    assert told is not None, report
    assert [word for word in words if word not in told[1]] == []
