"""Jobs of several workers that are asked to leave, or of which one fails: all stop at one step, and end together."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from crash import leaving
from preemption_jobs import TOTAL, Jobs
from whole_runs import check_whole

LOCKSTEP: dict[str, Any] = {"lockstep": True}


def results(jobs: Jobs) -> list[str]:
    assert jobs.end() == [0] * len(jobs.workers), jobs.report()
    return [worker.said[-1] for worker in jobs.workers]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each worker has learned when nobody asks them to leave."""
    with Jobs(tmp_path_factory.mktemp("uninterrupted") / "run") as jobs:
        return results(jobs)


def check_left(jobs: Jobs, steps: list[int], code: int = 42) -> None:
    """All have left with that code, and these steps are saved."""
    assert jobs.end() == [code] * len(jobs.workers), jobs.report()
    assert check_whole(jobs.directory) == steps
    for rank, worker in enumerate(jobs.workers):
        assert f"rank {rank}: step {steps[-1]} is saved" in worker.errors


def check_the_rest(jobs: Jobs, expected: list[str], **options: Any) -> None:
    """A restart comes to the same end as a job that nobody has asked to leave."""
    with Jobs(jobs.directory, **options) as again:
        assert results(again) == expected


def ask_where_all_pause(jobs: Jobs, asked: int) -> None:
    """One worker gets a signal while all pause, and the others hear of it."""
    for worker in jobs.workers:
        worker.wait_for("paused")
    jobs.workers[asked].send(signal.SIGTERM)
    for number, worker in enumerate(jobs.workers):
        if number != asked:
            worker.wait_for("event NoticeHeard")


# A notice at each moment.


