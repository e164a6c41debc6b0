"""The command `holdfast` on runs whose steps refer to each other."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

import holdfast as hf
from command_line import DATA, INDEX, call, call_json, complaint, flip_bit, lines_of, show_on_terminal
from holdfast.catalog import StoredRun
from holdfast.catalog.survey import Wishes, check_unchanged, plan_removals, survey_run
from holdfast.cli.exit_codes import ExitCode
from holdfast.errors import StorageError
from holdfast.format.digests import seal
from holdfast.format.names import StepName
from holdfast.format.records import Reference
from holdfast.storage import LocalStorage

ONE, TWO, THREE = (f"step-00000000{step}.g0001" for step in (1, 2, 3))
TABLE_BYTES = 20_000 * 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 2 and 3 refer to step 1, and step 3 to step 2 as well."""
    arrays = {"table": np.arange(20_000.0), "seldom": np.zeros(300), "often": np.zeros(40)}
    with hf.CheckpointManager(tmp_path / "gpt", hf.Checkpoint(arrays=arrays), incremental=True) as manager:
        for step in (1, 2, 3):
            arrays["often"][:] = step
            arrays["seldom"][:] = min(step, 2)
            manager.save(step, metrics={"loss": 1.0 / step})
    return tmp_path / "gpt"


def test_list_says_what_refers_to_what(run: Path) -> None:
    rows = {row[6]: row for row in lines_of(call("list", run).stdout)[1:]}
    assert {row[4] for row in rows.values()} == {
        str(sum((run / directory / name).stat().st_size for name in (DATA, INDEX))) for directory in rows
    }
    assert rows[ONE][7] == "referred_to,highest:loss"
    assert rows[TWO][7] == f"referred_to,refers_to:{ONE}"
    assert rows[THREE][7] == f"newest,refers_to:{ONE},refers_to:{TWO},lowest:loss"
    first, second, third = call_json("list", run)["steps"]
    assert (first["referred_bytes"], first["references"], first["referred_by"]) == (0, [], [TWO, THREE])
    assert (second["referred_bytes"], second["referred_by"]) == (TABLE_BYTES, [THREE])
    assert third["referred_bytes"] == TABLE_BYTES + 2400
    assert third["references"] == [
        {"step": 1, "generation": 1, "attempt": 1, "directory": ONE, "leaves": 1, "size_bytes": TABLE_BYTES},
        {"step": 2, "generation": 1, "attempt": 1, "directory": TWO, "leaves": 1, "size_bytes": 2400},
    ]


def test_doctor_takes_the_size_of_the_state_not_what_the_newest_step_wrote(run: Path) -> None:
    document = call_json("doctor", run)
    third = call_json("list", run)["steps"][-1]
    assert document["size_of_step"] == 3
    assert document["size_bytes"] == third["size_bytes"] + TABLE_BYTES + 2400


def test_list_on_a_terminal_has_a_column_for_it(run: Path) -> None:
    shown = show_on_terminal("list", run, columns=100).text.splitlines()
    titles, first, second, third = shown[-4:]
    assert titles.split() == ["step", "saved", "size", "referred", "workers", "loss"]
    assert "  -  " in first
    assert first.endswith("referred to")
    assert "160 kB" in second
    assert "162 kB" in third
    assert third.endswith("newest")


def test_list_marks_a_step_whose_bytes_are_missing_or_too_few(run: Path) -> None:
    os.truncate(run / TWO / DATA, 5000)
    result = call("list", run)
    assert [row[7].split(",")[0] for row in lines_of(result.stdout)[1:]] == ["referred_to", "damaged", "newest"]
    assert f"{TWO}/{DATA} has 5000 bytes" in result.stderr
    assert f"were written; {THREE} refers to it" in result.stderr
    shutil.rmtree(run / ONE)
    result = call("list", run)
    assert all("damaged" in row[7] for row in lines_of(result.stdout)[1:])
    assert f"{ONE} is missing; {TWO} refers to it" in result.stderr
    assert call_json("list", run)["steps"][0]["damages"][1]["file"] == ONE


