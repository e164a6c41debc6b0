"""What is asked of a running job from outside: to save, to stop, how it is; and who hears it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.catalog.requests import REQUESTS_DIRECTORY, RequestBox, RunRequest
from holdfast.errors import NotRunningError, OtherGenerationError, SaveFailedError, UnansweredError, UsageError
from holdfast.preemption.sources.asked import Asked, Condition
from holdfast.storage import LocalStorage
from holdfast.testing.processes import Workers, python
from patience import PATIENCE_SECONDS
from places import PROGRAMS
from preemption_jobs import Job, Jobs
from whole_runs import steps_of

LONG: dict[str, Any] = {"total": 100_000, "step_seconds": 0.01, "every": 10**9}


def holdfast(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


def wait_until(is_so: Callable[[], object], what: str) -> None:
    end_at = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end_at, what
        time.sleep(0.01)


def is_running(run: Path) -> bool:
    try:
        return hf.ask(run, "status").step > 0
    except NotRunningError:
        return False


def list_requests(run: Path) -> list[str]:
    return sorted(entry.name for entry in (run / REQUESTS_DIRECTORY).glob("*"))


def test_a_job_saves_stops_and_says_how_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(run, **LONG)
    job.wait_for("step 10")
    how = hf.ask(run, "status")
    assert (how.outcome, how.committed_step, how.process, how.workers) == ("done", None, job.process.pid, 1)
    assert how.step >= 10
    first = hf.ask(run, "save")
    assert first.committed_step in steps_of(run)
    assert (first.committed_step or 0) >= how.step
    told = holdfast("ask", run, "save", "--json")
    second = json.loads(told.stdout)
    assert (told.returncode, second["error"], second["may_hang"]) == (0, None, False)
    assert second["committed_step"] > first.committed_step
    stopped = holdfast("ask", run, "stop")
    assert job.end() == 130, job.errors
    last = steps_of(run)[-1]
    assert (stopped.returncode, stopped.stdout) == (0, f"step {last} of {run} is committed; the job exits\n")
    assert "asked to save and stop: finishing this step" in job.errors
    assert "leaving with exit code 130" in job.errors
    assert list_requests(run) == []
    gone = holdfast("ask", run, "status")
    assert (gone.returncode, gone.stdout) == (7, "")
    assert f"no job answers, and its newest checkpoint is step {last}" in gone.stderr
    with pytest.raises(NotRunningError):
        hf.ask(tmp_path / "elsewhere", "stop")
    assert not (tmp_path / "elsewhere").exists()


def test_a_request_without_a_job_stops_no_later_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert Job(run, total=2).end() == 0
    # The process that asked was killed, so it is not withdrawn.
    box = RequestBox(hf.open_storage(run))
    left = box.ask(RunRequest("stop", 1, "someone"))
    job = Job(run, **{**LONG, "total": 200})
    job.wait_for("step 10")
    reply = box.read_reply(left, "reply")
    assert reply is not None
    assert reply.outcome == "declined"
    # And one that means another start, which this job is not.
    hf.ask(run, "save")
    late = box.ask(RunRequest("stop", 0, "someone"))
    wait_until(lambda: box.read_reply(late, "reply"), "it is declined")
    declined = box.read_reply(late, "reply")
    assert declined is not None
    assert declined.problem.startswith("it was meant for generation 0")
    with pytest.raises(OtherGenerationError, match="generation 2, not 1"):
        hf.ask(run, "stop", generation=1)
    assert holdfast("ask", run, "stop", "--generation", 1).returncode == 9
    assert hf.ask(run, "status", generation=2).outcome == "done"
    assert job.end() == 0, job.errors


def test_a_job_that_hangs_differs_from_one_that_has_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(run, pause=[4], **LONG)
    job.wait_for("paused")
    # It is in a step that does not end: it hears the request, and carries it out when the step has ended.
    silent = holdfast("ask", run, "save", "--timeout", "1")
    assert silent.returncode == 8
    assert "heard the request, and has not done it within 1 s: after step 4, " in silent.stderr
    # Stopped, it hears nothing.
    job.send(signal.SIGSTOP)
    with pytest.raises(UnansweredError, match=f"process {job.process.pid} on .* has this run open, and does not ans"):
        hf.ask(run, "status")
    job.send(signal.SIGCONT)
    job.go_on()
    wait_until(lambda: run.exists() and 5 in steps_of(run), "what was asked for is done when the step has ended")
    job.send(signal.SIGKILL)
    job.end()
    with pytest.raises(NotRunningError):
        hf.ask(run, "stop")


def test_a_job_that_dies_with_a_request_is_noticed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(run, pause=[4], **LONG)
    job.wait_for("paused")
    asking = subprocess.Popen([sys.executable, "-m", "holdfast", "ask", str(run), "stop"], stderr=subprocess.PIPE)
    wait_until(lambda: any(name.endswith("heard.json") for name in list_requests(run)), "it is heard")
    job.send(signal.SIGKILL)
    _, said = asking.communicate(timeout=PATIENCE_SECONDS)
    assert asking.returncode == 7
    assert b"has ended without a reply" in said
    assert [name for name in list_requests(run) if not name.endswith(".tmp")] == []
    job.end()


def test_a_save_that_fails_is_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = Job(run, save_fn="raises", **LONG)
    job.wait_for("step 10")
    with pytest.raises(SaveFailedError, match="the save failed"):
        hf.ask(run, "save")
    assert holdfast("ask", run, "stop").returncode == 4
    assert job.end() == 74, job.errors


@pytest.mark.parametrize("lockstep", [False, True])
def test_all_workers_act_at_the_same_step(tmp_path: Path, lockstep: bool) -> None:
    run = tmp_path / "run"
    with Jobs(run, 2, lockstep=lockstep, **LONG) as jobs:
        for job in jobs.workers:
            job.wait_for("step 10")
        assert hf.ask(run, "status").workers == 2
        saved = hf.ask(run, "save")
        assert steps_of(run) == [saved.committed_step]
        stopped = hf.ask(run, "stop")
        assert jobs.end() == [130, 130], jobs.report()
        assert steps_of(run) == [saved.committed_step, stopped.committed_step]
        for job in jobs.workers:
            assert f"step {stopped.committed_step} is saved; leaving with exit code 130" in job.errors


@pytest.mark.slow
def test_workers_of_torchrun_stop_together(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = tmp_path / "run"
    options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.1"]
    program: list[str | Path] = [PROGRAMS / "stopping_training.py", run, "100000", "-"]
    with Workers(tmp_path) as workers:
        job = workers.start(python("-m", "torch.distributed.run", *options, *program), {"OMP_NUM_THREADS": "1"})
        wait_until(lambda: is_running(run), workers.report(job))
        reply = hf.ask(run, "stop")
        assert reply.workers == 2
        assert workers.wait(PATIENCE_SECONDS) == [1], workers.report(job)  # What torchrun says of any exit code.
        assert workers.errors(job).count(f"step {reply.committed_step} is saved; leaving with exit code 130") == 2
        assert steps_of(run)[-1] == reply.committed_step


def test_other_files_among_requests_stay(tmp_path: Path) -> None:
    run, box = tmp_path / "run", RequestBox(hf.open_storage(tmp_path / "run"))
    job = Job(run, **LONG)
    job.wait_for("step 10")
    (run / REQUESTS_DIRECTORY).mkdir()
    foreign: dict[str, bytes] = {
        "notes.txt": b"mine",
        f"{'a' * 16}.request.json": b"{" * 5000,
        f"{'b' * 16}.request.json": b'{"holdfast": "request"}',
        f"{'c' * 16}.heard.json": b"",
    }
    for name, data in foreign.items():
        (run / REQUESTS_DIRECTORY / name).write_bytes(data)
    (run / REQUESTS_DIRECTORY / f"{'d' * 16}.request.json").symlink_to("/dev/zero")
    os.mkfifo(run / REQUESTS_DIRECTORY / f"{'e' * 16}.request.json")
    assert hf.ask(run, "status").outcome == "done"
    assert box.read("a" * 16) is None
    hf.ask(run, "stop")
    assert job.end() == 130
    assert set(foreign) <= set(list_requests(run))


def test_the_directory_of_requests_has_the_permissions_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o750)
    run.chmod(0o2770)
    RequestBox(hf.open_storage(run)).ask(RunRequest("status", 0, "someone"))
    assert (run / REQUESTS_DIRECTORY).stat().st_mode & 0o7777 == 0o2770


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    command: Any = "pause"
    with pytest.raises(UsageError, match='must be "save", "stop" or "status"'):
        hf.ask(tmp_path, command)
    with pytest.raises(UsageError, match="cannot be seen by other processes"):
        hf.ask("memory://run", "stop")
    assert StoredRun(hf.open_storage(tmp_path)).list_generations() == []
    assert "a run is expected here" in holdfast("ask", f"{tmp_path}/run@5", "stop").stderr


def test_a_request_is_small_and_whole() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"command": "erase", "generation": 1, "asked_by": "x"}', type=RunRequest)


class CutInStorage(LocalStorage):
    """Lets a person withdraw a request in the moment in which the job replies that it was heard."""

    def publish(self, path: str, data: bytes) -> bool:
        is_new = super().publish(path, data)
        if path.endswith(".heard.json"):
            self.delete([path.replace("heard", "request")])
        return is_new


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_a_job_does_nothing_that_was_withdrawn_before_it_was_heard(tmp_path: Path, is_withdrawn: bool) -> None:
    storage = CutInStorage(tmp_path) if is_withdrawn else LocalStorage(tmp_path)
    with hf.CheckpointManager(storage, hf.Checkpoint(x=1)) as manager:
        condition = Condition(1, None, None, "training", ())
        source = Asked(manager.lineage, manager.worker, lambda: condition)
        assert list(source.look()) == []
        RequestBox(storage).ask(RunRequest("stop", 0, "someone"))
        assert len(list(source.look())) == (not is_withdrawn)


def test_asking_in_a_wrong_directory_changes_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError):
        hf.ask(tmp_path, "status")
    assert list(tmp_path.iterdir()) == []
