"""Going back within the running process: to a good step, without the batches drawn since, bit for bit."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader

import holdfast
import preloaded
from holdfast.catalog import StoredRun
from holdfast.errors import NoCheckpointError, NotFiniteError, UsageError
from holdfast.storage import open_storage
from holdfast.testing.processes import Workers, python
from jobs import HOST, environment, find_port
from patience import PATIENCE_SECONDS
from places import PROGRAMS

PROGRAM = PROGRAMS / "gone_bad.py"
LOOPS = ("steps", "epochs", "own")
STEPS = 40


def load() -> Any:
    spec = importlib.util.spec_from_file_location("gone_bad", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train


train = load()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def saved(directory: Path) -> list[int]:
    return [name.step for name in StoredRun(open_storage(directory)).look().living]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_went_back_is_as_one_without_these_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: str
) -> None:
    """A batch anywhere is bad; often an epoch ends between the good step and the one at which that is known."""
    generator = random.Random(5)
    for number in range(4):
        caplog.clear()
        with caplog.at_level("INFO", "holdfast"):
            bad = generator.randrange(4, STEPS - 9)  # It is known nine steps later, however busy the machine is.
            found = train(tmp_path / f"{number}", "rollback", STEPS, loop, bad=(0, bad), quiet=False)
        went = re.search(r"went back from step (\d+) to step (\d+), without (\d+) batch", caplog.text)
        assert went is not None, caplog.text
        _, target, count = map(int, went.groups())
        assert found["back"] == [target]
        assert target == (bad - 1) // 3 * 3
        assert target + count >= bad
        plain = train(tmp_path / f"{number}-plain", "warn", STEPS, loop, left_out={target: count})
        assert (found["digest"], found["step"]) == (plain["digest"], STEPS), (bad, went[0])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("killed", ["going", "later"])
def test_a_kill_does_not_bring_the_bad_batches_back(tmp_path: Path, loop: str, killed: str) -> None:
    arguments = ["rollback", str(STEPS), "0", "11", loop]
    with Workers(tmp_path) as workers:
        kill = {"KILLED": "going" if killed == "going" else "11"}
        command = python(PROGRAM, tmp_path / "run", *arguments)
        workers.start(command, kill, preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS) == [-9], workers.report(0)
        newest = saved(tmp_path / "run")[-1]
        arguments[3] = "0"
        workers.start(python(PROGRAM, tmp_path / "run", *arguments), {}, preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS) == [-9, 0], workers.report(1)
        found = workers.records(1)[-1]
        if killed == "later":
            went = re.search(r"to step (\d+), without (\d+) batch", workers.errors(0))
            assert went is not None
            target, count = map(int, went.groups())
            assert found["agreed"] == ["data"]
        else:
            # The newest step is the bad one: the next start goes back at once, and goes on at the place in the data.
            target, count = 9, newest - 9 + (loop != "steps")
            assert "without what was drawn since" in workers.errors(1)
    plain = train(tmp_path / "plain", "warn", STEPS, loop, left_out={target: count})
    assert (found["digest"], found["step"]) == (plain["digest"], STEPS)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_workers_go_back_to_the_same(tmp_path: Path, rank: int) -> None:
    loop, bad = ("steps", "own")[rank], (16, 9)[rank]
    found = run_job(tmp_path / "back", "rollback", "60", str(rank), str(bad), loop)
    went = re.search(r"to step (\d+), without (\d+) batch", found[0][1])
    assert went is not None, found[0][1]
    plain = run_job(tmp_path / "plain", "warn", "60", "0", "0", loop, f"{went[1]}:{went[2]}")
    ends = [(record["digest"], record["step"]) for record, _ in (*found, *plain)]
    assert len(set(ends)) == 1, (went[0], ends)


LAST_STEP = """
import sys, numpy as np, holdfast
with holdfast.resumable(sys.argv[1], w=np.zeros(3), save_every=3) as run:
    for step, _ in zip(run.steps(12), run.batches(range(100))):
        if step == 11 and run.manager.worker.rank == 1:
            run.rollback(step=9)
