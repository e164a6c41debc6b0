"""Going back to an earlier step, and training on from there: `start_from`, `holdfast rollback`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import call, call_json, complaint, flip_bit, run_file, run_program
from holdfast.catalog import StoredRun
from holdfast.cluster import Cluster
from holdfast.errors import NoCheckpointError, NoWholeCheckpointError, UsageError
from holdfast.storage import LocalStorage
from memory_engine import run_workers


def train(run: Path, total: int, start_from: int | None = None, killed_at: int | None = None) -> tuple[int, int]:
    """A start of the job: the step at which it begins, and how many updates its state has had then."""
    asked = ["-" if option is None else str(option) for option in (start_from, killed_at)]
    done = run_file("going_back", run, str(total), *asked)
    assert (done.returncode == 0) == (killed_at is None), done.stderr
    step, updates = map(int, done.stdout.split())
    return step, updates


def metrics_of(run: Path) -> dict[int, float]:
    """For each step of the current lineage, how many updates its state has had."""
    storage = LocalStorage(run)
    return {
        name.step: StoredRun(storage).step(name).manifest().metrics["updates"]
        for name in StoredRun(storage).look().living
    }


def data_of(run: Path, step: int, generation: int = 1) -> Path:
    return run / f"step-{step:09}.g{generation:04}" / "data-00000-of-00001.safetensors"


def test_a_run_goes_back_once_and_then_follows_the_new_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, 60) == (0, 0)
    # Killed before anything is saved: nothing has changed, and the next start goes back again.
    assert train(run, 80, start_from=40, killed_at=45) == (40, 40)
    assert max(metrics_of(run)) == 60
    assert train(run, 80, start_from=40, killed_at=55) == (40, 40)
    assert list(metrics_of(run)) == [10, 20, 30, 40, 50]
    # Left in the script, it is not done again, by any of the later starts.
    assert train(run, 80, start_from=40, killed_at=75) == (50, 50)
    assert train(run, 80, start_from=40) == (70, 70)
    assert train(run, 90) == (80, 80)
    assert train(run, 100, start_from=40) == (90, 90)
    assert metrics_of(run) == {step: step for step in range(10, 101, 10)}
    # Another number is another wish, and so is the first number after that.
    assert train(run, 100, start_from=60) == (60, 60)
    assert train(run, 100, start_from=40) == (40, 40)
    assert train(run, 100, start_from=40) == (100, 100)


def test_a_step_to_go_back_to_is_there_and_whole(tmp_path: Path) -> None:
    def enter(step: int) -> None:
        with hf.resumable(tmp_path, state={"updates": np.zeros(1)}, start_from=step):
            pass

    with pytest.raises(NoCheckpointError, match="no checkpoint of step 40") as empty:
        enter(40)
    assert empty.value.hint == "Steps that exist: none."
    assert train(tmp_path, 30) == (0, 0)
    with pytest.raises(NoCheckpointError, match="no checkpoint of step 40") as absent:
        enter(40)
    assert absent.value.hint == "Steps that exist: 10, 20, 30."
    flip_bit(data_of(tmp_path, 20), 4096)
    with pytest.raises(NoWholeCheckpointError, match="step 20 is damaged"):
        enter(20)
    with pytest.raises(UsageError, match="contradict"):
        hf.resumable(tmp_path, state=1, start_from=10, begin_anew=True)
    with pytest.raises(UsageError, match="start_from must be a whole number"):
        hf.resumable(tmp_path, state=1, start_from="10")  # type: ignore[arg-type]


def test_a_restore_inside_of_the_block_is_refused_and_one_of_a_part_is_not(tmp_path: Path) -> None:
    train(tmp_path, 60)
    state = {"updates": np.zeros(1)}
    with hf.resumable(tmp_path, state=state, extra=[0], strict=False, quiet=True) as run:
        for step in (40, None):
            with pytest.raises(UsageError, match="not the number of its step") as refused:
                run.manager.restore(step)
            assert "start_from=40" in refused.value.hint
        assert (run.step, state["updates"][0]) == (60, 60)
        assert run.manager.restore(40, only="state") is not None
        assert state["updates"][0] == 40


def test_a_part_of_another_step_is_refused_once_a_step_was_trained(tmp_path: Path) -> None:
    train(tmp_path, 60)
    state, extra = {"updates": np.zeros(1)}, {"seen": np.zeros(1)}
    options: dict[str, Any] = {"strict": False, "quiet": True, "save_every": hf.Steps(10), "keep": hf.All()}
    with hf.resumable(tmp_path, state=state, **options) as run:
        for only in ("*", ["state"], "state*"):
            with pytest.raises(UsageError, match="not the number of its step"):
                run.manager.restore(40, only=only)
        assert run.manager.restore(60, only="*") is not None
        run.checkpoint.extra = extra
        refused = 0
        for step in run.steps(75):
            state["updates"] += 1
            if step == 70:
                assert run.manager.restore(70, only="extra") is not None
                assert run.manager.restore(only="extra") is not None
            elif step > 60:
                for asked in (40, None) if step > 70 else (40,):
                    with pytest.raises(UsageError, match="not the number of its step"):
                        run.manager.restore(asked, only="state")
                    refused += 1
        assert (run.step, state["updates"][0]) == (75, 75)
    assert refused == 17
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(state=state)) as manager:
        assert manager.restore(40, only="state") is not None


def test_managers_and_handlers_go_back_as_well(tmp_path: Path) -> None:
    train(tmp_path, 30)
    state = {"updates": np.zeros(1)}
    checkpoint = hf.Checkpoint(state=state)
    with hf.CheckpointManager(tmp_path, checkpoint, start_from=10) as manager:
        restored = manager.restore()
        assert restored is not None
        assert restored.step == 10
        manager.save(11).wait_committed()
        again = manager.restore()
        assert again is not None
        assert again.step == 11, "once"
    with hf.CheckpointManager(tmp_path, checkpoint, start_from=20) as manager:
        with hf.PreemptionCheckpointHandler(manager, quiet=True) as handler:
            assert (handler.total_run_calls, state["updates"][0]) == (20, 20)


def test_several_workers_go_back_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(total: int, start_from: int | None) -> list[tuple[int, float]]:
        def one(cluster: Cluster) -> tuple[int, float]:
            state = {"updates": np.zeros(1)}
            with hf.resumable(
                tmp_path, state=state, save_every=hf.Steps(2), cluster=cluster, start_from=start_from
            ) as run:
                begun = run.step, float(state["updates"][0])
                for _ in run.steps(total):
                    state["updates"] += 1
            return begun

        return run_workers(2, one)

    assert work(6, None) == [(0, 0)] * 2
    assert work(5, 4) == [(4, 4)] * 2
    said = [text for text in caplog.messages if "start_from" in text]
    assert len(said) == 1
    assert "takes step 6 out of the lineage" in said[0]
    assert work(8, 4) == [(5, 5)] * 2


def test_a_rollback_makes_a_step_the_newest_and_another_takes_it_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 60)
    document = json.loads(run_program("rollback", f"{run}@40", "--json").stdout)
    assert (document["step"], document["opened_generation"]) == (40, 2)
    assert [one["step"] for one in document["off_line"]] == [50, 60]
    assert call_json("list", run)["newest_step"] == 40
    # In a process of its own: the one that opened the newest generation is taken for a job as long as it lives.
    assert "step 40 is the newest step" in run_program("rollback", f"{run}@40").stdout
    assert (run / "generations" / "0003.json").exists() is False
    # The way back that it names.
    said = run_program("rollback", f"{run}@30").stdout
    assert "but still there: step 40\n" in said
    undo = next(line.split(": holdfast ")[1] for line in said.splitlines() if "undo" in line)
    assert run_program(*undo.split()).returncode == 0
    assert call_json("list", run)["newest_step"] == 40
    assert train(run, 70) == (40, 40)
    assert metrics_of(run) == {step: step for step in range(10, 71, 10)}
    # Of two steps 60, the older one by its directory.
    assert call("rollback", run / "step-000000060.g0001").exit_code == 0
    assert train(run, 65) == (60, 60)


def test_a_rollback_and_a_start_from_that_was_left_in_the_script(tmp_path: Path) -> None:
    train(tmp_path, 60)
    assert train(tmp_path, 80, start_from=40) == (40, 40)
    assert call("rollback", f"{tmp_path}@20").exit_code == 0
    assert train(tmp_path, 40, start_from=40) == (20, 20)
    assert call("rollback", f"{tmp_path}@30").exit_code == 0
    assert train(tmp_path, 40, start_from=40) == (30, 30)


def test_a_rollback_refuses_what_would_harm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, 30)
    assert complaint("rollback", f"{run}@40")[0] == 3
    code, text = complaint("rollback", run)
    assert code == 2
    assert "Write" in text
    assert "10, 20, 30" in text
    flip_bit(data_of(run, 20), 4096)
    code, text = complaint("rollback", f"{run}@20")
    assert code == 1
    assert "not whole, so nothing was changed" in text
    assert call_json("list", run)["newest_step"] == 30
    with hf.CheckpointManager(run, hf.Checkpoint(state={"updates": np.zeros(1)})) as manager:
        manager.save(31).wait_committed()
        code, text = complaint("rollback", f"{run}@10")
        assert code == 2
        assert "a job has" in text
    # What prune refuses to remove, this leaves behind.
    code, text = complaint("prune", run, "--steps", "31", "--yes")
    assert code == 2
    assert "holdfast rollback RUN@STEP" in text


def test_what_each_worker_finds_is_a_warning_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")

    def work(cluster: Cluster) -> None:
        with hf.resumable(tmp_path, state={"updates": np.zeros(1)}, save_every=hf.Steps(2), cluster=cluster) as run:
            for _ in run.steps(4):
                pass

    run_workers(2, work)
    flip_bit(tmp_path / "step-000000004.g0001" / "manifest.json", 100)
    caplog.clear()
    run_workers(2, work)
    found = [record.levelname for record in caplog.records if "step 4 skipped because it is damaged" in record.message]
    assert sorted(found) == ["INFO", "WARNING"]
