"""The gate tells flaky tests from broken ones: a small suite with tests of each kind is run as it runs all tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from places import ROOT, SUPPORT, TESTS
from second_run import MOST_FLAKY

KINDS: Final = {
    "sound": "def test_sound():\n    pass\n",
    "flaky": "def test_flaky(is_first):\n    assert not is_first, 'only once'\n",
    "crashing": "def test_crashing(is_first):\n    if is_first:\n        os.kill(os.getpid(), signal.SIGKILL)\n",
    "broken": "def test_broken():\n    assert False, 'always'\n",
    "always crashing": "def test_always_crashing():\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "skipped later": "def test_skipped_later(is_first):\n    assert not is_first\n    pytest.skip('later')\n",
    "leaving later": "def test_leaving_later(is_first):\n    assert not is_first\n    os._exit(0)\n",
    "malformed": "def test_malformed(\n",
}
"""The text of each test. `is_first` is true the first time that the test runs, in whatever process."""

HEAD: Final = """
import os
import pathlib
import signal
import pytest

@pytest.fixture
def is_first(request):
    mark = pathlib.Path(f"{request.node.path}.mark")
    if mark.exists():
        return False
    mark.touch()
    return True

"""


def run_gate(directory: Path, *kinds: str) -> tuple[int, list[str]]:
    """Runs tests of these kinds by several processes, and judges; gives the exit code and the verdicts."""
    pytest.importorskip("xdist")
    for number, kind in enumerate(kinds):
        (directory / f"test_{number}.py").write_text(HEAD + KINDS[kind])
    (directory / "conftest.py").write_text('pytest_plugins = ("last_words", "second_run")\n')
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PYTHONPATH"] = str(SUPPORT)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=directory,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    first = run("-m", "pytest", "-n2", "-p", "no:cacheprovider", "--outcome-to", "outcome.json")
    assert (directory / "outcome.json").exists(), first.stdout + first.stderr
    judged = run(str(SUPPORT / "second_run.py"), "outcome.json")
    assert judged.stderr == ""
    return judged.returncode, [line for line in judged.stdout.splitlines() if line.startswith(("FLAKY", "BROKEN"))]


@pytest.mark.long
def test_a_run_without_failures_passes(tmp_path: Path) -> None:
    assert run_gate(tmp_path, "sound") == (0, [])


def test_flaky_tests_are_named_with_how_they_failed_and_the_run_passes(tmp_path: Path) -> None:
    code, verdicts = run_gate(tmp_path, "sound", "flaky", "crashing")
    assert code == 0
    assert [verdict.partition(": ")[0] for verdict in sorted(verdicts)] == [
        "FLAKY test_1.py::test_flaky",
        "FLAKY test_2.py::test_crashing",
    ]
    assert "AssertionError: only once" in sorted(verdicts)[0]
    assert "crashed while running 'test_2.py::test_crashing'" in sorted(verdicts)[1]


def test_what_does_not_pass_the_second_time_fails_the_run(tmp_path: Path) -> None:
    code, verdicts = run_gate(tmp_path, "broken", "always crashing", "skipped later", "leaving later", "malformed")
    assert code == 1
    assert [verdict.partition(": ")[0] for verdict in sorted(verdicts)] == [
        "BROKEN test_0.py::test_broken",
        "BROKEN test_1.py::test_always_crashing",
        "BROKEN test_2.py::test_skipped_later",
        "BROKEN test_3.py::test_leaving_later",
        "BROKEN test_4.py",
    ]


@pytest.mark.long
def test_one_broken_test_beside_a_flaky_one_fails_the_run(tmp_path: Path) -> None:
    code, verdicts = run_gate(tmp_path, "flaky", "broken")
    assert code == 1
    assert [verdict.split()[0] for verdict in verdicts] == ["BROKEN", "FLAKY"]


@pytest.mark.long
def test_more_flaky_tests_than_are_borne_fail_the_run(tmp_path: Path) -> None:
    assert run_gate(tmp_path, "sound", *["flaky"] * (MOST_FLAKY + 1)) == (1, [])


def test_a_run_that_has_not_ended_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(SUPPORT / "second_run.py"), str(tmp_path / "none.json")]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert judged.returncode == 1
    assert "not come to its end" in judged.stdout


def test_the_list_of_flaky_tests_is_short_and_says_what_was_found() -> None:
    rows = re.findall(r"^\| `(\S+)::(\w+)` \| *(.*?) *\|$", (TESTS / "flaky.md").read_text(), re.MULTILINE)
    assert len(rows) == (TESTS / "flaky.md").read_text().count("\n| ") - 1, "| `file::test` | what was found |"
    assert len(rows) <= MOST_FLAKY
    for file, test, found in rows:
        assert f"def {test}(" in (ROOT / file).read_text()
        assert found
