"""Jobs that are asked to leave: real processes and real signals, at every moment; what was promised comes back."""

# ruff: noqa: PT012  The exit comes out of the loop, wherever that is.

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
import preloaded
from command_line import run_file
from holdfast.catalog import StoredRun
from holdfast.errors import ClosedError, DeadlineError, HoldfastError, MismatchError, UsageError
from holdfast.events import AnyEvent, Committed, Event, Leaving, NoticeHeard, Staged, Warned, read_events
from holdfast.preemption import Demand, Notice, PolledSource, Signals
from holdfast.preemption.sources.signals import DEFAULT_SIGNALS
from holdfast.state.data.sampler import ResumableSampler
from holdfast.storage import LocalStorage
from holdfast.storage.local.streams import LocalWriter
from holdfast.training.run import Run
from patience import PATIENCE_SECONDS
from places import PROGRAMS
from preemption_jobs import TOTAL, Job
from whole_runs import steps_of

LOOPS = ["resumable", "run", "steps", "own"]


@pytest.fixture
def handlers_kept() -> Iterator[None]:
    """What a process that is to end leaves in place is taken away: this one goes on."""
    before = {number: signal.getsignal(number) for number in DEFAULT_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """The jobs of a test, none of which outlives it."""
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
        job.process.communicate(timeout=PATIENCE_SECONDS)


def events_of(directory: Path) -> list[AnyEvent]:
    return list(read_events(directory / "events.jsonl"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the job has learned at its end when nobody asks it to leave, by its number of steps."""
    found = {}
    for total in (TOTAL, 40):
        job = Job(tmp_path_factory.mktemp("uninterrupted"), total=total)
        assert job.end() == 0, job.errors
        found[total] = job.said[-1]
    return found


def notify(job: Job, jobs: list[Job], number: int = signal.SIGTERM) -> None:
    """Sends a signal where the job pauses, and leaves it there."""
    jobs.append(job)
    job.wait_for("paused")
    job.send(number)


def check_the_rest(directory: Path, expected: str, **options: Any) -> None:
    """A restart comes to the same end as a job that nobody has asked to leave."""
    job = Job(directory, **options)
    assert job.end() == 0, job.errors
    assert job.said[-1] == expected


# A signal at each moment.


@pytest.mark.parametrize(
    ("loop", "step"),
    # The handler of a loop of one's own cannot know that its first step has begun.
    [
        pytest.param(loop, step, marks=[] if loop == "resumable" or step in (0, TOTAL - 1) else pytest.mark.long)
        for loop in LOOPS
        for step in (0, 4, TOTAL - 2, TOTAL - 1)
        if (loop, step) != ("own", 0)
    ],
)
def test_step_in_progress_ends_and_is_saved_and_the_restart_resumes(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str, step: int
) -> None:
    job = Job(tmp_path, loop=loop, pause=[step])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert f"step {step + 1} is saved; leaving with exit code 42" in job.errors
    assert steps_of(tmp_path) == [step + 1]
    check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 42), (signal.SIGUSR2, 42), (signal.SIGTERM, 42)]
)
def test_each_signal_is_received(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], number: int, code: int
) -> None:
    job = Job(tmp_path, pause=[3])
    notify(job, jobs, number)
    job.go_on()
    assert job.end() == code, job.errors
    assert steps_of(tmp_path) == [4]
    check_the_rest(tmp_path, uninterrupted[TOTAL])


@pytest.mark.parametrize("loop", ["resumable", "run", "steps"])
def test_a_signal_in_evaluation_is_not_lost(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    job = Job(tmp_path, loop=loop, pause=["evaluation"], evaluate=[5])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [6]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_signal_before_the_first_step_leaves_at_once(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    job = Job(tmp_path, loop=loop, pause=["before"])
    notify(job, jobs)
    # Nobody goes on: it leaves from the middle of the wait.
    assert job.end() == 42, job.errors
    assert "no progress is lost: nothing was completed" in job.errors
    assert steps_of(tmp_path) == []


def test_a_signal_while_the_run_is_made_is_acted_on_when_that_is_done(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=["looking"])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert "no progress is lost: nothing was completed" in job.errors


def test_signal_while_run_is_made_too_long_leaves_without_it(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=["looking"])
    notify(job, jobs)
    # No worker goes on.
    assert job.end() == 42, job.errors
    assert "while the run was being created, which did not end within 2 s" in job.errors


def test_a_run_that_is_made_within_another_takes_no_signal_from_it(tmp_path: Path, handlers_kept: None) -> None:
    state = {"values": np.zeros(10)}
    termination = hf.TerminationConfig(sources=[Signals()])
    with (
        pytest.raises(SystemExit) as leaving,
        hf.resumable(tmp_path / "outer", state=state, preemption=termination) as run,
    ):
        for _ in run.steps(2):
            hf.resumable(tmp_path / "inner", state=state, preemption=termination)
            signal.raise_signal(signal.SIGTERM)
    assert leaving.value.code == 42


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_while_the_making_of_a_run_fails(tmp_path: Path, jobs: list[Job], number: int, code: int) -> None:
    job = Job(tmp_path, pause=["looking"], look_fails=True)
    notify(job, jobs, number)
    job.go_on()
    assert job.end() == code, job.errors
    assert ("the run was being created, which then failed: StorageError: it is gone" in job.errors) == (code == 42)


@pytest.mark.parametrize("loop", LOOPS)
def test_signal_during_the_restore_loses_nothing(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    job = Job(tmp_path, loop=loop, pause=[4])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    job = Job(tmp_path, loop=loop, pause=["restore"])
    notify(job, jobs)
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [5]
    check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


def test_a_signal_after_the_loop_leaves_when_all_is_saved(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str]
) -> None:
    job = Job(tmp_path, pause=["after"])
    notify(job, jobs)
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [TOTAL]
    check_the_rest(tmp_path, uninterrupted[TOTAL])


@pytest.mark.parametrize("loop", ["run", "steps", "own"])
def test_signal_after_loop_of_handler_is_acted_on_when_it_is_closed(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    job = Job(tmp_path, loop=loop, pause=["after"])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [TOTAL]
    check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_signal_after_the_block_has_its_default_effect(tmp_path: Path, jobs: list[Job], loop: str) -> None:
    job = Job(tmp_path, loop=loop, pause=["outside"])
    notify(job, jobs)
    assert job.end() == -signal.SIGTERM
    assert steps_of(tmp_path) == [TOTAL]


def test_the_users_handler_is_called_as_well(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[3, "outside"], signals_before=True)
    notify(job, jobs)
    job.wait_for("mine")
    job.go_on()
    assert job.end() == 42, job.errors


def test_a_handler_that_is_closed_does_not_wait_for_ever_for_a_save(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Held(LocalStorage):
        def create(self, path: str, size_bytes: int) -> LocalWriter:
            assert go_on.wait(PATIENCE_SECONDS)
            return super().create(path, size_bytes)

    state = {"value": np.zeros(3)}
    manager = hf.CheckpointManager(Held(tmp_path), hf.Checkpoint(state=state), timeout_seconds=0.5)
    handler = hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[]))
    manager.save(1)
    with pytest.raises(DeadlineError, match=r"the save in progress did not end within 0\.5 s"):
        handler.close()
    go_on.set()
    manager.wait(PATIENCE_SECONDS)
    manager.close()
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("loop", ["resumable", "run", "own"])
def test_notice_with_time_leaves_with_block_if_no_step_is_left(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    """The code behind the block would hear of it too late: nobody repeats it."""
    job = Job(tmp_path, loop=loop, grace=600, pause=[TOTAL - 1])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [TOTAL]
    check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


@pytest.mark.parametrize(
    ("loop", "options"), [("resumable", {"return_after": 5}), ("run", {"saves_last": True, "return_after": 5})]
)
def test_a_signal_while_the_last_save_is_written(
    tmp_path: Path, jobs: list[Job], loop: str, options: dict[str, Any]
) -> None:
    job = Job(tmp_path, loop=loop, disk_seconds=2.0, **options)
    jobs.append(job)
    job.wait_for("event Staged 5")
    job.send(signal.SIGTERM)
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [5]


# More than one signal.


def test_repeated_signals_end_the_step_and_save_it(tmp_path: Path, jobs: list[Job]) -> None:
    """Slurm signals a worker twice at a preemption, a launcher passes its own on, and Slurm repeats it at the end."""
    job = Job(tmp_path, pause=[3])
    jobs.append(job)
    job.wait_for("paused")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        job.send(number)
        job.wait_for_error(signal.Signals(number).name)
    for _ in range(3):
        job.send(signal.SIGTERM)
        job.send(signal.SIGUSR2)
    job.go_on()
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [4]


def test_signals_on_the_way_out_do_not_change_the_exit_code(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[3])
    jobs.append(job)
    job.wait_for("paused")
    job.send(signal.SIGTERM)
    job.go_on()
    job.wait_for_error("leaving with exit code 42")
    while job.process.poll() is None:
        job.send(signal.SIGTERM)
    assert job.end() == 42, job.errors


def test_exit_caught_in_block_leaves_with_block_and_is_logged_once(tmp_path: Path) -> None:
    done = run_file("exits", "catch exit in block", tmp_path)
    assert (done.returncode, done.stdout) == (42, "caught\n"), done.stderr
    assert done.stderr.count("step 5 is saved; leaving with exit code 42") == 1


@pytest.mark.parametrize("sources", ["auto", "config"])
def test_program_that_catches_exit_can_be_asked_again(tmp_path: Path, sources: str) -> None:
    done = run_file("exits", "catch exits", tmp_path, sources)
    assert (done.returncode, done.stdout) == (0, "42 3\n42 6\n"), done.stderr


def test_signal_with_handler_set_in_run_does_not_count(tmp_path: Path) -> None:
    done = run_file("exits", "set own handler", tmp_path)
    assert done.returncode == 42, done.stderr
    assert steps_of(tmp_path) == [5]


def test_signals_handled_at_once_in_the_end_count_once(tmp_path: Path) -> None:
    done = run_file("foreign_code", "three at once", tmp_path)
    assert done.returncode == 42, done.stderr
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_in_foreign_code_is_received_and_counts_once(tmp_path: Path, number: int) -> None:
    done = run_file("foreign_code", "until heard", tmp_path, str(int(number)))
    name = signal.Signals(number).name
    called = [] if number == signal.SIGINT else [3]
    assert done.returncode == 42, done.stderr
    assert done.stdout.splitlines() == [
        f"{name} False []",
        f"went on in 3 {called}",
        f"SIGUSR1 True {called}",
        f"went on in 6 {called}",
    ]


def test_two_signals_in_foreign_code_count_and_third_has_no_effect(tmp_path: Path) -> None:
    done = run_file("foreign_code", "two and one", tmp_path)
    assert done.returncode == 42, done.stderr
    assert done.stdout.splitlines() == ["SIGTERM False", "SIGTERM True"]
    assert steps_of(tmp_path) == [1]


def test_handler_not_set_by_python_stays(tmp_path: Path) -> None:
    done = run_file("exits", "keep foreign handlers", tmp_path)
    assert done.returncode == 42, done.stderr
    assert steps_of(tmp_path) == [3, 5]
    assert done.stdout == "SIGUSR1 is ignored: its handler was not installed from Python, and stays in place\n"
    assert done.stderr.count("most recent call first") == 3 + 1 + 1


# Nobody reads what it says.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_job_with_closed_stderr_saves_and_leaves(tmp_path: Path, jobs: list[Job], number: int) -> None:
    job = Job(tmp_path, pause=[3])
    jobs.append(job)
    job.wait_for("paused")
    assert job.process.stderr is not None
    # As when `tee` ends by the same Ctrl-C.
    job.process.stderr.close()
    job.send(number)
    job.go_on()
    assert job.end() == (130 if number == signal.SIGINT else 42)
    assert steps_of(tmp_path) == [4]


@pytest.mark.parametrize("way", ["closed", "none", "descriptor closed", "broken"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_job_without_stream_for_errors_saves_and_leaves(tmp_path: Path, number: int, way: str) -> None:
    done = run_file("exits", "lose errors", tmp_path, way, str(int(number)))
    assert done.returncode == (130 if number == signal.SIGINT else 42), done.stderr
    assert steps_of(tmp_path) == [5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("code", [42, 74])
@pytest.mark.parametrize("stream", [1, 2])
def test_job_whose_log_is_full_leaves_with_its_code(tmp_path: Path, stream: int, code: int) -> None:
    done = run_file("exits", "fill log", tmp_path, str(stream), str(code))
    assert done.returncode == code, done.stderr
    assert steps_of(tmp_path) == ([5] if code == 42 else [])
    if stream == 1:
        assert all(line.startswith("holdfast: ") for line in done.stderr.splitlines()), done.stderr
        assert "holdfast: SIGTERM was sent to process" in done.stderr


# Time that is left.


def begin_grace(job: Job, jobs: list[Job]) -> None:
    """Sends a signal in the first step, and waits for the save that follows it."""
    notify(job, jobs)
    job.go_on()
    job.wait_for("event Committed")


def test_a_second_signal_ends_the_grace_period(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[0], total=10**9, step_seconds=0.001, grace=3600)
    begin_grace(job, jobs)
    job.send(signal.SIGUSR1)
    assert job.end() == 42, job.errors
    first, last = steps_of(tmp_path)
    assert first == 1
    assert last > 1, "it trained on until the second signal"


@pytest.mark.parametrize("loop", ["resumable", "own"])
def test_within_the_grace_period_it_is_saved_at_once_and_again(tmp_path: Path, jobs: list[Job], loop: str) -> None:
    job = Job(tmp_path, loop=loop, pause=[1], total=10**9, step_seconds=0.01, grace=6)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    first, *later = steps_of(tmp_path)
    assert first == 2
    # On a busy machine there may be no time for another one.
    assert len(later) <= 1
    leaving = [event for event in events_of(tmp_path) if isinstance(event, Leaving)]
    assert ["may take" in event.reason for event in leaving] == [True]


def test_a_step_that_cannot_end_in_time_is_not_begun(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[1], step_seconds=3, grace=8)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [2], "a save, and no step for which there is no time"


def test_a_save_that_cannot_end_in_time_is_not_begun(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[3], every=2, total=10**9, step_seconds=0.05, disk_seconds=1.0, grace=9)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    leaving = [event for event in events_of(tmp_path) if isinstance(event, Leaving)]
    assert [(event.step, event.error) for event in leaving] == [(steps_of(tmp_path)[-1], "")]


# Leaving otherwise.


@pytest.mark.parametrize("loop", LOOPS)
def test_exit_fn_that_returns_lets_training_go_on_to_a_later_notice(tmp_path: Path, jobs: list[Job], loop: str) -> None:
    job = Job(tmp_path, loop=loop, pause=[2, 5, 7], returns=2)
    jobs.append(job)
    for _ in range(3):
        job.wait_for("paused")
        job.send(signal.SIGTERM)
        job.go_on()
    assert job.end() == 7, job.errors
    assert job.said.count("exit_fn") == 3
    assert steps_of(tmp_path) == [3, 6, 8]


def test_another_exit_code(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[2], exit_code=99)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 99


@pytest.mark.parametrize("loop", LOOPS)
def test_a_disk_that_is_full_then_has_an_exit_code_of_its_own(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    # What the checkpoint at step 4 needs, but not the one at step 6: nothing may be as large as that from then on.
    job = Job(tmp_path, loop=loop, pause=[3], size=1000)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    job = Job(tmp_path, loop=loop, pause=[5], file_bytes=5000)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 74
    assert "step 6 could NOT be saved" in job.errors
    assert "the newest checkpoint is step 4; leaving with exit code 74" in job.errors
    assert steps_of(tmp_path) == [4]
    check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_full_disk_in_grace_period_ends_training_only_with_last_save(
    tmp_path: Path, jobs: list[Job], loop: str
) -> None:
    job = Job(tmp_path, loop=loop, grace=600, pause=[1], every=2, file_bytes=5000)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 74, job.errors
    assert "Traceback" not in job.errors
    assert f"step {TOTAL} could NOT be saved" in job.errors
    assert "there is no checkpoint; leaving with exit code 74" in job.errors
    assert steps_of(tmp_path) == []


@pytest.mark.parametrize(("loop", "place"), [*((loop, 5) for loop in LOOPS), ("resumable", "evaluation")])
def test_late_last_save_is_waited_for_and_its_result_is_reported(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str, place: Any
) -> None:
    is_resting = place == "evaluation"
    job = Job(tmp_path, loop=loop, pause=[place, "publishing"], grace=1, evaluate=[5] * is_resting, checkpointable=True)
    notify(job, jobs)
    if not is_resting:
        job.go_on()
    job.wait_for_error("holdfast: step 6 is not saved yet")
    for _ in range(1 + is_resting):
        job.go_on()
    assert job.end() == 42, job.errors
    assert "holdfast: step 6 is saved; leaving with exit code 42" in job.errors
    assert steps_of(tmp_path) == [6]
    check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


def test_a_failed_save_does_not_call_exit_fn(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[5], file_bytes=5000, returns=0)
    notify(job, jobs)
    job.go_on()
    assert job.end() == 74
    assert "exit_fn" not in job.said
    assert "there is no checkpoint" in job.errors


# Other sources.


@pytest.mark.parametrize("loop", LOOPS)
def test_a_watcher_that_raises_is_asked_again(tmp_path: Path, jobs: list[Job], loop: str) -> None:
    job = Job(tmp_path, loop=loop, watcher=True, total=10**9, step_seconds=0.001)
    jobs.append(job)
    assert job.end() == 42, job.errors
    warned = [event.text for event in events_of(tmp_path) if isinstance(event, Warned)]
    assert [text for text in warned if "ZeroDivisionError: a watcher that raises" in text]
    assert len(steps_of(tmp_path)) == 1


def test_a_file_that_appears_stops_the_job(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path / "run", file=str(tmp_path / "stop"), pause=[2], total=10**9, step_seconds=0.001)
    jobs.append(job)
    job.wait_for("paused")
    (tmp_path / "stop").touch()
    job.go_on()
    assert job.end() == 42, job.errors
    assert [event.source for event in events_of(tmp_path / "run") if isinstance(event, NoticeHeard)] == ["file"]


# Outside of steps.


@pytest.mark.parametrize("loop", ["resumable", "run", "steps"])
def test_checkpointable_block_is_saved_and_left_in_its_middle(
    tmp_path: Path, jobs: list[Job], uninterrupted: dict[int, str], loop: str
) -> None:
    job = Job(tmp_path, loop=loop, pause=["evaluation"], evaluate=[4], checkpointable=True)
    notify(job, jobs)
    # No worker goes on.
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [5]
    if loop != "steps":
        # Each run evaluates and uses the generator there; one that is restarted begins behind it.
        check_the_rest(tmp_path, uninterrupted[TOTAL], loop=loop)


def test_a_state_that_is_found_changed_is_not_saved_but_waited_for(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=["evaluation"], evaluate=[4], checkpointable=True, change=True)
    notify(job, jobs)
    job.wait_for_error("cannot be saved while the loop is paused")
    job.go_on()
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [5]


def test_step_saved_in_its_block_only_is_not_said_to_be_saved(tmp_path: Path, jobs: list[Job]) -> None:
    """The disk is full when the step is to be saved as it is at its end."""
    disk: dict[str, Any] = {"file_bytes": 4000, "file_bytes_from": "Committed"}
    options: dict[str, Any] = {"pause": ["evaluation", "behind"], "evaluate": [4], "checkpointable": True, **disk}
    job = Job(tmp_path / "run", change_behind=True, advice=str(tmp_path / "advice"), **options)
    jobs.append(job)
    job.wait_for("paused")
    (tmp_path / "advice").touch()
    job.wait_for("event Committed 5")
    job.go_on()
    notify(job, jobs)
    job.go_on()
    assert job.end() == 74, job.errors
    assert "step 5 could NOT be saved" in job.errors
    assert "the newest checkpoint is step 5; leaving with exit code 74" in job.errors
    assert steps_of(tmp_path / "run") == [5]


def test_block_in_a_grace_period_is_saved_and_continues(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=["evaluation"], evaluate=[4], checkpointable=True, grace=3600)
    notify(job, jobs)
    job.wait_for("event Committed")
    job.go_on()
    # In the time that is left it comes to its end.
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [5, TOTAL]


def test_steps_with_a_block_in_each_are_timed(tmp_path: Path, jobs: list[Job]) -> None:
    """Without a time of theirs, nobody would know whether another one fits into what is left."""
    job = Job(tmp_path, pause=[3], evaluate=list(range(1000)), checkpointable=True, total=10**9, grace=3600)
    notify(job, jobs)
    job.go_on()
    job.wait_for("step 20")
    job.send(signal.SIGTERM)
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path)[0] == 4


def test_block_is_saved_although_a_save_before_has_failed(tmp_path: Path, jobs: list[Job]) -> None:
    options: dict[str, Any] = {"evaluate": [2], "checkpointable": True, "pause": [2, "evaluation"]}
    job = Job(tmp_path, every=2, file_bytes=5000, file_bytes_until="Failed", **options)
    jobs.append(job)
    job.wait_for("event Failed")
    if "paused" not in job.said:
        job.wait_for("paused")
    job.go_on()
    job.wait_for("paused")
    job.send(signal.SIGTERM)
    assert job.end() == 42, job.errors
    assert steps_of(tmp_path) == [3]


def test_should_stop_is_true_when_the_job_is_to_leave(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, pause=[4])
    notify(job, jobs)
    job.go_on()
    assert job.end() == 42, job.errors
    assert job.said.count("should stop") == 1


# Within this process.


class Spoken(PolledSource):
    """Says what the test wants, when the test wants it."""

    name = "spoken"
    interval_seconds = None

    def __init__(self) -> None:
        self.left = 0

    def open(self, hear: Any) -> None:
        self.hear = hear

    def look(self) -> tuple[Notice, ...]:
        return ()

    def note_leaving(self) -> None:
        self.left += 1

    def say(self, demand: Demand = Demand.LEAVE, left_seconds: float | None = None) -> None:
        assert self.hear(Notice(source="spoken", text="go", demand=demand, left_seconds=left_seconds))


def manager_of(place: Path, **options: Any) -> tuple[hf.CheckpointManager, dict[str, Any]]:
    state = {"value": np.zeros(4)}
    return hf.CheckpointManager(place, hf.Checkpoint(state=state), keep=hf.All(), **options), state


def test_advice_saves_and_does_not_stop(tmp_path: Path) -> None:
    source = Spoken()
    state = {"value": np.zeros(4)}
    termination = hf.TerminationConfig(sources=[source])
    with hf.resumable(tmp_path, state=state, save_every=hf.Steps(100), keep=hf.All(), preemption=termination) as run:
        for step in run.steps(6):
            state["value"] += 1
            if step in (1, 3):
                source.say(Demand.SAVE)
                assert not run.should_stop()
    assert steps_of(tmp_path) == [2, 4, 6]
    assert source.left == 0


def test_watcher_with_an_invalid_notice_is_reported_and_asked_again(tmp_path: Path) -> None:
    lefts: list[Any] = ["30", 0]

    def watch() -> Notice:
        return Notice(source="mine", text="go", demand=Demand.LEAVE_BY, left_seconds=lefts.pop(0))

    state = {"value": np.zeros(4)}
    termination = hf.TerminationConfig(sources=[], termination_watcher_fn=watch)
    with pytest.raises(SystemExit) as leaving:
        with hf.resumable(tmp_path, state=state, save_every=hf.Steps(9**9), preemption=termination) as run:
            for _ in run.steps(10**9):
                state["value"] += 1
    assert leaving.value.code == 42
    assert len(steps_of(tmp_path)) == 1
    warned = [event.text for event in events_of(tmp_path) if isinstance(event, Warned)]
    assert any("UsageError: left_seconds must be a number of seconds, got '30'" in text for text in warned), warned


def test_a_deadline_of_the_source_is_kept_by_itself(tmp_path: Path) -> None:
    source = Spoken()
    state = {"value": np.zeros(4)}
    termination = hf.TerminationConfig(sources=[source])
    done: list[int] = []
    with pytest.raises(SystemExit) as leaving:
        with hf.resumable(
            tmp_path, state=state, save_every=hf.Steps(9**9), keep=hf.All(), preemption=termination
        ) as run:
            for step in run.steps(10**9):
                state["value"] += 1
                done.append(step)
                if step == 1:
                    source.say(Demand.LEAVE_BY, left_seconds=2.5)
    assert leaving.value.code == 42
    assert steps_of(tmp_path)[0] == 2
    assert len(done) >= 2
    assert source.left == 1


def test_save_fn_gets_what_the_handler_is_given(tmp_path: Path) -> None:
    source = Spoken()
    manager, _ = manager_of(tmp_path)
    calls: list[Any] = []

    def save(*args: Any, **kwargs: Any) -> hf.SaveHandle:
        calls.append((args, kwargs))
        return manager.save(handler.total_run_calls)

    handler = hf.PreemptionCheckpointHandler(
        manager, termination_config=hf.TerminationConfig(sources=[source], save_fn=save, exit_code=5)
    )
    with manager, pytest.raises(SystemExit) as leaving, handler:
        handler.save_checkpoint_if_preempted("a", b=1)
        source.say()
        handler.save_checkpoint_if_preempted("c", d=2)
    assert leaving.value.code == 5
    assert calls == [(("c",), {"d": 2})]
    assert steps_of(tmp_path) == [2]


def test_a_save_fn_that_raises_is_a_failed_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Spoken()
    manager, _ = manager_of(tmp_path)

    def fail() -> None:
        raise ZeroDivisionError("of the user's")

    termination = hf.TerminationConfig(sources=[source], save_fn=fail)
    with manager, pytest.raises(SystemExit) as leaving:
        with hf.PreemptionCheckpointHandler(manager, termination_config=termination) as handler:
            handler.run(source.say)
    assert leaving.value.code == 74
    assert "ZeroDivisionError: of the user's" in capsys.readouterr().err


def test_run_gives_what_the_function_gives_and_raises_what_it_raises(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        assert handler.run(divmod, 7, 2) == (3, 1)
        assert handler.run(dict, a=5) == {"a": 5}
        with pytest.raises(ZeroDivisionError):
            handler.run(divmod, 1, 0)
        assert handler.total_run_calls == 2, "a step that failed is not complete"
        manager.save(handler.total_run_calls)


def test_restored_count_returns_and_step_times_start_over(tmp_path: Path) -> None:
    for life in range(3):
        manager, state = manager_of(tmp_path, save_every=hf.Steps(2))
        with manager, hf.PreemptionCheckpointHandler(manager) as handler:
            assert handler.total_run_calls == 4 * life
            assert (handler.restored is None) is (life == 0)
            for _ in range(4):
                handler.run(state["value"].__iadd__, 1)
            manager.save_if_due(handler.total_run_calls)
    assert steps_of(tmp_path) == [2, 4, 6, 8, 10, 12]


class Count:
    """What a handler of an earlier version kept, under a name that a user's object might have had."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_the_count_of_a_handler_is_never_in_the_way(tmp_path: Path) -> None:
    handled, plain, old, mine = (tmp_path / name for name in ("handled", "plain", "old", "mine"))
    manager, state = manager_of(handled)
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        for _ in range(3):
            handler.run(state["value"].__iadd__, 1)
        manager.save(30)
        assert list(manager.checkpoint) == list(manager.checkpoint.objects) == ["state"]
        # One checkpoint for both, as is advised for backups of epochs.
        with hf.WorkerTrainingState(tmp_path / "backup", manager.checkpoint) as backups:
            backups.restore()
            backups.back_up(0)
    with manager_of(plain)[0] as manager:
        manager.save(30)
    with hf.CheckpointManager(old, hf.Checkpoint(state=state, total_run_calls=Count(3))) as manager:
        manager.save(30)
    objects = {"state": state, "total_run_calls": Count(7)}
    with hf.CheckpointManager(mine, hf.Checkpoint(**objects)) as manager:
        manager.save(30)
    # What knows nothing of a handler restores what one has saved, and does not see its count.
    for place in (handled, old):
        manager, state = manager_of(place)
        restored = manager.restore()
        assert restored is not None
        assert not restored.differences
        assert state["value"][0] == 3
        with hf.resumable(place, state={"value": np.zeros(4)}, preemption="off") as run:
            assert run.step == 30
    manager, state = manager_of(tmp_path / "other")
    with hf.WorkerTrainingState(tmp_path / "backup", manager.checkpoint) as backups:
        assert backups.restore() is not None
        assert state["value"][0] == 3
    # A handler restores what was saved with a count or without, whether or not something was restored before it.
    for place, count in ((handled, 3), (plain, 30), (old, 3)):
        for is_restored in (False, True):
            manager, _ = manager_of(place)
            if is_restored:
                manager.restore()
            with manager, hf.PreemptionCheckpointHandler(manager) as handler:
                assert handler.total_run_calls == count
                with hf.WorkerTrainingState(tmp_path / "backup", manager.checkpoint) as backups:
                    assert backups.restore() is not None
    # A user's object may have the handler's word for a name.
    with (
        hf.CheckpointManager(mine, hf.Checkpoint(state={"value": np.zeros(4)}, total_run_calls=Count(0))) as manager,
        hf.PreemptionCheckpointHandler(manager) as handler,
    ):
        assert (handler.total_run_calls, manager.checkpoint.total_run_calls.count) == (30, 7)
    # What differs is an error, the count or not.
    manager = hf.CheckpointManager(handled, hf.Checkpoint(other=1))
    with manager, pytest.raises(MismatchError, match="other") as caught:
        hf.PreemptionCheckpointHandler(manager)
    assert caught.value.differences.missing == ["other"]


def test_handlers_of_one_checkpoint_have_one_count(tmp_path: Path) -> None:
    for life in range(2):
        manager, _ = manager_of(tmp_path)
        with manager:
            with hf.PreemptionCheckpointHandler(manager) as first:
                first.run(print, end="")
            with hf.PreemptionCheckpointHandler(manager) as second:
                second.run(print, end="")
            assert first.total_run_calls == second.total_run_calls == 2 * (life + 1)
            manager.save(first.total_run_calls)


@pytest.mark.parametrize("config", [None, hf.TerminationConfig(sources=[])])
def test_second_handler_of_a_manager_is_refused(tmp_path: Path, config: hf.TerminationConfig | None) -> None:
    manager, _ = manager_of(tmp_path)
    with manager:
        with hf.PreemptionCheckpointHandler(manager, config) as first:
            with pytest.raises(UsageError, match="another run or handler of this CheckpointManager is open") as refused:
                hf.PreemptionCheckpointHandler(manager, config)
            assert "handler.close()" in refused.value.hint
            first.run(print, end="")
        with hf.PreemptionCheckpointHandler(manager, config) as second:
            assert second.total_run_calls == 1


def test_handlers_of_two_managers_are_refused(tmp_path: Path) -> None:
    first, _ = manager_of(tmp_path / "first")
    second, state = manager_of(tmp_path / "second")
    with first, second, hf.PreemptionCheckpointHandler(first):
        with pytest.raises(UsageError, match="another run or handler already handles"):
            hf.PreemptionCheckpointHandler(second)
        with (
            pytest.raises(UsageError, match="another run or handler already handles"),
            hf.resumable(tmp_path / "x", state=state),
        ):
            pass
        with hf.resumable(tmp_path / "y", state=state, preemption="off"):
            pass
    with hf.PreemptionCheckpointHandler(manager_of(tmp_path / "third")[0]):
        pass


def test_a_handler_joins_a_run_that_was_begun_without_one(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    with manager:
        manager.save(17)
    manager, _ = manager_of(tmp_path)
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        assert handler.total_run_calls == 17
    manager, _ = manager_of(tmp_path)
    with manager:
        manager.restore()
        with hf.PreemptionCheckpointHandler(manager) as handler:
            assert handler.total_run_calls == 17
    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(other=np.zeros(3)))
    with manager, pytest.raises(MismatchError):
        hf.PreemptionCheckpointHandler(manager)


def test_a_handler_that_comes_after_the_restore_knows_the_count(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        for _ in range(3):
            handler.run(print, end="")
        manager.save(300)
    manager, _ = manager_of(tmp_path)
    with manager:
        manager.restore(strict=False)
        with hf.PreemptionCheckpointHandler(manager) as handler:
            assert handler.total_run_calls == 3


def test_a_number_that_is_too_small_does_not_lose_the_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Spoken()
    manager, state = manager_of(tmp_path)
    with manager, pytest.raises(SystemExit) as leaving:
        with hf.PreemptionCheckpointHandler(
            manager, termination_config=hf.TerminationConfig(sources=[source])
        ) as handler:
            manager.save(1000)
            handler.run(state["value"].__iadd__, 1)
            source.say()
    assert leaving.value.code == 42
    assert "step 1001 is saved; leaving with exit code 42" in capsys.readouterr().err
    assert steps_of(tmp_path) == [1000, 1001]
    source, place = Spoken(), tmp_path / "run"
    termination = hf.TerminationConfig(sources=[source])
    with pytest.raises(SystemExit) as leaving, hf.resumable(place, state=[0], preemption=termination) as run:
        run.manager.save(1000)
        run.finish_step()
        source.say()
    assert leaving.value.code == 42
    assert "step 1001 is saved; leaving with exit code 42" in capsys.readouterr().err
    assert steps_of(place) == [1000, 1001]


def test_handler_that_starts_over_restores_nothing(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    with manager:
        manager.save(5)
    manager, _ = manager_of(tmp_path, begin_anew=True)
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        assert (handler.restored, handler.total_run_calls) == (None, 0)


def test_a_save_that_lay_before_the_notice_is_not_made_twice(tmp_path: Path) -> None:
    source = Spoken()
    events: list[Event] = []
    manager, _ = manager_of(tmp_path, save_every=hf.Steps(1), sinks=[events.append])
    with manager, pytest.raises(SystemExit):
        with hf.PreemptionCheckpointHandler(
            manager, termination_config=hf.TerminationConfig(sources=[source])
        ) as handler:
            for step in handler.steps(9):
                if step == 3:
                    manager.save(4).wait_committed(60)
                    source.say()
    assert len([event for event in events if isinstance(event, Staged)]) == 4
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_figures_go_with_the_last_save(tmp_path: Path) -> None:
    source = Spoken()
    state = {"value": np.zeros(4)}
    termination = hf.TerminationConfig(sources=[source])
    with pytest.raises(SystemExit):
        with hf.resumable(tmp_path, state=state, preemption=termination, save_every=hf.Steps(100)) as run:
            for step in run.steps(9):
                run.report(loss=float(step))
                if step == 3:
                    source.say()
    storage = LocalStorage(tmp_path)
    assert [StoredRun(storage).step(name).manifest().metrics for name in StoredRun(storage).look().living] == [
        {"loss": 3.0}
    ]


def test_figures_of_a_handler_go_with_saves_by_policy_too(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path, save_every=hf.Steps(2))
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        for step in range(4):
            handler.save_checkpoint_if_preempted(metrics={"loss": float(step)}, metadata={"step": step})
    manifests = [
        StoredRun(LocalStorage(tmp_path)).step(name).manifest()
        for name in StoredRun(LocalStorage(tmp_path)).look().living
    ]
    assert [(one.metrics, one.metadata) for one in manifests] == [({"loss": n}, {"step": n}) for n in (1, 3)]


def test_run_outside_the_main_thread_warns_that_signals_are_ignored(tmp_path: Path) -> None:
    events: list[Event] = []
    refused: list[UsageError] = []

    def train() -> None:
        state = {"value": np.zeros(4)}
        with hf.resumable(tmp_path, state=state, sinks=[events.append]) as run:
            list(run.steps(3))
        manager, _ = manager_of(tmp_path / "other")
        with manager:
            try:
                hf.PreemptionCheckpointHandler(manager, termination_config=hf.TerminationConfig(sources=[Signals()]))
            except UsageError as error:
                refused.append(error)

    before = set(threading.enumerate())  # a manager that another test has left may still have some
    thread = threading.Thread(target=train)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert any("signals are not handled" in str(event) for event in events)
    assert len(refused) == 1
    assert steps_of(tmp_path) == [3]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("holdfast")]


@pytest.mark.parametrize(
    ("api", "thread"),
    [
        ("resumable", "Thread"),
        ("handler", "Thread"),
        ("handler", "pool"),
        ("resumable", "pool that is asked"),
        ("handler", "pool whose exit is caught"),
    ],
)
def test_run_in_another_thread_ends_process_with_its_code(tmp_path: Path, api: str, thread: str) -> None:
    done = run_file("exits", "train in thread", tmp_path, api, thread)
    assert done.returncode == (43 if "caught" in thread else 42), done.stderr
    assert done.stdout.split() == ["unwound"]
    assert f"step {steps_of(tmp_path)[-1]} is saved; leaving with exit code 42" in done.stderr


@pytest.mark.parametrize(("left_seconds", "caught"), [(3, False), (3, True), (3600, False)])
def test_end_of_interpreter_is_not_waited_for_without_time(tmp_path: Path, left_seconds: float, caught: bool) -> None:
    done = run_file("slow_end", tmp_path, str(left_seconds), str(caught), preload=None)
    assert done.returncode == (3 if caught else 42), done.stderr
    is_ended = "the end of the interpreter" in done.stdout
    assert is_ended == (caught or left_seconds == 3600)


def test_ended_run_restores_handlers_and_leaves_no_threads(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    bell = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(bell)
    threads = set(threading.enumerate())  # a manager that another test has left may still have some
    for mode in ("auto", "off"):
        state = {"value": np.zeros(4)}
        with hf.resumable(tmp_path, state=state, preemption=mode) as run:
            list(run.steps(3))
    manager, _ = manager_of(tmp_path / "other")
    with manager, hf.PreemptionCheckpointHandler(manager):
        pass
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(bell) == bell
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("holdfast")]


class Unusable(PolledSource):
    """A source that cannot be listened to here."""

    name = "unusable"
    interval_seconds: float | None = 1.0

    def open(self, hear: Any) -> None:
        raise UsageError("it cannot be used here")

    def look(self) -> list[Notice]:
        return []


def test_nothing_stays_taken_after_an_error(tmp_path: Path) -> None:
    """Each way in fails once; afterwards another run in the same thread is entered, and listens."""
    kept = tmp_path / "kept"
    with hf.resumable(kept, state={"value": np.zeros(4)}) as run:
        list(run.steps(3))
    bell = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(bell)

    def look() -> tuple[Any, ...]:
        current = signal.set_wakeup_fd(bell)
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]
        return [signal.getsignal(number) for number in DEFAULT_SIGNALS], current, threads

    def enter_twice() -> None:
        run = hf.resumable(kept, state={"value": np.zeros(4)})
        for _ in range(2):
            with run:
                list(run.steps(3))

    def enter_within() -> None:
        with hf.resumable(kept, state={"value": np.zeros(4)}) as run, run:
            pass

    def enter_with(**options: Any) -> None:
        refused = hf.resumable(kept, **{"state": {"value": np.zeros(4)}, **options})
        with pytest.raises(HoldfastError) as caught, refused:
            pass
        with pytest.raises(ClosedError):
            refused.manager.save(9)
        raise caught.value

    def enter_beside() -> None:
        with hf.resumable(kept, state={"value": np.zeros(4)}):
            enter_with()

    def make_handler(config: hf.TerminationConfig | None = None, /, **objects: Any) -> None:
        with hf.CheckpointManager(kept, hf.Checkpoint(**{"state": {"value": np.zeros(4)}, **objects})) as manager:
            hf.PreemptionCheckpointHandler(manager, config)

    def back_up(config: hf.TerminationConfig) -> None:
        with hf.WorkerTrainingState(tmp_path / "backup", hf.Checkpoint(w=1), preemption=config) as state:
            state.back_up(0)

    free = look()
    other = {"something": np.zeros(5)}
    unusable = hf.TerminationConfig(sources=[Signals(), Unusable()])
    failing: list[tuple[type[HoldfastError], Callable[[], None]]] = [
        (ClosedError, enter_twice),
        (ClosedError, enter_within),
        (MismatchError, partial(enter_with, **other)),
        (UsageError, partial(enter_with, preemption=unusable)),
        (UsageError, enter_beside),
        (MismatchError, partial(make_handler, **other)),
        (UsageError, partial(make_handler, unusable)),
        (UsageError, partial(back_up, unusable)),
    ]
    for kind, fail in failing:
        with pytest.raises(kind):
            fail()
        assert look() == free, fail
    with hf.resumable(kept, state={"value": np.zeros(4)}) as run:
        assert list(run.steps(5)) == [3, 4]


@pytest.mark.parametrize("is_first_first", [True, False])
@pytest.mark.parametrize("opens_files", [True, False])
def test_handlers_are_closed_in_any_order(tmp_path: Path, is_first_first: bool, opens_files: bool) -> None:
    """One of them leaves all but Ctrl-C to the other."""
    bell = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(bell)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    first, second = manager_of(tmp_path / "first")[0], manager_of(tmp_path / "second")[0]
    with first, second, contextlib.ExitStack() as files:
        handlers = [
            hf.PreemptionCheckpointHandler(first),
            hf.PreemptionCheckpointHandler(second, hf.TerminationConfig(sources=[Signals(signal.SIGINT)])),
        ]
        for handler in handlers if is_first_first else reversed(handlers):
            handler.close()
            if opens_files:
                # They get the numbers of the descriptors that have been closed.
                for number in range(20):
                    files.enter_context((tmp_path / f"file-{number}").open("w"))
    assert signal.set_wakeup_fd(bell) == bell
    assert {number: signal.getsignal(number) for number in before} == before


def test_forked_child_that_listens_is_not_ended_by_handlers_of_parent() -> None:
    done = run_file("exits", "listen in child")
    assert done.stdout.split() == ["1"], (done.stdout, done.stderr)


def test_run_that_cannot_be_entered_restores_signal_handlers(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path)
    with manager:
        manager.save(1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(MismatchError), hf.resumable(tmp_path, other=np.zeros(3)):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("mode", ["on", True, 3, None])
def test_a_wrong_mode_is_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(UsageError, match="preemption"):
        hf.resumable(tmp_path, state={"value": np.zeros(4)}, preemption=mode)


@pytest.mark.parametrize(
    "options",
    [
        {"grace_period": -1},
        {"grace_period": "3"},
        {"grace_period": True},
        {"grace_period": float("nan")},
        {"exit_fn": 3},
        {"save_fn": "x"},
        {"termination_watcher_fn": 1},
        {"exit_code": 0},
        {"exit_code": 126},
        {"exit_code": "a"},
        {"sources": "automatic"},
        {"sources": [3]},
        {"sources": [Signals]},
        {"sources": None},
        {"sources": Signals()},
    ],
)
def test_wrong_configurations_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        hf.TerminationConfig(**options)


def test_invalid_configuration_is_refused_with_a_hint(tmp_path: Path) -> None:
    state = {"value": np.zeros(4)}
    checkpoint = hf.Checkpoint(state=state)
    make: Any = hf.PreemptionCheckpointHandler
    with pytest.raises(UsageError, match="expected a CheckpointManager") as caught:
        make(checkpoint, str(tmp_path))
    assert "CheckpointManager(" in caught.value.hint
    with hf.CheckpointManager(tmp_path, checkpoint) as manager:
        for config in ("off", {}, {"grace_period": 3}, Signals(), hf.TerminationConfig):
            with pytest.raises(UsageError, match="termination_config=") as caught:
                make(manager, config)
            assert "sources=" in caught.value.hint
    for value in (hf.TerminationConfig(), Signals()):
        with pytest.raises(UsageError, match="termination=") as caught:
            hf.resumable(tmp_path, state=state, termination=value)
        assert "preemption=" in caught.value.hint


def test_a_handler_that_is_closed_runs_nothing(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(state={"value": 1})) as manager:
        handler = hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[]))
        assert handler.run(int) == 0
        handler.close()
        with pytest.raises(ClosedError):
            handler.run(pytest.fail, "it runs")
        with pytest.raises(ClosedError):
            next(handler.steps(5))
        with pytest.raises(ClosedError):
            handler.save_checkpoint_if_preempted()
        with pytest.raises(ClosedError), handler:
            pytest.fail("it is entered")
        assert handler.total_run_calls == 1


@pytest.mark.parametrize("loop", ["resumable", "run", "steps"])
@pytest.mark.parametrize("is_asked", [False, True])
def test_step_saved_in_its_blocks_is_saved_again_at_its_end(tmp_path: Path, loop: str, is_asked: bool) -> None:
    source, committed = Spoken(), queue.Queue[int]()
    termination = hf.TerminationConfig(sources=[source])
    state: dict[str, Any] = {"value": np.zeros(4), "best": 0}
    sinks = [lambda event: committed.put(event.step) if isinstance(event, Committed) else None]
    options: dict[str, Any] = {"save_every": hf.Steps(100), "keep": hf.All(), "sinks": sinks}

    def evaluate(active: hf.PreemptionCheckpointHandler | Run) -> None:
        state["value"] += 1
        if state["value"][0] == 3:
            for _ in range(2):
                with active.checkpointable():
                    source.say(Demand.SAVE)
                    assert committed.get(timeout=PATIENCE_SECONDS) == 3
                state["best"] += 1
            if is_asked:
                source.say()

    with pytest.raises(SystemExit) if is_asked else contextlib.nullcontext():
        if loop == "resumable":
            with hf.resumable(tmp_path, state=state, preemption=termination, **options) as run:
                for _ in run.steps(3):
                    evaluate(run)
        else:
            manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(state=state), **options)
            with manager, hf.PreemptionCheckpointHandler(manager, termination) as handler:
                for _ in handler.steps(3) if loop == "steps" else range(3):
                    if loop == "run":
                        handler.run(int)
                    evaluate(handler)
    assert committed.get(timeout=PATIENCE_SECONDS) == 3
    assert committed.empty()
    restored: dict[str, Any] = {"value": np.zeros(4), "best": 0}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(state=restored)) as manager:
        assert manager.restore(strict=False)
    assert (restored["best"], restored["value"][0]) == (2, 3)
    assert steps_of(tmp_path) == [3]