def test_show_names_the_step_that_stores_each_leaf(run: Path) -> None:
    result = call("show", run)
    assert f"refers to   {ONE} for {TABLE_BYTES} bytes, {TWO} for 2400 bytes" in result.stdout
    assert ["arrays", "3", str(TABLE_BYTES + 2400 + 320), "100%", "-", "-", "-"] in lines_of(result.stdout)
    rows = {row[0]: row[4:] for row in lines_of(call("show", run, "arrays").stdout)[1:]}
    assert rows == {
        "arrays/often": ["4096", DATA],
        "arrays/seldom": ["4416", f"{TWO}/{DATA}"],
        "arrays/table": ["4416", f"{ONE}/{DATA}"],
    }
    document = call_json("show", run)
    assert {leaf["name"]: (leaf["source"], leaf["file"]) for leaf in document["leaves"]} == {
        "arrays/often": (None, DATA),
        "arrays/seldom": (TWO, DATA),
        "arrays/table": (ONE, DATA),
    }
    assert document["referred_bytes"] == TABLE_BYTES + 2400
    assert "refers to" not in call("show", f"{run}@1").stdout
    assert f"in {ONE}/{DATA}" in show_on_terminal("show", run, "arrays/table").text


# verify


def test_verify_reads_each_byte_once(run: Path) -> None:
    document = call_json("verify", run, "--all")
    assert document["is_whole"]
    files = (run / directory / name for directory in (ONE, TWO, THREE) for name in (DATA, INDEX))
    assert document["read_bytes"] == sum(file.stat().st_size for file in files)
    (step,) = call_json("verify", f"{run}@3")["steps"]
    assert step["read_bytes"] == 4096 + TABLE_BYTES + 2400 + 320 + (run / THREE / INDEX).stat().st_size


def test_verify_finds_damage_in_every_step_that_has_it(run: Path) -> None:
    flip_bit(run / ONE / DATA, 6816 + 100)
    result = call("verify", run, "--all")
    assert result.exit_code == ExitCode.DAMAGED
    assert result.stdout.splitlines()[-1] == "No checkpoint of the current lineage is whole."
    problems = [step["problems"] for step in call_json("verify", run, "--all", exit_code=1)["steps"]]
    assert [[(one["file"], one["tensor"]) for one in of_step] for of_step in problems] == [
        [(f"{ONE}/{DATA}", "arrays/table")]
    ] * 3
    assert [one["message"].endswith("refers to it") for of_step in problems for one in of_step] == [False, True, True]
    (alone,) = call_json("verify", f"{run}@3", exit_code=1)["steps"]
    assert alone["problems"] == problems[2]


def test_verify_of_a_header_that_only_its_own_step_needs(run: Path) -> None:
    flip_bit(run / ONE / DATA, 100)
    outcomes = [step["outcome"] for step in call_json("verify", run, "--all", exit_code=1)["steps"]]
    assert outcomes == ["restorable", "whole", "whole"]


