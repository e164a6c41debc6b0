"""`holdfast list` of many runs, and errors as JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import NEWEST, call, call_json, complaint, lines_of, show_on_terminal
from holdfast.cli.exit_codes import ExitCode
from places import PROGRAMS


@pytest.fixture
def runs(run: Path, tmp_path: Path) -> Path:
    """A directory of three runs, one of them two levels down and one without a checkpoint, and of other things."""
    place = tmp_path / "runs"
    shutil.copytree(run, place / "gpt")
    shutil.copytree(run, place / "sweep" / "seed 1")
    shutil.rmtree(place / "sweep" / "seed 1" / NEWEST)
    (place / "begun" / "generations").mkdir(parents=True)
    (place / "notes").mkdir()
    (place / "notes" / "readme.txt").write_text("x")
    (place / ".hidden").mkdir()
    shutil.copytree(run, place / ".hidden" / "gpt")
    return place


def test_list_of_a_directory_of_runs_is_a_table(runs: Path) -> None:
    result = call("list", runs)
    assert result.exit_code == 0
    heading, *rows = lines_of(result.stdout)
    assert heading == ["RUN", "STEP", "COMMITTED", "STEPS", "BYTES", "WORKERS", "STATE", "val_loss", "accuracy"]
    assert [row[0] for row in rows] == [f"{runs}/begun", f"{runs}/gpt", f"{runs}/sweep/seed_1"]
    assert {len(row) for row in rows} == {len(heading)}
    assert [row[1] for row in rows] == ["-", "300", "250"]
    assert [row[3] for row in rows] == ["0", "4", "3"]
    assert rows[0][6] == "empty"
    assert rows[1][7:] == ["1.75", "0.3"]
    files = sum(path.stat().st_size for path in (runs / "gpt").glob("step-*/*-*"))
    assert int(rows[1][4]) == files


def test_several_directories_are_a_table_of_runs(runs: Path) -> None:
    named = call("list", runs / "gpt", runs / "sweep", runs / "notes")
    assert named.exit_code == 0
    assert [row[0] for row in lines_of(named.stdout)[1:]] == [f"{runs}/gpt", f"{runs}/sweep/seed_1"]
    code, said = complaint("list", runs / "notes", runs / ".hidden" / "none")
    assert code == ExitCode.NOTHING_THERE
    assert "there is no run in" in said


def test_list_distinguishes_damaged_runs(runs: Path) -> None:
    (runs / "gpt" / NEWEST / "data-00000-of-00001.safetensors").unlink()
    for manifest in (runs / "sweep" / "seed 1").glob("step-*/manifest.json"):
        manifest.unlink()
    (runs / "begun" / "generations").rmdir()
    (runs / "begun" / "step-000000001.g0001").mkdir()
    listed = call("list", runs)
    states = {Path(row[0]).name: row[6] for row in lines_of(listed.stdout)[1:]}
    assert states == {"begun": "empty", "gpt": "damaged", "seed_1": "lost"}
    assert f"damaged {runs}/gpt: {NEWEST}/data-00000-of-00001.safetensors is missing" in listed.stderr
    document = call_json("list", runs)
    assert [one["state"] for one in document["runs"]] == ["empty", "damaged", "lost"]
    assert document["error"] is None


def test_a_job_that_runs_is_shown_as_running(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "saves_and_waits.py"), str(tmp_path / "runs" / "alive")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "saved\n"
            (alive,) = call_json("list", tmp_path / "runs")["runs"]
            assert (alive["state"], alive["newest_step"], alive["process"]) == ("running", 1, job.pid)
        finally:
            job.send_signal(signal.SIGKILL)
            job.wait(60)
    (dead,) = call_json("list", tmp_path / "runs")["runs"]
    assert (dead["state"], dead["newest_step"]) == ("ok", 1)


def test_a_terminal_shows_runs_as_wide_as_it_is(runs: Path) -> None:
    wide = show_on_terminal("list", runs, columns=180)
    assert wide.exit_code == 0
    assert "val_loss" in wide.text
    assert "3 runs" in wide.text
    narrow = show_on_terminal("list", ".", columns=60, working_directory=runs)
    assert "not shown: steps, size (a wider terminal, or --json)" in narrow.text
    assert "\nsweep/seed 1 " in narrow.text
    assert max(map(len, narrow.text.splitlines())) <= 60, narrow.text


def test_a_verb_that_wants_one_run_names_those_that_are_there(runs: Path) -> None:
    for verb in ("show", "verify", "prune"):
        code, said = complaint(verb, runs)
        assert code == ExitCode.NOTHING_THERE
        assert f"It holds runs: {runs}/begun, {runs}/gpt, {runs}/sweep/seed 1. Name one of them." in said


# Errors as JSON.


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "verb"),
    [
        (("show", "nowhere", "--json"), ExitCode.NOTHING_THERE, "NoCheckpointError", "show"),
        (("verify", "--json", "nowhere"), ExitCode.NOTHING_THERE, "NoCheckpointError", "verify"),
        (("prune", "nowhere", "--json"), ExitCode.NOTHING_THERE, "NoCheckpointError", "prune"),
        (("diff", "x", "--json"), ExitCode.USAGE, "UsageError", "diff"),
        (("show", "x", "--depth", "-1", "--json"), ExitCode.USAGE, "UsageError", "show"),
        (("lst", "--json"), ExitCode.USAGE, "UsageError", "lst"),
        (("import", "nowhere", "out", "--json"), ExitCode.NOTHING_THERE, "NoCheckpointError", "import"),
        (("export", "nowhere", "out", "--json"), ExitCode.USAGE, "UsageError", "export"),
    ],
)
def test_an_error_is_json_too(arguments: tuple[str, ...], code: int, kind: str, verb: str) -> None:
    result = call(*arguments)
    assert result.exit_code == code
    document = json.loads(result.stdout)
    assert (document["holdfast"], document["version"]) == (verb, 1)
    assert (document["error"]["kind"], document["error"]["exit_code"]) == (kind, code)
    assert document["error"]["message"] in " ".join(result.stderr.split())
    assert set(document["error"]) == {"kind", "exit_code", "message", "hint"}


def test_damage_is_json_with_its_exit_code(run: Path) -> None:
    (run / NEWEST / "index-00000-of-00001.json").unlink()
    result = call("show", run, "--json")
    assert result.exit_code == ExitCode.DAMAGED
    assert json.loads(result.stdout)["error"]["kind"] == "DamageError"


def test_a_document_that_succeeds_has_no_error(run: Path) -> None:
    for arguments in (("list", run), ("show", run), ("verify", run), ("prune", run, "--off-line", "--dry-run")):
        assert call_json(*arguments)["error"] is None


def test_after_two_dashes_json_is_a_name(run: Path) -> None:
    result = call("show", "--", run, "--json")
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert os.linesep in result.stderr