def test_a_block_within_a_block_belongs_to_that(tmp_path: Path) -> None:
    """Behind it the outer one goes on as before; what the inner one says of the step does not matter."""
    source, committed = Spoken(), threading.Event()
    state = {"value": np.zeros(4)}
    with hf.resumable(
        tmp_path,
        state=state,
        sinks=[lambda event: committed.set() if isinstance(event, Committed) else None],
        save_every=hf.Steps(100),
        keep=hf.All(),
        preemption=hf.TerminationConfig(sources=[source]),
    ) as run:
        for step in run.steps(3):
            state["value"] += 1
            if step == 1:
                with run.checkpointable():
                    with run.checkpointable(step_done=False):
                        pass
                    source.say(Demand.SAVE)
                    assert committed.wait(PATIENCE_SECONDS)
    assert steps_of(tmp_path) == [2, 3]


def test_a_step_is_not_counted_within_another_one(tmp_path: Path) -> None:
    manager, state = manager_of(tmp_path)
    with manager, hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
        for again in (
            lambda: handler.run(pytest.fail, "it runs"),
            handler.save_checkpoint_if_preempted,
            lambda: next(handler.steps(9)),
        ):
            with pytest.raises(UsageError, match="inside of another"):
                handler.run(again)
            with pytest.raises(UsageError, match="inside of another"):
                for _ in handler.steps(9):
                    again()
        before = handler.total_run_calls
        for _ in handler.steps(9):
            break
        # A loop that is left is no step any more; what it was in counts.
        assert handler.run(lambda: handler.total_run_calls) == before + 2
    assert state["value"][0] == 0


