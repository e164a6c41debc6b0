"""The demo: it says yes where two runs are bit-identical, no where they are not, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import preloaded
from command_line import job_that_cannot_be_joined
from demo.__main__ import command
from demo.pair import PairRun, find_objections
from demo.process import DemoError, Process
from demo.reports import Evidence, PairEnded, PairLeft, PairReport, PairStep, Settings, StepDone
from demo.supervise import plan_kills
from demo.verdict import compare_evidence, compare_steps
from holdfast.catalog import StoredRun
from holdfast.storage import LocalStorage
from patience import PATIENCE_SECONDS, killed_after
from places import EXAMPLES

DEMO = "from demo.__main__ import command; command(prog_name='demo')"
EVIDENCE: Evidence = {"weights": {"layer": "ab", "head": "cd"}, "loss log": {"step 1": "0x1.8p+1"}}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """The place for temporary files: not below pytest's own, since the loaders have sockets there with short paths."""
    with tempfile.TemporaryDirectory(prefix="hf-") as place:
        yield Path(place)


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that finds the demo, as `make demo` starts it."""
    return {**os.environ, "PYTHONPATH": str(EXAMPLES), **more}


def run_demo(scratch: Path, *arguments: str, part: str = "kills") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DEMO, "--part", part, *arguments],
        env=environment(TMPDIR=str(scratch)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "kills", "options"),
    [
        # With this seed the kill comes early in an early write; if it comes too late all the same, others follow.
        (8, 1, ["--steps=8", "--kills=1", "--seed=22"]),
        pytest.param(24, 2, [], marks=pytest.mark.long),
    ],
    ids=["short", "whole"],
)
def test_a_run_that_is_killed_ends_bit_identical(
    tmp_path: Path, scratch: Path, steps: int, kills: int, options: list[str]
) -> None:
    place = tmp_path / "demo"
    done = run_demo(scratch, "--quick", "--directory", str(place), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT: yes" in done.stdout
    assert "DIFFERS" not in done.stdout
    assert done.stdout.count("killed (SIGKILL)") >= kills
    assert "in the middle of writing the checkpoint" in done.stdout
    catalog = StoredRun(LocalStorage(place / "run")).look()
    assert catalog.newest is not None
    assert catalog.newest.step == steps
    assert not catalog.unfinished, "what a kill left is swept away"
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_forgets_its_generators_is_found_out(scratch: Path) -> None:
    # With this seed the kill comes after a checkpoint, so that a process goes on without the generators' state.
    assert plan_kills(3, 1, 8)[0].step > 2
    done = run_demo(scratch, "--quick", "--steps=8", "--kills=1", "--seed=3", "--forget=rng")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VERDICT: no" in done.stdout
    verdict = done.stdout.partition("VERDICT: no")[2]
    for item in ("weights", "optimizer state", "random generators", "loss log", "every step on the way"):
        assert f"{item}: " in verdict
    assert "sample order" not in verdict
    assert list(scratch.iterdir()) == []


def test_what_is_equal_is_identical() -> None:
    comparisons = compare_evidence(EVIDENCE, {item: dict(parts) for item, parts in EVIDENCE.items()})
    assert [str(comparison) for comparison in comparisons] == ["weights: identical", "loss log: identical"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"weights": {"layer": "ab", "head": "ce"}}, "weights: 1 of 2 differ, head"),
        ({"weights": {"layer": "ab"}}, "weights: 1 of 2 differ, head"),
        ({"weights": {"layer": "", "head": ""}}, "weights: 2 of 2 differ, first layer"),
        ({"weights": {"layer": "ab", "head": "cd", "tail": ""}}, "weights: 1 of 3 differ, tail"),
        ({"weights": {}}, "weights: 2 of 2 differ, first layer"),
    ],
)
def test_what_differs_is_named(changed: Evidence, text: str) -> None:
    for pair in ((EVIDENCE, EVIDENCE | changed), (EVIDENCE | changed, EVIDENCE)):
        weights, losses = compare_evidence(*pair)
        assert not weights.identical
        assert weights.untouched != weights.killed
        assert str(weights).startswith(text.rpartition(",")[0])
        assert losses.identical
    assert str(compare_evidence(EVIDENCE, EVIDENCE | changed)[0]) == text


def test_nothing_at_all_is_not_identical() -> None:
    (comparison,) = compare_evidence({"weights": {}}, {"weights": {}})
    assert not comparison.identical
    assert not compare_steps([], []).identical


def test_steps_that_were_done_twice_are_compared_twice() -> None:
    untouched = [step_done(step) for step in (1, 2, 3)]
    assert compare_steps(untouched, [step_done(step) for step in (1, 2, 2, 3)]).identical
    repeated_otherwise = [step_done(1), step_done(2), step_done(2, loss="0x1p+0"), step_done(3)]
    assert compare_steps(untouched, repeated_otherwise).differing == ("step 2",)
    other_samples = [step_done(1), step_done(2, samples=(9,)), step_done(3)]
    assert compare_steps(untouched, other_samples).differing == ("step 2",)
    assert compare_steps(untouched, [step_done(1), step_done(3)]).differing == ("step 2",)
    assert compare_steps(untouched, [step_done(step) for step in (1, 2, 3, 4)]).differing == ("step 4",)


def step_done(step: int, loss: str = "0x1.8p+1", samples: tuple[int, ...] = (1, 2)) -> StepDone:
    return StepDone(step=step, loss=loss, samples=samples, at_seconds=float(step))


@pytest.mark.parametrize("kills", [1, 2, 5, 40])
def test_kills_are_planned_all_over_the_run(kills: int) -> None:
    for seed in range(50):
        plans = plan_kills(seed, kills, 160)
        assert plans == plan_kills(seed, kills, 160)
        steps = [plan.step for plan in plans]
        assert steps == sorted(set(steps))
        assert steps[0] >= 1
        assert steps[-1] < 160
        assert sum(plan.in_write for plan in plans) == (kills + 1) // 2
    assert plan_kills(1, kills, 160) != plan_kills(2, kills, 160)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kills=0"], "--kills"),
        (["--quick", "--kills=7"], "7 kills need at least 28 steps"),
        (["--forget=everything"], "--forget"),
        (["--seed=-1"], "--seed"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    result = CliRunner().invoke(command, ["--directory", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert [found.name for found in tmp_path.iterdir()] == ["precious"]


def test_without_torch_it_says_what_to_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {DEMO}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "From a checkout of holdfast: pip install '.[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_fails_of_itself_shows_its_log(tmp_path: Path) -> None:
    wrong: Any = "many"
    with Process(Settings(steps=wrong), tmp_path, "broken", None, str(tmp_path)) as process:
        assert list(process.reports()) == []
        with pytest.raises(
            DemoError, match=r"broken failed with exit code 1; the end of its log:(.|\n)*ValidationError"
        ):
            process.wait_evidence()


@pytest.mark.slow
@pytest.mark.long  # `make demo` is the same, and `test_torchrun_preemption.py` shows what it shows.
def test_two_workers_stop_at_one_step_and_end_bit_identical(tmp_path: Path, scratch: Path) -> None:
    place = tmp_path / "demo"
    done = run_demo(scratch, "--quick", "--directory", str(place), part="workers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT: yes" in done.stdout
    assert "rank 0, which got no signal, has heard of it" in done.stdout
    assert done.stdout.count("saved, and leaves with 42") == 2
    assert done.stdout.count("started again, rank") == 2
    for rank in range(2):
        for item in ("weights", "optimizer state", "random generator", "loss of every step"):
            assert re.search(rf"rank {rank}: {item} +[0-9a-f]{{16}} +[0-9a-f]{{16}} +identical", done.stdout)


def test_workers_that_part_are_found_out() -> None:
    def make_run(*reports: PairReport) -> PairRun:
        run = PairRun()
        for report in reports:
            run.note(report)
        return run

    steps = [PairStep(rank=rank, process=rank, step=1, loss="0x1p+0") for rank in (0, 1)]
    ends = [PairEnded(rank=rank, digests={"weights": f"{rank}"}) for rank in (0, 1)]
    left = [PairLeft(rank=rank, step=1, exit_code=42) for rank in (0, 1)]
    untouched = make_run(*steps, *ends)

    def objections(*reports: PairReport) -> list[str]:
        asked = make_run(*reports)
        return find_objections(asked, compare_evidence(untouched.evidence, asked.evidence))

    assert objections(*steps, *left, *ends) == []
    assert len(objections(*steps, left[0], PairLeft(rank=1, step=2, exit_code=42), *ends)) == 1
    assert objections(*steps, *left, ends[0], PairEnded(rank=1, digests={"weights": "2"})) == [
        "rank 1: weights: 1 of 1 differ, weights"
    ]
    assert len(objections(*steps, *left, ends[0])) == 2
    assert objections(*steps, steps[0], *left, *ends) == ["rank 0: loss of every step: 1 of 1 differ, step 1"]


def test_training_within_a_job_is_alone(tmp_path: Path) -> None:
    with job_that_cannot_be_joined() as told:
        done = preloaded.run(
            [sys.executable, "-m", "demo.train", tmp_path / "run", "--steps", "2"],
            preload=preloaded.TRAINING,
            cwd=EXAMPLES,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout


@contextmanager
def demo_and_its_processes(scratch: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The demo in the midst of training, and a descriptor of each process that it has started."""
    with subprocess.Popen(
        [sys.executable, "-c", f"import signal; signal.signal(2, signal.default_int_handler); {DEMO}", "--quick"],
        env=environment(TMPDIR=str(scratch)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demo:
        descriptors: list[int] = []
        try:
            assert demo.stdout is not None
            with killed_after(PATIENCE_SECONDS, demo):
                assert any(line.startswith("untouched: ") for line in demo.stdout)
            trainers = children(demo.pid)
            workers = [worker for trainer in trainers for worker in children(trainer)]
            assert trainers
            assert workers
            descriptors = [os.pidfd_open(process) for process in (*trainers, *workers)]
            yield demo, descriptors
        finally:
            demo.kill()
            for descriptor in descriptors:
                os.close(descriptor)


def children(process: int) -> list[int]:
    return [
        int(child)
        for thread in Path(f"/proc/{process}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        *(pytest.param(*way, marks=pytest.mark.long) for way in ((signal.SIGTERM, 143), (signal.SIGKILL, -9))),
    ],
)
def test_no_process_outlives_it(scratch: Path, sent: signal.Signals, code: int) -> None:
    with demo_and_its_processes(scratch) as (demo, descriptors):
        demo.send_signal(sent)
        assert demo.wait(60) == code
        for descriptor in descriptors:
            # Readable when the process has ended.
            assert select.select([descriptor], [], [], 60)[0]
    if sent is not signal.SIGKILL:
        assert list(scratch.iterdir()) == []