@pytest.mark.parametrize(
    ("loop", "step"),
    [("resumable", 0), ("resumable", 4), ("resumable", TOTAL - 1), ("run", 4), ("steps", TOTAL - 1), ("own", 4)],
)
def test_a_signal_to_one_worker_stops_all_at_one_step(
    tmp_path: Path, uninterrupted: list[str], loop: str, step: int
) -> None:
    with Jobs(tmp_path / "run", each={1: {"pause": [step]}}, loop=loop, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[1].wait_for("event NoticeHeard")
        # It is heard on the other one too, which waits in the step.
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        check_left(jobs, [step + 1])
        check_the_rest(jobs, uninterrupted, loop=loop)


def test_workers_of_different_speeds_stop_at_a_step_that_none_has_passed(tmp_path: Path) -> None:
    each = {0: {"pause": [20]}, 1: {"pause": [60]}}
    with Jobs(tmp_path / "run", total=100_000, each=each) as jobs:
        ask_where_all_pause(jobs, 0)
        for worker in jobs.workers:
            worker.go_on()
        check_left(jobs, [61])


@pytest.mark.parametrize("pause_seconds", [0.0, 0.2])
def test_signals_to_all(tmp_path: Path, uninterrupted: list[str], pause_seconds: float) -> None:
    with Jobs(tmp_path / "run", pause=[3], **LOCKSTEP) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
        for worker in jobs.workers:
            worker.send(signal.SIGTERM)
            time.sleep(pause_seconds)  # As a scheduler that comes to one node after the other.
        for worker in jobs.workers:
            worker.go_on()
        check_left(jobs, [4])
        check_the_rest(jobs, uninterrupted)


def test_four_workers(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", 4, each={2: {"pause": [3]}}, **LOCKSTEP) as jobs:
        jobs.workers[2].wait_for("paused")
        jobs.workers[2].send(signal.SIGUSR1)
        # Each has pledged by then; one that had not could begin another step.
        for rank in (0, 1, 3):
            jobs.workers[rank].wait_for("event NoticeHeard")
        jobs.workers[2].go_on()
        check_left(jobs, [4])
        # Another number of workers goes on.
        with Jobs(tmp_path / "run", 2) as fewer:
            assert fewer.end() == [0, 0], fewer.report()


@pytest.mark.parametrize("is_promised", [False, True])
def test_a_signal_in_evaluation(tmp_path: Path, uninterrupted: list[str], is_promised: bool) -> None:
    """In a block that promises to change nothing, nobody waits for its end."""
    options = {"evaluate": [5], "checkpointable": is_promised, **LOCKSTEP}
    with Jobs(tmp_path / "run", pause=["evaluation"], **options) as jobs:
        ask_where_all_pause(jobs, 0)
        if not is_promised:
            for worker in jobs.workers:
                worker.go_on()
        check_left(jobs, [6])
        if is_promised:
            check_the_rest(jobs, uninterrupted)


def test_one_worker_in_evaluation_and_one_in_a_step(tmp_path: Path, uninterrupted: list[str]) -> None:
    """The evaluation is ended as the step is; there the same step is saved from two places."""
    each = {0: {"pause": ["evaluation"], "evaluate": [5], "checkpointable": True}, 1: {"pause": [5]}}
    with Jobs(tmp_path / "run", each=each) as jobs:
        ask_where_all_pause(jobs, 0)
        jobs.workers[1].go_on()
        check_left(jobs, [6])


@pytest.mark.parametrize("place", ["before", "restore", "after"])
def test_a_signal_outside_of_the_loop(tmp_path: Path, uninterrupted: list[str], place: str) -> None:
    saved = []
    if place == "restore":
        with Jobs(tmp_path / "run", each={0: {"pause": [4]}}, **LOCKSTEP) as jobs:
            jobs.workers[0].wait_for("paused")
            jobs.workers[0].send(signal.SIGTERM)
            jobs.workers[1].wait_for("event NoticeHeard")
            jobs.workers[0].go_on()
            check_left(jobs, [5])
            saved = [5]
    with Jobs(tmp_path / "run", pause=[place]) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        # Nobody goes on: they leave from the middle of the wait.
        assert jobs.end() == [42, 42], jobs.report()
        assert check_whole(tmp_path / "run") == saved + ([TOTAL] if place == "after" else [])
        check_the_rest(jobs, uninterrupted)


def test_a_signal_while_one_worker_makes_its_run_lets_all_leave(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", each={1: {"pause": ["looking"]}}) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[1].go_on()
        assert jobs.end() == [42, 42], jobs.report()
        # The first worker may have taken a step before it heard.
        assert len(check_whole(jobs.directory)) <= 1


@pytest.mark.parametrize(("world_size", "place"), [(2, "looking"), (3, "looking"), (2, "met"), (3, "met")])
def test_worker_that_leaves_before_its_run_is_made_lets_all_leave(tmp_path: Path, world_size: int, place: str) -> None:
    """The others wait for it while they make their runs, or to begin the restore."""
    with Jobs(tmp_path / "run", world_size, total=2) as before:
        assert before.end() == [0] * world_size, before.report()
    with Jobs(tmp_path / "run", world_size, each={1: {"pause": [place]}}) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        # No worker goes on.
        assert jobs.end() == [42] * world_size, jobs.report()
        for worker in jobs.workers:
            assert re.search("SIGTERM was sent .* which did not end within 2 s; .*nothing was trained", worker.errors)
            assert "failed" not in worker.errors
        assert check_whole(jobs.directory) == [2]


def test_a_worker_that_has_not_begun_is_waited_for(tmp_path: Path, uninterrupted: list[str]) -> None:
    with Jobs(tmp_path / "run", each={0: {"pause": ["before"]}, 1: {"pause": [0]}}) as jobs:
        ask_where_all_pause(jobs, 0)
        for worker in jobs.workers:
            worker.go_on()
        check_left(jobs, [1])
        check_the_rest(jobs, uninterrupted)


@pytest.mark.parametrize(
    ("slower", "step", "asked"), [(0, 4, 0), (0, TOTAL - 1, 0), (1, 4, 1), (1, TOTAL - 1, 1), (0, 4, 1), (1, 4, 0)]
)
def test_a_signal_while_one_worker_waits_for_the_other_at_its_end(
    tmp_path: Path, uninterrupted: list[str], slower: int, step: int, asked: int
) -> None:
    with Jobs(tmp_path / "run", each={slower: {"pause": [step]}}) as jobs:
        jobs.workers[slower].wait_for("paused")
        jobs.workers[1 - slower].wait_for("event Staged")
        jobs.workers[asked].send(signal.SIGTERM)
        jobs.workers[slower].wait_for("event NoticeHeard")
        jobs.workers[slower].go_on()
        check_left(jobs, [TOTAL])
        check_the_rest(jobs, uninterrupted)


# How they leave.


@pytest.mark.parametrize(
    ("raises", "how", "text"), [(0, "exits", "SystemExit: 3"), (1, "raises", "ZeroDivisionError: of the user's")]
)
def test_a_save_fn_that_fails_on_one_worker_is_a_failed_save_on_all(
    tmp_path: Path, raises: int, how: str, text: str
) -> None:
    each = {raises: {"save_fn": how}, 1 - raises: {"save_fn": "saves", "pause": [3]}}
    with Jobs(tmp_path / "run", each=each, loop="run", **LOCKSTEP) as jobs:
        jobs.workers[1 - raises].wait_for("paused")
        jobs.workers[1 - raises].send(signal.SIGTERM)
        jobs.workers[raises].wait_for("event NoticeHeard")
        jobs.workers[1 - raises].go_on()
        assert jobs.end() == [74, 74], jobs.report()
        assert f"step 4 could NOT be saved: {text}" in jobs.workers[raises].errors
        told = jobs.workers[1 - raises].errors
        assert re.search(rf"step 4 could NOT be saved: rank {raises} on \S+: {text}", told), told
        assert check_whole(tmp_path / "run") == []


def test_save_fn_interrupted_on_one_worker_ends_all_with_its_error(tmp_path: Path) -> None:
    each = {0: {"save_fn": "saves", "pause": [3]}, 1: {"save_fn": "KeyboardInterrupt"}}
    with Jobs(tmp_path / "run", each=each, loop="run", **LOCKSTEP) as jobs:
        jobs.workers[0].wait_for("paused")
        jobs.workers[0].send(signal.SIGTERM)
        jobs.workers[1].wait_for("event NoticeHeard")
        jobs.workers[0].go_on()
        assert jobs.end() == [1, -signal.SIGINT], jobs.report()
        assert re.search(r"PeerError: rank 1 on \S+: KeyboardInterrupt", jobs.workers[0].errors), jobs.report()
        assert check_whole(tmp_path / "run") == []


def test_save_fn_failing_in_grace_period_ends_that_save_on_all(tmp_path: Path) -> None:
    """Nobody waits for its part until the last save, which would have to make up for it."""
    options: dict[str, Any] = {"loop": "run", "grace": 600, "total": 100_000, "step_seconds": 0.01, **LOCKSTEP}
    each = {0: {"save_fn": "saves"}, 1: {"save_fn": "raises", "failing_saves": [1], "pause": [3]}}
    with Jobs(tmp_path / "run", each=each, **options) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        # They train on.
        jobs.workers[0].wait_for("event Failed 4")
        jobs.workers[0].wait_for("step")
        jobs.workers[1].send(signal.SIGTERM)
        assert jobs.end() == [42, 42], jobs.report()
        assert len(check_whole(tmp_path / "run")) == 1
        for worker in jobs.workers:
            assert sum(line.startswith("event Failed") for line in worker.said) <= 1, jobs.report()


def test_worker_slow_to_leave_its_block_is_waited_for(tmp_path: Path) -> None:
    each = {0: {"finally_seconds": 3.0}, 1: {"pause": [3]}}
    with Jobs(tmp_path / "run", each=each, loop="run", **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        check_left(jobs, [4])


def test_exit_fn_that_returns_lets_training_go_on_to_a_later_notice(tmp_path: Path) -> None:
    each = {0: {"pause": [2]}, 1: {"pause": [5]}}
    with Jobs(tmp_path / "run", returns=1, each=each, **LOCKSTEP) as jobs:
        for number in (0, 1):
            jobs.workers[number].wait_for("paused")
            jobs.workers[number].send(signal.SIGTERM)
            for worker in jobs.workers:
                worker.wait_for("event NoticeHeard")
            jobs.workers[number].go_on()
            if number == 0:
                jobs.workers[0].wait_for("exit_fn")
        assert jobs.end() == [7, 7], jobs.report()
        assert check_whole(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize("is_advice", [False, True])
def test_wait_in_evaluation_does_not_count_for_a_later_notice(tmp_path: Path, is_advice: bool) -> None:
    """It comes when more time has passed since than workers wait for each other."""
    options: dict[str, Any] = {"timeout": 4.0, "total": 100_000, "step_seconds": 0.1, "evaluate": [5]}
    # What is heard first asks to save and go on, or `exit_fn` goes on.
    options |= {"checkpointable": True} if is_advice else {"checkpointable": True, "returns": 1}
    each: dict[int, Any] = {0: {"advice": str(tmp_path / "advice")}} if is_advice else {}
    with Jobs(tmp_path / "run", each=each, pause=["evaluation", 60], **options, **LOCKSTEP) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
        if is_advice:
            (tmp_path / "advice").touch()
        else:
            jobs.workers[0].send(signal.SIGTERM)
        for worker in jobs.workers:
            worker.wait_for("event Committed 6" if is_advice else "exit_fn")
        for worker in jobs.workers:
            worker.go_on()
        ask_where_all_pause(jobs, 0)
        for worker in jobs.workers:
            worker.go_on()
        assert jobs.end() == [42 if is_advice else 7] * 2, jobs.report()
        assert check_whole(tmp_path / "run") == [6, 61]


@pytest.mark.parametrize(("error", "code"), [("SystemExit", 3), ("ValueError", 1)])
def test_exit_fn_that_ends_one_worker_and_not_the_other_ends_both(tmp_path: Path, error: str, code: int) -> None:
    each = {0: {"returns": 99}, 1: {"returns": 0, "exit_error": error, "pause": [3]}}
    with Jobs(tmp_path / "run", each=each, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        assert jobs.end() == [1, code], jobs.report()
        assert re.search(rf"PeerError: rank 1 on \S+: {error}", jobs.workers[0].errors)
        assert check_whole(tmp_path / "run") == [4]


def test_grace_period_all_save_at_once_and_again_at_one_step(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", total=100_000, step_seconds=0.02, grace=6, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("step 10")
        jobs.workers[1].send(signal.SIGTERM)
        assert jobs.end() == [42, 42], jobs.report()
        # On a busy machine the time is short before another step can be begun.
        assert len(check_whole(tmp_path / "run")) in (1, 2)


@pytest.mark.parametrize("loop", ["resumable", "run"])
def test_notice_with_time_all_leave_with_block_if_no_step_is_left(tmp_path: Path, loop: str) -> None:
    with Jobs(tmp_path / "run", loop=loop, grace=600, each={1: {"pause": [TOTAL - 1]}}, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        assert jobs.end() == [42, 42], jobs.report()
        assert check_whole(tmp_path / "run")[-1] == TOTAL


def test_a_second_signal_ends_the_grace_period_of_all(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", total=100_000, step_seconds=0.02, grace=600, **LOCKSTEP) as jobs:
        for worker in jobs.workers:
            worker.wait_for("step 10")
        # One to each of them, as launchers send it, is no second one to any of them: they train on.
        for worker in jobs.workers:
            worker.send(signal.SIGTERM)
        for worker in jobs.workers:
            worker.wait_for("event Committed")
            for _ in range(3):
                worker.wait_for("step")
        jobs.workers[1].send(signal.SIGTERM)
        assert jobs.end() == [42, 42], jobs.report()
        assert len(check_whole(tmp_path / "run")) == 2


def test_repeated_signals_to_one_worker_save_the_step_of_all(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", liveness=3.0, each={1: {"pause": [4]}}, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        for _ in range(4):
            jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[1].go_on()
        check_left(jobs, [5], 42)


def test_ctrl_c_on_a_terminal_leaves_with_the_code_of_a_person(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", pause=[4], **LOCKSTEP) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
        for worker in jobs.workers:
            worker.send(signal.SIGINT)
            worker.wait_for("event NoticeHeard")
        for worker in jobs.workers:
            worker.go_on()
        check_left(jobs, [5], 130)


# What goes wrong then.


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_killed_after_the_notice_is_not_waited_for(
    tmp_path: Path, uninterrupted: list[str], victim: int
) -> None:
    options = {"every": 2, "liveness": 3.0, **LOCKSTEP}
    with Jobs(tmp_path / "run", each={victim: {"pause": [5]}}, **options) as jobs:
        jobs.workers[victim].wait_for("paused")
        jobs.workers[1 - victim].wait_for("event Committed 4")
        jobs.workers[victim].send(signal.SIGTERM)
        jobs.workers[1 - victim].wait_for("event NoticeHeard")
        jobs.workers[victim].send(signal.SIGKILL)
        codes = jobs.end()
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] in (1, 74), jobs.report()
        assert check_whole(tmp_path / "run")[-1] == 4
        check_the_rest(jobs, uninterrupted, every=2)


def test_a_notice_does_not_wait_for_a_worker_that_hangs_beyond_the_grace(tmp_path: Path) -> None:
    options: dict[str, Any] = {"grace": 3, "liveness": 600.0, "total": 100_000, "step_seconds": 0.01}
    with Jobs(tmp_path / "run", each={1: {"pause": [5]}}, **options) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGSTOP)
        jobs.workers[0].wait_for("step 30")
        jobs.workers[0].send(signal.SIGTERM)
        # It does not count as lost for minutes: the end comes since the time is over.
        assert jobs.workers[0].end() == 74, jobs.report()
        assert "could NOT be saved: not all workers reported" in jobs.workers[0].errors


@pytest.mark.parametrize("grace_seconds", [1, 1.5])
def test_a_grace_of_a_second_is_enough_for_a_quick_save(
    tmp_path: Path, uninterrupted: list[str], grace_seconds: float
) -> None:
    with Jobs(tmp_path / "run", grace=grace_seconds, each={1: {"pause": [4]}}, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        assert jobs.end() == [42, 42], jobs.report()
        check_the_rest(jobs, uninterrupted)


@pytest.mark.parametrize("loop", ["run", "own"])
def test_a_grace_of_a_second_is_enough_for_a_quick_save_fn(tmp_path: Path, loop: str) -> None:
    options: dict[str, Any] = {"grace": 1, "save_fn": "saves", "loop": loop, **LOCKSTEP}
    with Jobs(tmp_path / "run", each={1: {"pause": [4]}}, **options) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        check_left(jobs, [5])


@pytest.mark.parametrize("is_resting", [False, True])
def test_committed_step_counts_as_saved_after_a_late_answer(
    tmp_path: Path, uninterrupted: list[str], is_resting: bool
) -> None:
    """The storage has committed it, and does not answer: all who leave look themselves."""
    place: Any = "evaluation" if is_resting else 5
    options: dict[str, Any] = {"grace": 3, "evaluate": [5] * is_resting, "checkpointable": True, **LOCKSTEP}
    each = {0: {"pause": [place, "published"]}, 1: {"pause": [place]}}
    with Jobs(tmp_path / "run", each=each, **options) as jobs:
        ask_where_all_pause(jobs, 1)
        if not is_resting:
            for worker in jobs.workers:
                worker.go_on()
        check_left(jobs, [6])
        check_the_rest(jobs, uninterrupted)


@pytest.mark.parametrize("loop", ["resumable", "run"])
def test_agreed_commit_is_waited_for_by_all_who_leave_with_one_code(
    tmp_path: Path, uninterrupted: list[str], loop: str
) -> None:
    """The time is over while one worker commits what all have written: nobody can say yet whether it is saved."""
    options: dict[str, Any] = {"grace": 1, "loop": loop, **LOCKSTEP}
    each = {0: {"pause": [5, "publishing"]}, 1: {"pause": [5]}}
    with Jobs(tmp_path / "run", each=each, **options) as jobs:
        ask_where_all_pause(jobs, 1)
        for worker in jobs.workers:
            worker.go_on()
        jobs.workers[1].wait_for_error("step 6 is not saved yet")
        jobs.workers[0].go_on()
        check_left(jobs, [6])
        check_the_rest(jobs, uninterrupted, loop=loop)


def test_save_waiting_for_hanging_worker_ends_with_the_time_left(tmp_path: Path) -> None:
    options: dict[str, Any] = {"grace": 4, "every": 2, "total": 100_000, "step_seconds": 0.01}
    with Jobs(tmp_path / "run", each={1: {"pause": [5]}}, **options) as jobs:
        jobs.workers[1].wait_for("paused")
        # The save of step 6 waits for the other one's part, and that of step 8 for the one before.
        jobs.workers[0].wait_for("event Staged 6")
        jobs.workers[0].send(signal.SIGTERM)
        assert jobs.end() == [74, 74], jobs.report()
        assert check_whole(jobs.directory) == [2, 4]


def test_a_worker_whose_step_does_not_end_leaves_once_another_one_has(tmp_path: Path) -> None:
    each = {0: {"total": 100_000, "step_seconds": 0.01}, 1: {"pause": [5]}}
    with Jobs(tmp_path / "run", grace=2, each=each) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[0].wait_for("step 10")
        jobs.workers[0].send(signal.SIGTERM)
        # Nobody lets the one that pauses go on.
        assert jobs.end() == [74, 74], jobs.report()
        assert "step 5 could NOT be saved: rank 0 on" in jobs.workers[1].errors


def test_paused_worker_and_one_waiting_for_it_leave_in_time(
    tmp_path: Path,
) -> None:
    each = {0: {"pause": ["evaluation"], "evaluate": [5], "checkpointable": True}, 1: {"pause": [6]}}
    with Jobs(tmp_path / "run", grace=3, each=each) as jobs:
        ask_where_all_pause(jobs, 0)
        # Nobody lets them go on.
        assert jobs.end() == [74, 74], jobs.report()
        for worker in jobs.workers:
            assert "the loop did not reach, within" in worker.errors


@pytest.mark.parametrize("changing", [[0, 1], [1]])
def test_changes_after_a_saved_step_are_not_reported_as_saved(tmp_path: Path, changing: list[int]) -> None:
    """No worker goes on to where the others, which wait at that step, would never come."""
    options: dict[str, Any] = {"loop": "own", "evaluate": [5], "checkpointable": True, "pause": ["evaluation"]}
    with Jobs(tmp_path / "run", each={rank: {"change": True} for rank in changing}, **options) as jobs:
        ask_where_all_pause(jobs, 0)
        assert jobs.end() == [74, 74], jobs.report()
        assert check_whole(jobs.directory) == []
        for worker in jobs.workers:
            assert "changed since the step ended" in worker.errors


@pytest.mark.parametrize("loop", ["resumable", pytest.param("steps", marks=pytest.mark.long)])
def test_last_step_with_block_on_one_worker_is_saved_by_all(tmp_path: Path, loop: str) -> None:
    """The other one has saved that step at its end already."""
    block: dict[str, Any] = {"evaluate": [TOTAL - 1], "checkpointable": True, "pause": ["evaluation"]}
    advice = {"advice": str(tmp_path / "advice"), "change_behind": True}
    each = {0: block | advice, 1: {"pause": [TOTAL - 1]}}
    with Jobs(tmp_path / "run", each=each, loop=loop) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
        (tmp_path / "advice").touch()
        for worker in jobs.workers:
            worker.wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        jobs.workers[0].wait_for(f"event Committed {TOTAL}")
        jobs.workers[0].go_on()
        learned = results(jobs)
        for worker in jobs.workers:
            assert worker.said.count(f"event Staged {TOTAL}") == 2, jobs.report()
        check_the_rest(jobs, learned, loop=loop)


def test_ctrl_c_in_a_block_after_a_step_leaves_at_the_blocks_end(tmp_path: Path) -> None:
    options: dict[str, Any] = {"loop": "own", "evaluate": [5], "checkpointable": True, "pause": ["evaluation"]}
    with Jobs(tmp_path / "run", **options) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
            worker.send(signal.SIGINT)
        for worker in jobs.workers:
            worker.wait_for("event NoticeHeard")
            worker.go_on()
        assert jobs.end() == [130, 130], jobs.report()
        # Whether one begins another step before it hears that it may not, is a race.
        assert check_whole(jobs.directory) in ([6], [7])


def test_notice_with_undecodable_text_reaches_all_workers(tmp_path: Path, uninterrupted: list[str]) -> None:
    flag = tmp_path / "flag-\udcff"
    with Jobs(tmp_path / "run", pause=[5], each={0: {"file": str(flag)}}) as jobs:
        for worker in jobs.workers:
            worker.wait_for("paused")
        flag.touch()
        for worker in jobs.workers:
            worker.wait_for("event NoticeHeard")
            worker.go_on()
        check_left(jobs, [6])
        check_the_rest(jobs, uninterrupted)


@pytest.mark.long
def test_save_fn_hanging_on_one_worker_is_waited_for_until_deadline(tmp_path: Path) -> None:
    each = {0: {"pause": [5]}, 1: {"pause": [5, "save_fn"]}}
    with Jobs(tmp_path / "run", loop="run", save_fn="saves", timeout=1, each=each) as jobs:
        ask_where_all_pause(jobs, 0)
        for worker in jobs.workers:
            worker.go_on()
        assert jobs.end() == [74, 74], jobs.report()
        assert check_whole(jobs.directory) == []


def test_a_disk_that_is_full_on_one_worker_is_a_failed_save_on_all(tmp_path: Path, uninterrupted: list[str]) -> None:
    each = {1: {"pause": [4], "file_bytes": 4000}}
    with Jobs(tmp_path / "run", each=each, **LOCKSTEP) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        assert jobs.end() == [74, 74], jobs.report()
        for worker in jobs.workers:
            assert "step 5 could NOT be saved" in worker.errors
            assert "EFBIG" in worker.errors
        # One of them has it in its log, once, in one line.
        line = rf"^holdfast: save of step 5 in {tmp_path / 'run'} failed: rank 1 on \S+: \S.*EFBIG"
        found = [len(re.findall(line, worker.errors, re.MULTILINE)) for worker in jobs.workers]
        assert found == [1, 0], jobs.report()
        assert "rank 1: save of" not in jobs.workers[1].errors
        assert check_whole(tmp_path / "run") == []
        check_the_rest(jobs, uninterrupted)


def test_disk_full_on_one_worker_in_grace_fails_last_save_on_all(tmp_path: Path) -> None:
    options: dict[str, Any] = {"grace": 600, "total": 100_000, "step_seconds": 0.01, **LOCKSTEP}
    each = {1: {"pause": [4], "file_bytes": 4000, "file_bytes_from": "Committed"}}
    with Jobs(tmp_path / "run", each=each, **options) as jobs:
        jobs.workers[1].wait_for("paused")
        jobs.workers[1].send(signal.SIGTERM)
        jobs.workers[0].wait_for("event NoticeHeard")
        jobs.workers[1].go_on()
        jobs.workers[1].wait_for("event Committed 5")
        jobs.workers[1].send(signal.SIGTERM)
        assert jobs.end() == [74, 74], jobs.report()
        assert check_whole(tmp_path / "run") == [5]
        assert re.search(r"could NOT be saved: .*: rank 1 on \S+: StorageFullError", jobs.workers[0].errors)
        for worker in jobs.workers:
            assert "the newest checkpoint is step 5; leaving with exit code 74" in worker.errors


# Errors of one are errors of all.


@pytest.mark.parametrize(
    ("loop", "rank", "error", "code", "text"),
    [
        ("resumable", 0, "ValueError", 1, "ValueError: the loss is no number"),
        ("run", 1, "StopIteration", 1, "StopIteration"),
        ("resumable", 1, "UnspeakableError", 1, "UnspeakableError"),
        ("run", 0, "SystemExit", 3, "SystemExit: 3"),
        # As of data that ends early on one worker.
        ("resumable", 1, "StopIteration", 1, "StopIteration"),
    ],
)
def test_an_error_of_one_worker_ends_all(
    tmp_path: Path, loop: str, rank: int, error: str, code: int, text: str
) -> None:
    options = {"loop": loop, "every": 2, **LOCKSTEP}
    with Jobs(tmp_path / "run", each={rank: {"raise_in": 5, "error": error}}, **options) as jobs:
        codes = jobs.end()
        assert codes[rank] == code, jobs.report()
        assert codes[1 - rank] == 1, jobs.report()
        told = jobs.workers[1 - rank].errors
        assert re.search(rf"PeerError: rank {rank} on \S+: {text}", told), told
        # What that one prints itself, on the same machine, is not repeated. Of an exit it prints nothing.
        assert ("raise ERRORS" in told) == (error == "SystemExit"), told
        assert (f"On rank {rank}:\nTraceback (most recent call last):" in told) == (error == "SystemExit")
        # The other one has it in its log, once, in one line.
        line = rf"^holdfast: training of step 5 in {tmp_path / 'run'} failed: rank {rank} on \S+: {text}"
        found = [len(re.findall(line, worker.errors, re.MULTILINE)) for worker in jobs.workers]
        assert found == [rank, 1 - rank], jobs.report()


def test_an_error_after_a_notice_ends_all_with_its_cause(tmp_path: Path) -> None:
    each = {0: {"pause": [5]}, 1: {"pause": [3, "finally"], "raise_in": 3, "error": "ValueError"}}
    with Jobs(tmp_path / "run", loop="run", each=each) as jobs:
        ask_where_all_pause(jobs, 0)
        jobs.workers[0].go_on()
        # It saves the stop step, for which the other one's part will never come.
        jobs.workers[0].wait_for("event Staged")
        jobs.workers[1].go_on()
        # Nobody waits until the one that has failed has ended.
        assert jobs.workers[0].end() == 1, jobs.report()
        assert re.search(r"PeerError: rank 1 on \S+: ValueError: the loss is no number", jobs.workers[0].errors)
        jobs.workers[1].go_on()
        assert jobs.workers[1].end() == 1
        assert check_whole(tmp_path / "run") == []


def test_an_error_that_the_program_swallows_ends_it_all_the_same(tmp_path: Path) -> None:
    each = {
        0: {"raise_in": 3, "error": "ValueError"},
        1: {"swallow": "step"},
        2: {"swallow": "run"},
        # That is no swallowing, but may take its time.
        3: {"finally_seconds": 5.5},
    }
    with Jobs(tmp_path / "run", 4, loop="run", each=each, **LOCKSTEP) as jobs:
        assert jobs.end() == [1, 1, 1, 1], jobs.report()
        for worker in jobs.workers:
            assert "ValueError: the loss is no number" in worker.errors
        for worker in jobs.workers[1:3]:
            assert "this one continued in spite of the error: its process is ended" in worker.errors
        assert "PeerError: rank 0" in jobs.workers[3].errors


def test_a_worker_that_returns_early_ends_all(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", loop="run", each={1: {"return_after": 4}}, **LOCKSTEP) as jobs:
        codes = jobs.end()
        assert codes[0] == 1, jobs.report()
        assert "rank 1" in jobs.workers[0].errors
        assert "its training ended after step 4" in jobs.workers[0].errors


def test_worker_evaluating_after_its_last_step_is_not_a_step_ahead(tmp_path: Path) -> None:
    """In a loop of one's own nobody knows whether another step comes."""
    late = {"evaluate": [TOTAL - 1], "checkpointable": True, "pause": ["evaluation"], "finally_seconds": 2.0}
    with Jobs(tmp_path / "run", loop="own", each={0: late}) as jobs:
        jobs.workers[0].wait_for("paused")
        # Behind the block of its handler.
        jobs.workers[1].wait_for(f"event Staged {TOTAL}")
        jobs.workers[0].go_on()
        assert jobs.end() == [0, 0], jobs.report()


def test_killed_worker_is_found_before_long_liveness_seconds(tmp_path: Path) -> None:
    with Jobs(tmp_path / "run", liveness=600.0, each={0: {"pause": [4]}}, **LOCKSTEP) as jobs:
        jobs.workers[0].wait_for("paused")
        jobs.workers[0].send(signal.SIGKILL)
        assert jobs.workers[1].end() == 1, jobs.report()
        assert re.search(r"rank 0 on \S+ has died: its process has ended", jobs.workers[1].errors), jobs.report()


# Faults at random moments.


@pytest.mark.slow
def test_a_job_that_is_struck_at_random_moments_comes_to_its_end(tmp_path: Path) -> None:
    tally = leaving.run(tmp_path, len(leaving.WAYS), seed=1)
    assert all(tally[way] for way in leaving.WAYS)