def test_save_inside_a_checkpointable_block_is_refused(tmp_path: Path) -> None:
    state = {"value": np.zeros(4)}
    with hf.resumable(tmp_path, state=state, save_every=hf.Steps(100)) as run:
        for step in run.steps(4):
            state["value"] += 1
            with run.checkpointable(), pytest.raises(UsageError, match="checkpointable"):
                run.save()
            if step == 2:
                run.save()
                with run.checkpointable():
                    assert run.save() is None
    assert steps_of(tmp_path) == [3, 4]


@pytest.mark.parametrize("loop", ["run", "steps"])
def test_error_without_block_saves_nothing_more(tmp_path: Path, loop: str) -> None:
    done = run_file("handler_loops", "fail", tmp_path / "run", loop)
    assert done.returncode == 1, done.stderr
    assert "half of the step is done" in done.stderr
    assert "is saved" not in done.stderr
    assert steps_of(tmp_path / "run") == []


def test_save_before_going_back_is_not_that_of_same_step_after_it(tmp_path: Path) -> None:
    asked = run_file("handler_loops", "go back", tmp_path / "run")
    assert asked.returncode == 42, asked.stderr
    again = run_file("handler_loops", "go back", tmp_path / "run")
    assert again.stdout == "aaaaabbbbb\n", again.stderr