"""


def test_one_worker_alone_cannot_go_back_when_the_other_has_ended(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        port = find_port()
        for rank in range(2):
            command = python("-c", LAST_STEP, str(tmp_path / "run"))
            workers.start(command, environment(rank, 2, port, agent=True), preloaded.TrainingPopen)
        workers.start(python("-c", HOST, str(port)), popen=preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [0, 1]) == [1, 1], workers.report(0) + workers.report(1)
        # Which of them finds it depends on how far the other one is.
        said = workers.errors(0) + workers.errors(1)
        cause = r"run\.rollback\(\) was called"
        assert re.search(f"UsageError: {cause}, and training cannot go back: (rank 0|this worker) has ended it", said)
        assert "call run.rollback on all workers" in said


def run_job(directory: Path, *arguments: str) -> list[tuple[dict[str, Any], str]]:
    """Returns for each of two workers what it ends with, and its log."""
    directory.mkdir()
    with Workers(directory) as workers:
        port = find_port()
        for rank in range(2):
            command = python(PROGRAM, directory / "run", *arguments)
            workers.start(command, environment(rank, 2, port, agent=True), preloaded.TrainingPopen)
        workers.start(python("-c", HOST, str(port)), popen=preloaded.TrainingPopen)
        assert workers.wait(PATIENCE_SECONDS, [0, 1]) == [0, 0], workers.report(0) + workers.report(1)
        return [(workers.records(rank)[-1], workers.errors(rank)) for rank in range(2)]


def test_a_third_time_to_one_step_is_an_error(tmp_path: Path) -> None:
    """What makes the state bad is not in the batches."""
    model = torch.nn.Linear(2, 2)
    loader = holdfast.ResumableDataLoader(torch.ones(60, 2), batch_size=2)
    batches, seen = loader.stream(), []
    options: dict[str, Any] = {"save_every": 1, "keep": holdfast.LastGood(), "on_nonfinite": "rollback"}

    def spoil() -> None:
        with holdfast.resumable(tmp_path, model=model, loader=loader, **options) as run:
            for step in run.steps(500):
                next(batches)
                seen.append(step)
                if step >= 4:
                    model.weight.data.fill_(float("nan"))

    with pytest.raises(NotFiniteError, match="has gone back to step 4 twice") as caught:
        spoil()
    assert caught.value.step == 4
    assert seen[:5] == [0, 1, 2, 3, 4]
    assert seen[5:].count(4) == 2


def run_by_hand(directory: Path, asked: dict[int, dict[str, Any]], **options: Any) -> tuple[list[Any], holdfast.Run]:
    """Trains twelve steps on the numbers from 0 on; returns what each step took. At a step, it goes back once."""
    state = {"sum": 0}
    loader: DataLoader[Any] = DataLoader(range(100), batch_size=1)  # type: ignore[arg-type]
    taken: list[Any] = []
    with holdfast.resumable(directory, state=state, save_every=2, **{"keep": holdfast.All(), **options}) as run:
        for step, batch in zip(run.steps(12), run.batches(loader), strict=False):
            state["sum"] += int(batch)
            run.report(loss=float(step))
            taken.append((step, int(batch)))
            if step + 1 in asked:
                run.rollback(**asked.pop(step + 1))
    assert state["sum"] == sum(dict(taken).values())
    return taken, run


def test_a_program_goes_back_by_itself(tmp_path: Path) -> None:
    taken, _ = run_by_hand(tmp_path / "a", {8: {"step": 4}})
    assert taken == [*((step, step) for step in range(8)), *((step, step + 4) for step in range(4, 12))]
    assert saved(tmp_path / "a") == [2, 4, 6, 8, 10, 12]
    # Counted from the step: one batch is left out, and the others are trained again.
    taken, _ = run_by_hand(tmp_path / "b", {8: {"step": 4, "skip_batches": 1}})
    assert taken == [*((step, step) for step in range(8)), *((step, step + 1) for step in range(4, 12))]
    # A good step is also one whose metric is as it should be.
    keep = holdfast.All() | holdfast.LastGood(where=lambda metrics: metrics["loss"] < 4)
    taken, _ = run_by_hand(tmp_path / "c", {9: {}}, keep=keep)
    assert taken == [*((step, step) for step in range(9)), *((step, step + 5) for step in range(4, 12))]
    with pytest.raises(NoCheckpointError):
        run_by_hand(tmp_path / "d", {8: {"step": 3}})


def test_training_goes_on_after_the_last_step_went_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken, run = run_by_hand(tmp_path / "a", {12: {"step": 10}})
    assert taken == [*((step, step) for step in range(12)), (10, 12), (11, 13)]
    assert run.step == 12
    with caplog.at_level("INFO", "holdfast"):
        taken, _ = run_by_hand(tmp_path / "b", {12: {"step": 10, "skip_batches": 0}})
    assert taken == [*((step, step) for step in range(12)), (10, 10), (11, 11)]
    assert "from step 12 to step 10, without leaving out a batch" in caplog.text


def test_leaving_out_more_batches_than_there_are_ends_with_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In epochs of `run`; a sampler of its own counts on without drawing, also beyond any number of steps."""
    loader: DataLoader[Any] = DataLoader(range(5), batch_size=1, shuffle=True)  # type: ignore[arg-type]
    for again in range(2):  # A restart finds nothing to train either.
        taken = []
        with holdfast.resumable(tmp_path / "a", state={}, save_every=2) as run, caplog.at_level("INFO", "holdfast"):
            for epoch in run.epochs(4):
                for batch in run.batches(loader):
                    taken.append((epoch, int(batch)))
                    run.finish_step()
                    if run.step == 8:
                        run.rollback(step=6, skip_batches=10**9)
        assert len(taken) == (0 if again else 9)
        assert run.step == 6
    assert "from step 9 to step 6, without 14 batches, at the end of the last epoch" in caplog.text
    kept = holdfast.ResumableDataLoader(torch.arange(10.0), batch_size=3)
    batches = kept.stream()
    with holdfast.resumable(tmp_path / "b", loader=kept, save_every=2) as run:
        has_gone = False
        for step in run.steps(6):
            next(batches)
            if step == 3 and not has_gone:
                has_gone = True
                run.rollback(step=2, skip_batches=10**15)
    assert kept.epoch > 10**14


def test_an_iterator_of_ones_own_is_refused(tmp_path: Path) -> None:
    loader: DataLoader[Any] = DataLoader(range(100), batch_size=1)  # type: ignore[arg-type]
    with holdfast.resumable(tmp_path / "a", state={}, save_every=2) as run:
        for _, _ in zip(run.steps(4), iter(loader), strict=False):
            with pytest.raises(UsageError, match="its batches come from an iterator that is the program's own"):
                run.rollback()
    with holdfast.resumable(tmp_path / "b", state={}, save_every=2) as run:
        for _, step in zip(run.batches(loader), run.steps(4), strict=False):
            if step == 1:
                with pytest.raises(UsageError, match="before that step begins"):
                    run.rollback()
    with pytest.raises(UsageError, match="skip_batches"):
        run.rollback(skip_batches=-1)
