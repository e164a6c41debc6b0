"""`holdfast init`: where the script goes, what is said, and what is never overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import call, complaint
from holdfast.cli.exit_codes import ExitCode


def test_init_writes_the_script_and_says_how_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("init")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("run it: python train.py; kill it")
    assert "python train.py\n" in (tmp_path / "train.py").read_text()
    said = json.loads(call("init", "ddp", "--output", "my jobs/job.py", "--json").stdout)
    assert said["command"] == "torchrun --standalone --nproc-per-node 2 --max-restarts 10 'my jobs/job.py'"
    assert said["command"] in (tmp_path / "my jobs" / "job.py").read_text()


def test_file_that_exists_is_overwritten_with_force_only(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("mine")
    code, text = complaint("init", "--output", str(file))
    assert (code, file.read_text()) == (ExitCode.USAGE, "mine")
    assert "exists already" in text
    assert "--force" in text
    assert call("init", "--output", str(file), "--force").exit_code == 0
    assert "holdfast.resumable(" in file.read_text()


@pytest.mark.parametrize("output", ["", "train.py/x.py"])
def test_output_in_a_wrong_place_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "train.py").touch()
    code, text = complaint("init", "--output", str(tmp_path / output), "--force")
    assert code == ExitCode.USAGE
    assert "cannot write" in text
