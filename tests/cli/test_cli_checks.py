"""`holdfast verify` and `holdfast prune`: what is found in damaged runs, and what is never removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from command_line import (
    DATA,
    FIRST_300,
    INDEX,
    NEWEST,
    after_first_return,
    call,
    call_json,
    complaint,
    flip_bit,
    lines_of,
    make_objects,
    run_program,
)
from faulty import Fault, FaultyStorage
from holdfast.catalog import StoredRun
from holdfast.catalog.stored_step import remove_own_files
from holdfast.cli.exit_codes import ExitCode
from holdfast.cli.target import choose_step
from holdfast.errors import StorageError
from holdfast.format.names import StepName, parse_step_directory
from holdfast.restore.verify import CheckOutcome, judge_step
from holdfast.storage import LocalStorage

# verify


def test_verify_says_whole(run: Path, tmp_path: Path) -> None:
    for place in (run, f"{run}@100", run / FIRST_300, shutil.copytree(run / FIRST_300, tmp_path / "copy")):
        result = call("verify", place)
        assert result.exit_code == ExitCode.OK, result.output
        assert result.stdout.startswith("whole ")
        assert ("not read: 4 other checkpoints" in result.stderr) is (place == run), result.stderr
    result = call("verify", run, "--all")
    assert result.exit_code == ExitCode.OK
    assert result.stdout.splitlines()[-1] == "5 checkpoints read: 5 whole"


def test_verify_names_a_flipped_bit(run: Path) -> None:
    (leaf,) = call_json("show", run, "model/layers.7.weight")["leaves"]
    flip_bit(run / NEWEST / leaf["file"], leaf["offset_bytes"] + 4000)
    result = run_program("verify", run)
    assert result.returncode == ExitCode.DAMAGED
    verdict, place, *summary = result.stdout.splitlines()
    assert verdict.startswith("damaged   step 300")
    assert f"{NEWEST}/{DATA}" in place
    assert f"bytes {leaf['offset_bytes']} to" in place
    assert "'model/layers.7.weight'" in place
    assert summary[0] == "1 checkpoint read: 1 damaged"
    assert "--all shows which are whole" in summary[1]
    document = call_json("verify", run, exit_code=ExitCode.DAMAGED)
    (step,) = document["steps"]
    (problem,) = step["problems"]
    assert (problem["file"], problem["offset_bytes"], problem["tensor"]) == (
        f"{NEWEST}/{DATA}",
        leaf["offset_bytes"],
        "model/layers.7.weight",
    )
    assert (document["is_whole"], document["newest_whole_step"], step["outcome"]) == (False, None, "damaged")


def test_verify_says_of_a_damaged_header_what_a_restore_makes_of_it(run: Path) -> None:
    flip_bit(run / NEWEST / DATA, 100)
    restored = hf.CheckpointManager(run, hf.Checkpoint(**make_objects(2))).restore()
    assert restored is not None
    assert (restored.step, restored.passed_over) == (300, ())
    result = call("verify", run)
    assert result.exit_code == ExitCode.DAMAGED
    assert "restorable  step 300" in result.stdout
    assert "the header does not match its digest; a restore does not need it" in result.stdout
    assert "A restore can use step 300" in result.stdout
    assert "passes over" not in result.stdout
    (step,) = call_json("verify", run, exit_code=1)["steps"]
    assert (step["outcome"], step["problems"][0]["tensor"]) == ("restorable", None)
    # What a restore does need is another verdict.
    flip_bit(run / NEWEST / DATA, call_json("show", run)["leaves"][0]["offset_bytes"])
    assert "A restore skips it" in call("verify", run).stdout


def test_verify_all_says_what_a_restore_takes(run: Path) -> None:
    os.truncate(run / NEWEST / DATA, 5000)
    (run / "step-000000250.g0002" / INDEX).unlink()
    flip_bit(run / FIRST_300 / "manifest.json", 100)
    result = call("verify", run, "--all")
    assert result.exit_code == ExitCode.DAMAGED
    assert [line.split()[0] for line in result.stdout.splitlines() if "  step " in line] == [
        "whole",
        "whole",
        *["damaged"] * 3,
    ]
    assert "5 checkpoints read: 2 whole, 3 damaged" in result.stdout
    assert "uses step 200" in result.stdout
    document = call_json("verify", run, "--all", exit_code=ExitCode.DAMAGED)
    assert document["newest_whole_step"] == 200
    assert [step["state"] for step in document["steps"]] == ["living", "living", "living", "off_line", "living"]


def test_verify_lists_at_most_twenty_places(tmp_path: Path) -> None:
    with hf.CheckpointManager(
        tmp_path / "run", hf.Checkpoint(many=[np.full(4, place) for place in range(50)])
    ) as manager:
        path = manager.save(1).path
    assert path is not None
    data = Path(path) / DATA
    data.write_bytes(data.read_bytes()[:4096] + b"\xff" * (50 * 32))
    result = call("verify", tmp_path / "run")
    assert result.stdout.count("do not match their digest") == 20
    assert "and 30 more places" in result.stdout
    assert len(call_json("verify", tmp_path / "run", exit_code=1)["steps"][0]["problems"]) == 50


def test_verify_finds_damaged_records_of_the_run(run: Path) -> None:
    flip_bit(run / "generations" / "0001.json", 60)
    assert call("verify", run).exit_code == ExitCode.OK
    result = call("verify", run, "--all")
    assert result.exit_code == ExitCode.DAMAGED
    assert "generations/0001.json" in result.stdout
    flip_bit(run / "generations" / "0002.base.json", 60)
    assert call("verify", run).exit_code == ExitCode.DAMAGED
    assert len(call_json("verify", run, "--all", exit_code=1)["damaged_records"]) == 2


def test_verify_all_wants_a_run(run: Path) -> None:
    assert complaint("verify", "--all", f"{run}@300")[0] == ExitCode.USAGE
    assert complaint("verify", "--all", run / NEWEST)[0] == ExitCode.USAGE


# prune


def test_prune_wants_to_know_what(run: Path) -> None:
    (run / "step-000000400.g0001").mkdir()
    code, said = complaint("prune", run)
    assert code == ExitCode.USAGE
    assert "nothing is selected" in said
    assert "Give --keep 3 (the newest three), --policy, --steps A,B, --off-line, --unfinished or --lost" in said
    assert complaint("prune", run, "--job-is-dead", "--off-line", "--yes")[0] == ExitCode.USAGE


def test_prune_in_a_pipe_needs_a_yes(run: Path) -> None:
    code, said = complaint("prune", run, "--off-line")
    assert code == ExitCode.USAGE
    assert "Give --yes" in said
    assert call("prune", run, "--off-line", "--json").exit_code == ExitCode.USAGE
    assert (run / FIRST_300).exists()


def test_prune_keeps_the_newest_steps(run: Path) -> None:
    result = call("prune", run, "--keep", "2", "--yes")
    assert result.exit_code == 0, result.output
    assert [step["step"] for step in call_json("list", run)["steps"]] == [250, 300]
    assert (run / FIRST_300).exists(), "what is off the line is not asked for"
    again = call("prune", run, "--keep", "2", "--yes")
    assert again.exit_code == 0
    assert "there is nothing to remove" in again.stdout


def test_prune_by_a_policy_as_a_program_writes_it(run: Path) -> None:
    asked = call_json("prune", run, "--policy", "hf.Best('val_loss', mode='max') | EveryN(250)", "--dry-run")
    assert [one["step"] for one in asked["remove"]] == [200]
    assert call("prune", run, "--policy", "Best('val_loss', 'max') | EveryN(250)", "--yes").exit_code == 0
    # The newest stays, whatever a policy says.
    assert [step["step"] for step in call_json("list", run)["steps"]] == [100, 250, 300]


@pytest.mark.parametrize(
    "policy",
    [
        "Best('val_los')",
        "Latest(0)",
        "Latest",
        "3",
        "All()",
        "__import__('os').system('x')",
        "Latest(3",
        "Latest(**{})",
    ],
)
def test_prune_refuses_what_is_not_a_policy(policy: str, run: Path) -> None:
    code, said = complaint("prune", run, "--policy", policy, "--yes")
    assert code == ExitCode.USAGE
    assert "hint: " in said or "must be a whole number" in said
    assert len(call_json("list", run)["steps"]) == 4


def test_prune_by_a_policy_keeps_the_newest_whole_step(run: Path) -> None:
    flip_bit(run / NEWEST / DATA, 5000)
    code, said = complaint("prune", run, "--keep", "1", "--yes")
    assert code == ExitCode.USAGE
    assert "step 250 is the newest whole checkpoint" in said
    assert call("prune", run, "--keep", "2", "--yes").exit_code == 0
    flip_bit(run / NEWEST / "manifest.json", 100)
    assert call("prune", run, "--keep", "1", "--yes").exit_code == 0, "the damaged one does not count"
    assert [step["step"] for step in call_json("list", run)["steps"]] == [250, 300]


def test_prune_off_the_line(run: Path) -> None:
    result = call("prune", run, "--off-line", "--dry-run")
    assert result.exit_code == ExitCode.OK
    assert lines_of(result.stdout)[1][::2] == [FIRST_300, "off_line"]
    assert (run / FIRST_300).exists()
    result = call("prune", run, "--off-line", "--yes")
    assert result.exit_code == ExitCode.OK
    assert "removed 1 directory" in result.stdout
    assert sorted(path.name for path in run.glob("step-*")) == [
        *("step-000000100.g0001", "step-000000200.g0001", "step-000000250.g0002", NEWEST)
    ]
    assert "nothing to remove" in call("prune", run, "--off-line", "--yes").stdout
    objects = hf.Checkpoint(**make_objects(5))
    with hf.CheckpointManager(run, objects) as manager:
        restored = manager.restore()
    assert restored is not None
    assert (restored.step, objects.epoch) == (300, 1)


def test_prune_leaves_alone_what_a_job_may_be_writing(run: Path) -> None:
    for name in ("step-000000260.g0001", "step-000000400.g0002", ".trash-00-step"):
        (run / name).mkdir()
        (run / name / DATA).write_bytes(b"half")
    document = call_json("prune", run, "--unfinished", "--yes")
    assert {entry["directory"]: entry["outcome"] for entry in document["remove"]} == {
        "step-000000260.g0001": "removed",
        ".trash-00-step": "removed",
    }
    assert [entry["directory"] for entry in document["left_alone"]] == ["step-000000400.g0002"]
    assert (run / "step-000000400.g0002" / DATA).read_bytes() == b"half"
    result = call("prune", run, "--unfinished", "--yes")
    assert "skipped: a job may be writing step-000000400.g0002" in result.stdout
    assert "--job-is-dead" in result.stdout
    assert call("prune", run, "--unfinished", "--job-is-dead", "--yes").exit_code == ExitCode.OK
    assert not list(run.glob("step-000000400*"))
    assert not list(run.glob(".trash-*"))


def test_prune_single_steps(run: Path) -> None:
    code, said = complaint("prune", run, "--steps", "100, 300", "--yes")
    assert code == ExitCode.USAGE
    assert f"{FIRST_300}, {NEWEST}" in said
    assert call("prune", run, "--steps", f"100,{FIRST_300}", "--yes").exit_code == ExitCode.OK
    assert sorted(path.name for path in run.glob("step-*")) == ["step-000000200.g0001", "step-000000250.g0002", NEWEST]
    assert complaint("prune", run, "--steps", "7", "--yes")[0] == ExitCode.NOTHING_THERE
    assert complaint("prune", run, "--steps", "seven", "--yes")[0] == ExitCode.USAGE


def test_prune_never_removes_the_newest_whole_step(run: Path) -> None:
    code, said = complaint("prune", run, "--steps", f"200,{NEWEST}", "--yes")
    assert code == ExitCode.USAGE
    assert "step 300 is the newest whole checkpoint" in said
    # Where the newest is damaged, the one before it is what must stay, and the damaged one may go.
    (leaf,) = call_json("show", run, "model/embedding")["leaves"]
    flip_bit(run / NEWEST / DATA, leaf["offset_bytes"])
    code, said = complaint("prune", run, "--steps", "250", "--yes")
    assert code == ExitCode.USAGE
    assert "step 250 is the newest whole checkpoint" in said
    assert call("prune", run, "--steps", NEWEST, "--yes").exit_code == ExitCode.OK
    assert not (run / NEWEST).exists()


def test_prune_removes_no_checkpoint_where_the_line_has_no_whole_one(run: Path) -> None:
    for name in ("step-000000100.g0001", "step-000000200.g0001", "step-000000250.g0002", NEWEST):
        os.truncate(run / name / DATA, 10)
    (run / "step-000000400.g0001").mkdir()
    code, said = complaint("prune", run, "--off-line", "--yes")
    assert code == ExitCode.NOTHING_THERE
    assert "no checkpoint of the current lineage is whole" in said
    assert (run / FIRST_300).exists()
    assert call("prune", run, "--unfinished", "--yes").exit_code == ExitCode.OK


def test_prune_removes_no_checkpoint_where_the_line_is_not_known(run: Path) -> None:
    flip_bit(run / "generations" / "0002.base.json", 60)
    code, said = complaint("prune", run, "--steps", "100", "--yes")
    assert code == ExitCode.USAGE
    assert "generations/0002.base.json" in said


@pytest.mark.parametrize("kind", ["fifo", "link", "lost"])
def test_a_manifest_that_cannot_be_read_hides_no_other_step(run: Path, kind: str) -> None:
    path = run / "step-000000200.g0001" / "manifest.json"
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(run / NEWEST / "manifest.json" if kind == "link" else run / "lost")
    document = call_json("list", run)
    assert {step["step"]: len(step["damages"]) for step in document["steps"]} == {100: 0, 200: 1, 250: 0, 300: 0}
    assert "is not a regular file" in call("list", run).stderr
    assert call("show", run).exit_code == ExitCode.OK
    assert call("prune", run, "--off-line", "--yes").exit_code == ExitCode.OK
    assert not (run / FIRST_300).exists()
    assert call("verify", "--all", run).exit_code == ExitCode.DAMAGED


def test_prune_leaves_files_that_are_not_holdfasts(run: Path) -> None:
    (run / FIRST_300 / "notes.txt").write_text("mine")
    result = call("prune", run, "--off-line", "--yes")
    assert result.exit_code == ExitCode.OK
    assert f"kept: {FIRST_300}" in result.stdout
    assert [path.name for path in (run / FIRST_300).iterdir()] == ["notes.txt"]


def test_prune_while_a_job_saves(run: Path) -> None:
    objects = hf.Checkpoint(**make_objects(3))
    with hf.CheckpointManager(run, objects) as manager:
        manager.restore()
        manager.save(400).wait_committed()
        assert call("prune", run, "--off-line", "--unfinished", "--yes").exit_code == ExitCode.OK
        manager.save(500)
    assert call("verify", run, "--all").exit_code == ExitCode.OK
    assert call_json("list", run)["newest_step"] == 500


class PrunedStorage(LocalStorage):
    """A run from which a step is pruned right before a job calls one of its storage's methods on its directory."""

    def __init__(self, run: Path, method: str) -> None:
        super().__init__(run)
        self._method = method
        self.pruned: list[str] = []

    def retire(self, directory: str) -> str:
        self._meet("retire", directory)
        return super().retire(directory)

    def sync_directory(self, path: str) -> None:
        self._meet("sync_directory", path)
        super().sync_directory(path)

    def _meet(self, method: str, path: str) -> None:
        if method == self._method and path.startswith("step-000000300") and path not in self.pruned:
            self.pruned.append(path)
            # As prune does, whose look at the run was before the job's.
            name = parse_step_directory(path)
            assert name is not None
            StoredRun(LocalStorage(self.url)).step(name).withdraw()
            assert remove_own_files(LocalStorage(self.url), path)