def test_a_step_that_was_copied_away_needs_those_that_it_refers_to(run: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(run / THREE, backup / "best")
    result = call("verify", backup / "best")
    assert result.exit_code == ExitCode.DAMAGED
    for directory in (ONE, TWO):
        assert f"{directory}/{DATA} is missing; the directory {directory} must be next to" in result.stdout
        shutil.copytree(run / directory, backup / directory)
    (tmp_path / "link").symlink_to(backup / "best")
    for place in (backup / "best", tmp_path / "link", run / THREE):
        result = call("verify", place)
        assert result.exit_code == ExitCode.OK, result.stdout
        read_bytes = 4096 + TABLE_BYTES + 2400 + 320 + (run / THREE / INDEX).stat().st_size
        assert f"{read_bytes} bytes read" in result.stdout
    assert call_json("show", backup / "best")["leaves"][0]["source"] is None


# prune


def test_prune_keeps_what_is_referred_to(run: Path) -> None:
    for flag in ("--dry-run", "--yes"):
        result = call("prune", run, "--steps", "1,2", flag)
        assert result.exit_code == ExitCode.OK, result.output
        assert result.stdout.splitlines()[:3] == [
            "there is nothing to remove",
            f"kept: {ONE}: step 3 and 1 more refer to it",
            f"kept: {TWO}: step 3 refers to it",
        ]
    document = call_json("prune", run, "--steps", "1", "--yes")
    assert document["remove"] == []
    assert [(one["directory"], one["reason"]) for one in document["kept"]] == [
        (ONE, "step 3 and 1 more refer to it"),
    ]
    assert call("verify", run, "--all").exit_code == ExitCode.OK


def test_prune_keeps_what_became_needed_while_it_asked(run: Path) -> None:
    storage = LocalStorage(run)
    with hf.CheckpointManager(run, hf.Checkpoint(), incremental=True) as manager:
        manager.save(4)
    survey = survey_run(storage)
    plan = plan_removals(survey, Wishes(directories=frozenset({THREE})), 0.0)
    assert [one.directory for one in plan.remove] == [THREE]
    check_unchanged(storage, plan, survey.catalog)
    manifest = StoredRun(storage).step(StepName(4, 2)).manifest()
    reference = Reference(3, 1, 1, leaves=1, size_bytes=320)
    (run / "step-000000004.g0002" / "manifest.json").write_bytes(
        seal(msgspec.structs.replace(manifest, features=("references",), references=(reference,)))
    )
    with pytest.raises(StorageError, match="changed while"):
        check_unchanged(storage, plan, survey.catalog)


def test_prune_removes_what_refers_together_with_what_it_refers_to(run: Path) -> None:
    arrays = {"table": np.zeros(20_000), "seldom": np.zeros(300), "often": np.zeros(40)}
    with hf.CheckpointManager(run, hf.Checkpoint(arrays=arrays), begin_anew=True, incremental=True) as manager:
        manager.save(9)
    result = call("prune", run, "--off-line", "--yes")
    assert result.exit_code == ExitCode.OK, result.output
    assert "removed 3 directories" in result.stdout
    assert [path.name for path in run.glob("step-*")] == ["step-000000009.g0002"]


def test_prune_off_line_keeps_what_the_line_refers_to(run: Path) -> None:
    """A step of an older generation that was replaced is off the line, and what replaced it refers to it."""
    arrays = {"table": np.zeros(20_000), "seldom": np.zeros(300), "often": np.zeros(40)}
    with hf.CheckpointManager(run, hf.Checkpoint(arrays=arrays), incremental=True) as manager:
        manager.restore()
        arrays["table"][:] = 1
        manager.save(3, replace=True)
    assert call_json("list", run)["off_line"][0]["referred_by"] == ["step-000000003.g0002"]
    result = call("prune", run, "--off-line", "--yes")
    assert f"kept: {THREE}: step 3 refers to it" in result.stdout
    assert call("verify", run, "--all").exit_code == ExitCode.OK


def test_prune_keeps_an_unfinished_directory_that_is_referred_to(run: Path) -> None:
    (run / ONE / "manifest.json").unlink()
    (run / "step-000000007.g0001").mkdir()
    result = call("prune", run, "--unfinished", "--lost", "--job-is-dead", "--yes")
    assert result.exit_code == ExitCode.OK, result.output
    assert f"kept: {ONE}: step 3 and 1 more refer to it" in result.stdout
    assert "removed 1 directory" in result.stdout
    assert call("verify", run).exit_code == ExitCode.OK
    assert f"{ONE}/manifest.json is missing" in call("verify", run, "--all").stdout


def test_prune_still_refuses_the_newest_whole_step(run: Path) -> None:
    code, said = complaint("prune", run, "--steps", "1,2,3", "--yes")
    assert code == ExitCode.USAGE
    assert "step 3 is the newest whole checkpoint" in said
    flip_bit(run / THREE / DATA, 4100)
    result = call("prune", run, "--steps", "3,1", "--yes")
    assert result.exit_code == ExitCode.OK, result.output
    assert f"kept: {ONE}: step 2 refers to it" in result.stdout
    assert LocalStorage(run).list(THREE) == []
    assert call("verify", run, "--all").exit_code == ExitCode.OK
