"""Jobs of several real processes that save together: under torchrun, killed, with a full disk, two in one directory."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import preloaded
from holdfast.testing.processes import Workers, python
from jobs import HOST, environment, find_port
from places import PROGRAMS, TESTS
from repetitions import repeated
from whole_runs import check_whole

WORKER = PROGRAMS / "joint_worker.py"
PATIENCE_SECONDS = 120.0


def start(workers: Workers, world_size: int, directory: Path, store: Path, what: str) -> None:
    for rank in range(world_size):
        told = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        workers.start(python(WORKER, directory, store, what), told, preloaded.Popen)


def last(workers: Workers, number: int, key: str) -> dict[str, Any]:
    return next(record for record in reversed(workers.records(number)) if key in record)


def test_one_failure_of_two_workers_is_printed_once(tmp_path: Path) -> None:
    """Both raise the same error: one of them prints all of it, and the other one line."""
    shown = []
    for directory, lengths, values in (("a", (3, 3), (1, 1)), ("a", (4, 4), (1, 1)), ("b", (3, 3), (1, 2))):
        with Workers(tmp_path) as workers:
            port = find_port()
            for rank in range(2):
                command = python(
                    PROGRAMS / "unlike_state.py", tmp_path / directory, str(lengths[rank]), str(values[rank])
                )
                workers.start(command, environment(rank, 2, port, agent=True), preloaded.TrainingPopen)
            workers.start(python("-c", HOST, str(port)), popen=preloaded.TrainingPopen)
            codes = workers.wait(PATIENCE_SECONDS, [0, 1])
            shown.append((codes, sorted((workers.errors(rank) for rank in range(2)), key=len)))
    assert shown[0] == ([0, 0], ["", ""])
    for (codes, (brief, full)), kind in zip(shown[1:], ("MismatchError", "SaveFailedError"), strict=True):
        assert codes == [1, 1], full
        assert full.count("Traceback (most recent call last)") == 1, full
        assert full.count("wrong shape:" if kind == "MismatchError" else "are not the same on all workers") <= 2, full
        assert "Traceback" not in brief
        assert re.search(rf"^holdfast\.errors\.{kind}: .* \(rank \d prints all of it\)\n\Z", brief, re.MULTILINE), brief


@pytest.mark.parametrize("victim", [0, 2])
def test_the_survivors_of_a_killed_worker_name_it(tmp_path: Path, victim: int) -> None:
    with Workers(tmp_path) as workers:
        start(workers, 3, tmp_path / "run", tmp_path / "store", "killed")
        for number in range(3):
            workers.wait_said(number, "committed", PATIENCE_SECONDS)
        workers.kill(victim, signal.SIGKILL)
        others = [number for number in range(3) if number != victim]
        assert workers.wait(PATIENCE_SECONDS, others) == [3, 3]
        promised = max(last(workers, number, "committed")["committed"] for number in range(3))
        for number in others:
            failed = last(workers, number, "failed")
            assert (failed["kind"], failed["rank"], failed["of"]) == ("PeerError", victim, "AbsentError"), failed
            assert re.match(rf"rank {victim} on \S+ has died: its process has ended", failed["text"]), failed
    assert check_whole(tmp_path / "run")[-1] >= promised


def test_a_worker_whose_disk_is_full(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start(workers, 3, tmp_path / "run", tmp_path / "store", "full")
        assert workers.wait(PATIENCE_SECONDS) == [0, 0, 0], "\n".join(workers.report(number) for number in range(3))
        for number in range(3):
            failures = [record for record in workers.records(number) if "failed" in record]
            (failed,) = failures
            assert failed["failed"] == 3
            if number == 1:
                assert failed["kind"] == "StorageFullError"
            else:
                assert (failed["kind"], failed["rank"], failed["of"]) == ("PeerError", 1, "StorageFullError")
                assert "EFBIG" in failed["text"]
    assert check_whole(tmp_path / "run") == [1, 2, 4, 5]


def test_two_jobs_in_one_directory(tmp_path: Path) -> None:
    """The one that came first ends, on all of its workers; the other goes on, and nothing is lost."""
    with Workers(tmp_path) as workers:
        start(workers, 2, tmp_path / "run", tmp_path / "store-1", "fenced")
        for number in (0, 1):
            workers.wait_said(number, "committed", PATIENCE_SECONDS)
        start(workers, 2, tmp_path / "run", tmp_path / "store-2", "fenced")
        assert workers.wait(PATIENCE_SECONDS, (0, 1)) == [4, 4], workers.report(0) + workers.report(1)
        for number in (0, 1):
            assert re.search(r"generation \d+ was opened by process \d+ on", last(workers, number, "failed")["text"])
        for number in (2, 3):
            begun = workers.wait_said(number, "begun", PATIENCE_SECONDS)
            workers.wait_said(number, "committed", PATIENCE_SECONDS)
            workers.kill(number)
        workers.wait(PATIENCE_SECONDS)
        promised = max(last(workers, number, "committed")["committed"] for number in (2, 3))
    living = check_whole(tmp_path / "run")
    assert living[: begun + 1] == list(range(1, begun + 2))
    assert living[-1] >= promised


# torchrun itself.


def train(
    workers: Workers, count: int, directory: Path, total: int, death: str = "-", restarts: int = 0
) -> list[dict[str, Any]]:
    """Runs a job to its end; gives what its workers have said."""
    number = workers.start(
        python(PROGRAMS / "elastic.py", "joint_training", str(count), str(restarts), directory, str(total), death),
        {"OMP_NUM_THREADS": "1"},
        preloaded.TrainingPopen,
    )
    assert workers.wait(2 * PATIENCE_SECONDS, [number]) == [0], workers.report(number)
    return workers.records(number)


def ends(records: list[dict[str, Any]]) -> dict[int, str]:
    return {record["rank"]: record["ended"] for record in records if "ended" in record}


@pytest.mark.slow
@pytest.mark.parametrize(("count", "death"), [(2, "0:7"), pytest.param(4, "3:8", marks=pytest.mark.long)])
def test_a_job_that_torchrun_restarts_ends_as_if_nothing_had_happened(tmp_path: Path, count: int, death: str) -> None:
    pytest.importorskip("torch")
    with Workers(tmp_path) as workers:
        untouched = ends(train(workers, count, tmp_path / "untouched", 10))
        records = train(workers, count, tmp_path / "killed", 10, death, restarts=1)
        assert len(untouched) == count
        assert ends(records) == untouched
        begun = {record["begun"] for record in records if record.get("start") == 1}
        # The save of step 6 may have been in flight.
        assert begun in ({3}, {6})
        check_whole(tmp_path / "killed")
        if count == 4:
            # The same job again has nothing left to do.
            again = train(workers, count, tmp_path / "killed", 10)
            assert {record["restored"] for record in again if "ended" in record} == {10}
            assert ends(again) == untouched
        else:
            # Behind its first save, which would fail.
            longer = train(workers, count, tmp_path / "killed", 16, "flip")
            told = [record for record in longer if "diverged" in record]
            assert [(record["diverged"], record["tensor"], record["ranks"]) for record in told] == [
                (15, "model/0.weight", [[0], [1]]),
                (16, "model/0.weight", [[0], [1]]),
            ]


# Kills at random moments.


@pytest.mark.slow
def test_workers_struck_at_random_moments(tmp_path: Path) -> None:
    rounds = repeated(10, in_gate=4)
    command = python("-m", "crash.joint", "--rounds", str(rounds), "--directory", tmp_path / "crash")
    done = subprocess.run(list(map(str, command)), cwd=TESTS, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{rounds} rounds" in done.stdout


def test_who_has_the_number_of_an_ended_worker_is_not_killed(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        workers.start(["true"])
        assert workers.wait(PATIENCE_SECONDS) == [0]
        stranger = start_as(workers.pid(0))
    try:
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(PATIENCE_SECONDS)


def start_as(number: int) -> subprocess.Popen[bytes]:
    """A process of that number, which is free, with a group of its own."""
    last_number = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(100):
        try:
            last_number.write_text(str(number - 1))
        except OSError:
            pytest.skip("who may choose the number of a process is root, on Linux")
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        if process.pid == number:
            return process
        process.kill()  # Another one was quicker.
        process.wait(PATIENCE_SECONDS)
    pytest.skip("others start too many processes")