@pytest.mark.parametrize("method", ["retire", "sync_directory"])
def test_pruning_a_step_that_a_job_removes_meanwhile_succeeds(run: Path, method: str) -> None:
    storage, withdrawn = PrunedStorage(run, method), StepName(300, 1)
    with hf.CheckpointManager(storage, hf.Checkpoint(**make_objects(3)), keep=hf.Latest(1)) as manager:
        manager.restore()
        manager.save(400)
        manager.wait()
        # As prune leaves it between the two: the next save of the job takes it for the remains of a save.
        StoredRun(LocalStorage(run)).step(withdrawn).withdraw()
        manager.save(500)
        manager.wait()
    assert storage.pruned
    gone = (*storage.pruned, ".trash")
    assert not [entry for entry in run.iterdir() if entry.name.startswith(gone)]
    assert call_json("list", run)["newest_step"] == 500


def test_a_place_that_fails_is_not_taken_for_damage(run: Path) -> None:
    name = StepName(300, 2)
    counted = FaultyStorage(LocalStorage(run))
    assert judge_step(counted, name.directory, name).outcome is CheckOutcome.WHOLE
    for number in range(2, len(counted.calls) + 1):
        verdict = judge_step(FaultyStorage(LocalStorage(run), [Fault(number)]), name.directory, name)
        assert verdict.outcome is CheckOutcome.UNREADABLE, counted.calls[number - 1]
        assert isinstance(verdict.problems[-1], StorageError)


