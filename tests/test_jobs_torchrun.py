"""Jobs whose nodes are the workers that torchrun starts."""

from __future__ import annotations

from pathlib import Path

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
