"""Tests that have failed are run once more, each alone: what passes then is flaky, and what fails twice is broken.

pytest --outcome-to FILE
python tests/support/second_run.py FILE

As a plugin of pytest it writes how a run has ended, how many tests have passed, and which have failed and how. A worker
of pytest-xdist that crashes is a failure of the test that it ran. As a program it judges that run, and ends with exit
code 0 if no test is broken and few are flaky. `tests/flaky.md` lists the flaky ones, and what was found about each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest

MOST_FLAKY: Final = 5
"""A run in which more tests fail is not judged any further: it fails."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome-to", metavar="FILE", help="write what has failed, for tests/support/second_run.py")


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("outcome_to")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(file)))


class _Recorder:
    """Notes outcomes as they are reported, in the process that starts the workers."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed = 0
        self._failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed += report.when == "call" and report.passed
        if report.failed:
            self._failed.setdefault(report.nodeid, _describe(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, "it could not be collected")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        outcome = {"exit_code": int(exitstatus), "passed": self._passed, "failed": self._failed}
        self._file.write_text(json.dumps(outcome))


def _describe(report: pytest.TestReport) -> str:
    """How a test has failed, in one line."""
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines()
    what = lines[0 if crash else -1] if lines else "no reason is known"
    return what if report.when in ("call", "???") else f"{report.when}: {what}"


def judge(file: Path) -> int:
    """**Blocks.** Runs again what has failed, and prints what it finds; returns 0 if the run may pass, otherwise 1."""
    outcome = _read(file)
    is_about_tests = outcome["exit_code"] == (pytest.ExitCode.TESTS_FAILED if outcome["failed"] else pytest.ExitCode.OK)
    if not is_about_tests:
        print("pytest has not come to its end, or something else is wrong than tests that fail.")
        return 1
    failed = outcome["failed"]
    if len(failed) > MOST_FLAKY:
        print(f"{len(failed)} tests have failed. More than {MOST_FLAKY} are not run again.")
        return 1
    broken = [name for name in failed if not _passes_alone(name)]
    flaky = [name for name in failed if name not in broken]
    # A process that was killed may have left a line without an end.
    print(f"\n{len(broken)} broken, {len(flaky)} flaky. What is found about a flaky test belongs in tests/flaky.md.")
    for name in broken:
        print(f"BROKEN {name}: {failed[name]}")
    for name in flaky:
        print(f"FLAKY {name}: {failed[name]}")
    return 1 if broken else 0


def _passes_alone(name: str) -> bool:
    """Whether a test passes in a process of its own. It is not enough that the process ends without an error."""
    print(f"Once more, alone: {name}", flush=True)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "outcome.json"
        subprocess.run([sys.executable, "-m", "pytest", name, "--outcome-to", file], check=False)
        outcome = _read(file)
    return bool(outcome["exit_code"] == pytest.ExitCode.OK and outcome["passed"])


def _read(file: Path) -> dict[str, Any]:
    """How a run has ended: as an internal error if it has written nothing."""
    if not file.exists():
        return {"exit_code": pytest.ExitCode.INTERNAL_ERROR, "passed": 0, "failed": {}}
    outcome: dict[str, Any] = json.loads(file.read_text())
    return outcome


if __name__ == "__main__":
    sys.exit(judge(Path(sys.argv[1])))