def test_a_step_that_a_job_removes_meanwhile_is_not_taken_for_damage(run: Path) -> None:
    (run / NEWEST / "manifest.json").unlink()
    name = StepName(300, 2)
    assert judge_step(LocalStorage(run), name.directory, name).outcome is CheckOutcome.REMOVED


def test_export_takes_the_newest_step_when_a_job_removes_its_own(tmp_path: Path) -> None:
    run, to = tmp_path / "run", ("--to", "safetensors")
    with hf.CheckpointManager(run, hf.Checkpoint(x=np.zeros(9)), keep=hf.Latest(1)) as trainer:
        trainer.save(1).wait_ended()
        with after_first_return(choose_step, lambda: trainer.save(2).wait_ended()):
            assert call_json("export", run, tmp_path / "first", *to)["step"] == 2
        # Its directory is still there, as while a job is about to remove the rest of it.
        with after_first_return(choose_step, (run / StepName(2, 1).manifest_path).unlink):
            code, text = complaint("export", f"{run}@2", tmp_path / "second", *to)
    assert code == ExitCode.NOTHING_THERE
    assert "step 2" in text
    assert "removed while it was being read" in text
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("verb", ["verify", "show"])
def test_newest_step_is_looked_for_again_when_a_job_removes_it(tmp_path: Path, verb: str) -> None:
    trainer = hf.CheckpointManager(tmp_path, hf.Checkpoint(x=np.zeros(9)), keep=hf.Latest(1))
    trainer.save(1).wait_ended()
    with after_first_return(choose_step, lambda: trainer.save(2).wait_ended()):
        document = call_json(verb, tmp_path)
    if verb == "show":
        assert document["step"] == 2
    else:
        assert [(step["step"], step["outcome"]) for step in document["steps"]] == [(1, "removed"), (2, "whole")]
        assert (document["is_whole"], document["newest_whole_step"]) == (True, 2)
    with after_first_return(choose_step, lambda: trainer.save(3).wait_ended()):
        result = call(verb, f"{tmp_path}@2")
    assert result.exit_code == ExitCode.NOTHING_THERE
    with after_first_return(choose_step, lambda: trainer.save(4).wait_ended()):
        assert call(verb, tmp_path).exit_code == ExitCode.OK
    trainer.close()