@pytest.mark.parametrize("mode", ["one after the other", "saved by hand"])
def test_second_of_two_handlers_says_saved_of_what_is_saved(tmp_path: Path, mode: str) -> None:
    done = run_file("two_handlers", mode, tmp_path)
    assert done.returncode == 42, done.stderr
    assert "step 5 is saved; leaving with exit code 42" in done.stderr
    assert steps_of(tmp_path) == [5]
    state = {"values": np.zeros(100)}
    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(state=state))
    with manager, hf.PreemptionCheckpointHandler(manager) as handler:
        assert handler.total_run_calls == 5
        assert np.all(state["values"] == 5)


def test_second_handler_of_restored_job_saves_what_first_has_trained(tmp_path: Path) -> None:
    done = run_file("two_handlers", "first of two lives", tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_file("two_handlers", "one after the other", tmp_path)
    assert done.returncode == 42, done.stderr
    assert steps_of(tmp_path) == [5, 10]


def test_step_whose_data_is_awaited_does_not_count_yet(tmp_path: Path) -> None:
    done = run_file("handler_loops", "wait for data", tmp_path)
    assert done.returncode == 42, done.stderr
    assert "step 5 is saved" in done.stderr
    assert steps_of(tmp_path) == [5]
    value = 0.0
    for step in range(8):
        value = value * 1.5 + step
    done = run_file("handler_loops", "wait for data", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"8 {value}\n"), done.stderr


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_taken_before_their_steps_are_trained_once_each(tmp_path: Path, workers: int) -> None:
    """`handler.run(train_step, next(batches))` takes its argument before the step before is saved."""
    for life, (how, at) in enumerate((("SIGTERM", 2), ("SIGTERM", 8), ("SIGKILL", 11), ("SIGTERM", 0))):
        store = tmp_path / f"store-{life}"
        store.mkdir()
        processes = [
            preloaded.Popen(
                [sys.executable, PROGRAMS / "batches_ahead.py", tmp_path / "run", store, how, str(at)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers)},
            )
            for rank in range(workers)
        ]
        said = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
        codes = {process.returncode for process in processes}
        assert codes == {{"SIGTERM": 42, "SIGKILL": -signal.SIGKILL}[how] if at else 0}
    told = [[int(number) for number in line.split()] for line in said]
    for steps_after, epochs_after, *trained in told:
        assert (steps_after, epochs_after, len(trained)) == (12, 3, 48 // workers)
    per_epoch = 16 // workers
    for epoch in range(3):
        trained = [sample for _, _, *samples in told for sample in samples[epoch * per_epoch :][:per_epoch]]
        assert sorted(trained) == list(range(16))
    assert steps_of(tmp_path / "run")[-1] == 12, "what is due after the last step is saved as well"


def test_a_batch_counts_for_the_step_that_it_was_taken_for(tmp_path: Path) -> None:
    sampler = ResumableSampler(40, batch_size=4, shuffle=False)
    batches = sampler.stream(sampler)
    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(sampler=sampler))

    def place() -> int:
        return int(sampler.state_dict()["position_samples"])

    with manager:
        with hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
            next(batches)
            assert place() == 4, "before the first step nothing was taken for a step by what is known"
            handler.run(next, batches)
            assert place() == 8
            several = [next(batches) for _ in range(2)]
            assert (place(), sampler.position_samples) == (8, 16)
            handler.run(lambda _: next(batches), several)
            assert place() == 20
            next(batches)
            assert place() == 20
            for _ in handler.steps(3):
                next(batches)
                assert place() == 28
            assert place() == 28
            next(batches)
            handler.save_checkpoint_if_preempted()
            assert place() == 32
            handler.run(int)
            next(batches)
        assert place() == 32, "the step for which it was taken never came"
        next(batches)
        assert place() == 40


