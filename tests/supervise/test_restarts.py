"""Deciding whether a program is started again."""

from __future__ import annotations

import signal

import pytest

from holdfast.preemption.config import EXIT_RESTART
from holdfast.supervise.restarts import PREEMPTED, End, LastError, Options, decide

CRASH = LastError("ValueError at train.py:12", "ValueError: boom")
KILLED = -int(signal.SIGKILL)


def end(code: int = 1, step: int | None = 10, *, seconds: float = 100.0, saved: int = -1, text: str = "boom") -> End:
    failure = LastError(f"ValueError at train.py:{text}", f"ValueError: {text}") if code == 1 else LastError()
    return End(code, step, seconds, saved, "", failure)


def test_the_code_of_a_preempted_program_is_that_with_which_a_run_leaves() -> None:
    assert PREEMPTED == EXIT_RESTART


@pytest.mark.parametrize("code", [0, 42, 74, 130])
def test_codes_that_mean_an_end(code: int) -> None:
    assert not decide([end(code)], Options(), is_asked=False).restarts
    assert decide([end(code)], Options(on_code={code: True}), is_asked=False).restarts


@pytest.mark.parametrize("code", [1, 3, 139, KILLED, -int(signal.SIGSEGV), -int(signal.SIGTERM)])
def test_failures_are_followed_by_another_start(code: int) -> None:
    assert decide([end(code)], Options(), is_asked=False).restarts
    assert not decide([end(code)], Options(), is_asked=True).restarts
    assert not decide([end(code)], Options(on_code={code: False}), is_asked=False).restarts


def test_what_cannot_succeed_is_not_started_again() -> None:
    hopeless = end()._replace(failure=CRASH._replace(is_hopeless=True))
    assert "would again" in decide([hopeless], Options(), is_asked=False).why
    assert not decide([end(2, 0)], Options(), is_asked=False).restarts
    assert not decide([end(2, None)], Options(), is_asked=False).restarts
    assert decide([end(2, 5)], Options(), is_asked=False).restarts


def test_the_same_failure_at_the_same_step_three_times_is_a_loop() -> None:
    assert decide([end()] * 2, Options(), is_asked=False).restarts
    verdict = decide([end()] * 3, Options(), is_asked=False)
    assert not verdict.restarts
    assert verdict.why == "three times in a row it failed with ValueError: boom at step 10"
    assert "before its first step" in decide([end(step=0)] * 3, Options(), is_asked=False).why
    assert decide([end(), end(text="other"), end()], Options(), is_asked=False).restarts
    assert decide([end(), end(step=11), end()], Options(), is_asked=False).restarts
    assert decide([end(), end(KILLED), end()], Options(), is_asked=False).restarts


def test_a_rollback_is_not_a_failure_and_starts_the_count_again() -> None:
    rollback = end(step=11)._replace(failure=LastError("RolledBackError at x.py:1", "text", is_rollback=True))
    assert decide([rollback] * 20, Options(), is_asked=False) == (True, 0.0, "")
    # Such as a crash on the way to where the rollback began: it has come further than the step gone back to.
    assert decide([rollback, end(step=9)], Options(), is_asked=False).pause_seconds == 0
    assert decide([rollback, end(step=9), end(step=9)], Options(), is_asked=False).pause_seconds == 1
    assert not decide([rollback] * 3, Options(max_restarts=2), is_asked=False).restarts
    assert rollback.reason == "went back"


def test_without_a_count_of_steps_three_quick_failures_are_a_loop() -> None:
    quick, slow = end(step=None, seconds=5), end(step=None, seconds=300)
    assert decide([quick, quick], Options(), is_asked=False).restarts
    assert decide([quick, slow, quick, quick], Options(), is_asked=False).restarts
    assert "within 60 seconds" in decide([slow, quick, quick, quick], Options(), is_asked=False).why


def test_different_failures_without_progress_end_it_too() -> None:
    ends = [end(step=20)] + [end(step=number % 7, text=str(number)) for number in range(10)]
    assert decide(ends[:-1], Options(), is_asked=False).restarts
    assert "no further than step 20" in decide(ends, Options(), is_asked=False).why
    # Steps of another run are no measure.
    folds = [one._replace(run="fold-2" if place else "fold-1", step=place + 9) for place, one in enumerate(ends)]
    assert decide([ends[0]._replace(run="fold-1", step=1000), *folds[1:]], Options(), is_asked=False).restarts
    # What is committed counts as progress, even if a start came less far than one before it.
    saving = [one._replace(saved=number) for number, one in enumerate(ends)]
    assert decide(saving, Options(), is_asked=False).restarts


def test_pauses_grow_without_progress_only() -> None:
    def pauses(ends: list[End]) -> list[float]:
        return [decide(ends[:n], Options(), is_asked=False).pause_seconds for n in range(1, len(ends) + 1)]

    assert pauses([end(step=step, text=str(step)) for step in range(5)]) == [0.0] * 5
    assert pauses([end(step=9, text=str(n)) for n in range(9)]) == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses([end(step=None, seconds=70)] * 4) == [0.0] * 4
    assert pauses([end(step=None, seconds=5)] * 2) == [0.0, 1.0]
    # Starts that came further are no failures to begin, however soon they ended.
    quick = [end(step=step, seconds=15, text=str(step)) for step in range(5)]
    assert pauses([*quick, end(step=None, seconds=5), end(step=None, seconds=5)]) == [0.0] * 6 + [1.0]


def test_a_number_of_restarts_is_kept_to() -> None:
    ends = [end(step=step) for step in range(3)]
    assert decide(ends[:2], Options(max_restarts=2), is_asked=False).restarts
    assert "--max-restarts 2 are used up" in decide(ends, Options(max_restarts=2), is_asked=False).why
    assert not decide(ends[:1], Options(max_restarts=0), is_asked=False).restarts


def test_reasons_and_codes_in_words() -> None:
    assert end(KILLED).reason == "killed by SIGKILL"
    assert end(KILLED).exit_code == 137
    assert end(-70).reason == "killed by signal 70"
    assert end(3).reason == "ended with code 3"
    assert end()._replace(hung="in a step for 40 s").reason == "hung (in a step for 40 s)"
