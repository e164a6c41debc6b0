"""Jobs whose nodes are the workers that torchrun starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import holdfast as hf
from epoch_jobs import make_job, totals_of
from holdfast.testing.processes import Workers
from jobs import start_like_torchrun

PROGRAM = Path(__file__).with_name("job_worker.py")


def test_three_workers_run_the_canonical_job(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 3, PROGRAM, "train")
        for rank in range(3):
            assert workers.wait_said(rank, "last", 120) == 4
            assert workers.wait_said(rank, "totals", 60) == {f"worker_{other}": 145.0 for other in range(3)}
            assert workers.wait_said(rank, "own", 60) == 145_000.0
            assert workers.wait_said(rank, "remote", 60).startswith("RemoteOutput(on worker_")
        assert workers.wait(60, [0, 1, 2]) == [0, 0, 0]


def test_a_task_that_fails_ends_the_others_within_seconds(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 3, PROGRAM, "fail")
        assert workers.wait(60, [0, 1, 2]) == [1, 1, 1]
        for rank in range(3):
            (record,) = [record for record in workers.records(rank) if "task" in record]
            assert (record["group"], record["task"], record["node"]) == ("epoch", "work", "worker_1")
            assert "no more" in record["text"]


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 3, PROGRAM, "die")
        assert workers.wait(120, [0, 2]) == [1, 1]
        for rank in (0, 2):
            assert workers.wait_said(rank, "ranks", 1) == [1]


NODES = ["worker_0", "worker_1", "worker_2"]


def run_kept(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs the job on three workers, who say the same of how it ended; what the first of them said."""
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 3, PROGRAM, "keep", tmp_path / "run", *arguments)
        assert workers.wait(120, [0, 1, 2]) == [0, 0, 0], [workers.report(rank) for rank in range(3)]
        said = [workers.records(rank) for rank in range(3)]
        assert said[0][::2] == said[1][::2] == said[2][::2]
        return said[0]


def test_the_canonical_job_is_kept_and_goes_on_from_each_epoch(tmp_path: Path) -> None:
    epochs = [None, 0, 1, 2, 3, 4]
    said = run_kept(tmp_path, ",".join("-" if epoch is None else str(epoch) for epoch in epochs))
    for epoch, ended, more in zip(epochs, said[::2], said[1::2], strict=True):
        assert ended == {"last": 4, "totals": dict.fromkeys(NODES, 145.0), "resumed": epoch, "failed": []}
        assert all(set(seconds) == set(NODES) for stats in more["timed"].values() for seconds in stats)
        assert len(more["timed"].get("checkpoint_save", ())) == (5 if epoch is None else 4 - epoch)
        assert (more["loaded"], more["value"]) == ({node: ["total"] for node in NODES}, 115.0)
    manager = hf.MultiNodeCheckpointManager(tmp_path / "run")
    assert manager.epochs() == (0, 1, 2, 3, 4)
    assert manager.get_ckpt_db_name("worker_2", 4) != manager.get_ckpt_db_name("worker_1", 4), "each has its own file"
    # What workers have saved can be gone on from in one process, and the other way round.
    with hf.LocalSession(NODES) as session:
        runner = hf.JobRunner(make_job(NODES), manager, 1)
        assert runner.train(session) == 4
        assert totals_of(session) == [145.0] * 3
    assert run_kept(tmp_path, "2")[0]["totals"] == dict.fromkeys(NODES, 145.0)


def test_a_worker_killed_while_an_epoch_is_saved(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 3, PROGRAM, "keep", tmp_path / "run", "-", "dies")
        assert workers.wait(120, [0, 1, 2]) == [1, -9, 1]
    assert hf.MultiNodeCheckpointManager(tmp_path / "run").epochs() == (0, 1, 2)
    ended = run_kept(tmp_path)[0]
    assert (ended["resumed"], ended["totals"]) == (2, dict.fromkeys(NODES, 145.0))
    for step in (tmp_path / "run").glob("step-*"):
        assert (step / "manifest.json").exists(), "nothing partial is left"


def test_a_disk_that_is_full_for_one_worker_loses_that_epoch_for_all(tmp_path: Path) -> None:
    ended = run_kept(tmp_path, "-", "full")[0]
    assert ended == {"last": 4, "totals": dict.fromkeys(NODES, 145.0), "resumed": None, "failed": [3]}
    assert hf.MultiNodeCheckpointManager(tmp_path / "run").epochs() == (0, 1, 2, 4)


def test_workers_whose_state_is_not_kept_take_part(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start_like_torchrun(workers, 3, PROGRAM, "keep", tmp_path / "run", "-", "", "worker_0,worker_2")
        assert workers.wait(120, [0, 1, 2]) == [0, 0, 0], [workers.report(rank) for rank in range(3)]
        assert workers.records(1)[0]["totals"] == {"worker_0": 145.0, "worker_2": 145.0}