class Numbers:
    """An iterator of a user's own, with a position."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> int:
        self.taken += 1
        return self.taken

    def __iter__(self) -> Numbers:
        return self

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def test_batch_taken_between_steps_from_unknown_loader_is_refused(
    tmp_path: Path,
) -> None:
    numbers = Numbers()
    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(data={"train": numbers}))
    with manager:
        with hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
            for _ in range(3):
                handler.run(next, numbers)
        handler = hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[]))
        handler.run(int, next(numbers))
        with pytest.raises(UsageError, match="data/train gave a batch between two steps") as refused:
            handler.run(int, next(numbers))
        assert "ResumableDataLoader" in refused.value.hint
        handler.close()


def test_a_loader_that_is_used_later_and_random_arguments_are_warned_of(tmp_path: Path) -> None:
    numbers, texts = Numbers(), []
    checkpoint = hf.Checkpoint(data=numbers, rng=hf.RNG())
    manager = hf.CheckpointManager(tmp_path, checkpoint, sinks=[lambda event: texts.append(str(event))])
    with manager, hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
        handler.run(int)
        handler.run(int, np.random.rand())
        handler.run(int)
        for _ in range(3):
            handler.run(int, next(numbers))
        for _ in range(3):
            handler.run(int, np.random.rand())
    assert sum("random numbers were drawn between two steps" in text for text in texts) == 1
    assert sum("data gave a batch between two steps" in text for text in texts) == 1


@pytest.mark.parametrize("way", ["close", "block", "error", "torn"])
def test_manager_closed_before_its_handler_saves_last_step_due(tmp_path: Path, way: str) -> None:
    manager, state = manager_of(tmp_path, save_every=hf.Steps(3))
    handler = hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[]))
    with contextlib.suppress(ZeroDivisionError), manager if way != "close" else contextlib.nullcontext():
        for _ in range(6):
            handler.run(state["value"].__iadd__, 1)
        if way == "error":
            raise ZeroDivisionError
        if way == "torn":
            with contextlib.suppress(ZeroDivisionError):
                handler.run(divmod, 1, 0)
    manager.close()
    handler.close()
    assert manager.steps() == ((3,) if way == "error" else (3, 6))


def test_a_handler_is_not_made_over_what_a_backup_has_restored(tmp_path: Path) -> None:
    manager, _ = manager_of(tmp_path / "steps")
    with hf.WorkerTrainingState(tmp_path / "backup", manager.checkpoint) as backups, manager:
        backups.restore()
        with pytest.raises(UsageError, match="backup has already restored these objects") as refused:
            hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[]))
        assert "before you call restore()" in refused.value.hint


def test_a_later_handler_restores_only_what_an_error_may_have_torn(tmp_path: Path) -> None:
    for life in range(2):
        manager, state = manager_of(tmp_path, save_every=hf.Steps(4))
        with manager:
            for phase in range(2):
                with hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
                    assert handler.total_run_calls == state["value"][0] == 20 * life + 10 * phase
                    for _ in range(10):
                        handler.run(state["value"].__iadd__, 1)
            with (
                contextlib.suppress(ZeroDivisionError),
                hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler,
            ):
                handler.run(state["value"].__iadd__, 1)
                state["value"] += 0.5
                handler.run(divmod, 1, 0)
            with hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
                assert handler.restored is not None
                assert handler.total_run_calls == state["value"][0] == 20 * (life + 1)


def test_handler_counts_on_from_saves_made_by_hand(tmp_path: Path) -> None:
    for life in range(2):
        manager, state = manager_of(tmp_path)
        with manager:
            if life:
                manager.restore(strict=False)
            state["value"] += 3
            manager.save(int(state["value"][0]))
            state["value"] += 1
            with hf.PreemptionCheckpointHandler(manager, hf.TerminationConfig(sources=[])) as handler:
                assert (handler.total_run_calls, state["value"][0]) == (3 + 4 * life, 4 + 4 * life)
            manager.save(int(state["value"][0]))
