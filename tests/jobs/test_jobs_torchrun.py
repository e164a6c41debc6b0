"""Jobs whose nodes are the workers that torchrun starts: processes, and threads where that is enough."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
import preloaded
from epoch_jobs import FullForSteps, count_threads, epochs_of, make_job, totals_of, wait_for_threads
from holdfast.cluster import Cluster
from holdfast.errors import (
    AbsentError,
    ClosedError,
    ClusterError,
    NoCheckpointError,
    SaveFailedError,
    TaskFailedError,
    UnsupportedValueError,
    UsageError,
)
from holdfast.jobs import Task, TorchrunSession, UploadTo, Workspace
from holdfast.testing.processes import Workers, python
from memory_engine import run_workers
from places import PROGRAMS, TESTS

pytestmark = pytest.mark.usefixtures("numpy_is_known")

PROGRAM = PROGRAMS / "job_worker.py"
NODES = ["worker_0", "worker_1", "worker_2"]
ALL = dict.fromkeys(NODES, 145.0)
LIVENESS_SECONDS = 4.0


def start(workers: Workers, tmp_path: Path, *arguments: str | Path) -> None:
    """Starts three workers without any framework."""
    store = tmp_path / "store" / str(len(list((tmp_path / "store").glob("*"))))
    store.mkdir(parents=True)
    for rank in range(3):
        environment = {"RANK": str(rank), "WORLD_SIZE": "3", "JOB_STORE": str(store)}
        workers.start(python(PROGRAM, *arguments), environment, preloaded.Popen)


def check_nothing_partial(directory: Path) -> None:
    for step in directory.glob("step-*"):
        assert (step / "manifest.json").exists(), f"{step} is partial"


# torchrun itself.


@pytest.mark.slow
@pytest.mark.long
def test_a_worker_killed_while_an_epoch_is_saved_is_restarted_by_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    launch = python(PROGRAMS / "elastic.py", PROGRAM.stem, "3", "1")
    with Workers(tmp_path) as workers:
        workers.start(
            [*launch, "keep", tmp_path / "run", "dies"],
            {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROGRAM.parent}:{':'.join(sys.path)}"},
        )
        assert workers.wait(240) == [0], workers.report(0)
        records = workers.records(0)
    assert [record["resumed"] for record in records if "resumed" in record][-3:] == [2, 2, 2]
    assert [record["totals"] for record in records if "totals" in record] == [ALL] * 3
    assert epochs_of(tmp_path / "run") == (0, 1, 2, 3, 4)
    check_nothing_partial(tmp_path / "run")


# Processes that are killed, or that fail.


def test_a_worker_killed_while_an_epoch_is_saved(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        start(workers, tmp_path, "keep", tmp_path / "run", "dies")
        assert workers.wait(120, [0, 1, 2]) == [1, -9, 1]
        for rank in (0, 2):
            assert "worker 1" in workers.errors(rank) or "rank 1" in workers.errors(rank)
    assert epochs_of(tmp_path / "run") == (0, 1, 2)
    with Workers(tmp_path) as workers:
        start(workers, tmp_path, "keep", tmp_path / "run")
        assert workers.wait(120, [0, 1, 2]) == [0, 0, 0], [workers.report(rank) for rank in range(3)]
        for rank in range(3):
            assert workers.wait_said(rank, "resumed", 1) == 2
            assert workers.wait_said(rank, "totals", 1) == ALL
    check_nothing_partial(tmp_path / "run")


def test_a_task_that_fails_ends_the_others_within_seconds(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        # Worker 2 is as the shell starts it with `&`: deaf to Ctrl-C.
        start(workers, tmp_path, "fail")
        assert workers.wait(60, [0, 1, 2]) == [1, 1, 1]
        for rank in range(3):
            (record,) = [record for record in workers.records(rank) if "task" in record]
            assert (record["group"], record["task"], record["node"]) == ("epoch", "work", "worker_1")
            assert "no more" in record["text"]


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGKILL, -9, "has died: its process has ended"),
        (signal.SIGTERM, 42, "left the job with exit code 42"),
    ],
)
def test_a_worker_that_ends_is_named_with_what_is_known(
    tmp_path: Path, number: signal.Signals, code: int, text: str
) -> None:
    with Workers(tmp_path) as workers:
        start(workers, tmp_path, "end", tmp_path / "run", str(number.value))
        assert workers.wait(120, [0, 1, 2]) == [1, code, 1], [workers.report(rank) for rank in range(3)]
        for rank in (0, 2):
            assert workers.wait_said(rank, "ranks", 1) == [1]
            assert workers.wait_said(rank, "message", 1).endswith(text)


@pytest.mark.long
def test_random_kills_end_at_the_same_total_with_two_epochs_kept(tmp_path: Path) -> None:
    command = python("-m", "crash.epoch_job", "--kills", "20", "--directory", tmp_path / "crash")
    done = subprocess.run(list(map(str, command)), cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 kills" in done.stdout


# Threads, each of which is a worker.


def run_three(work: Callable[[TorchrunSession], Any], **options: Any) -> list[Any]:
    """Does the same in three sessions of one job; gives what each has returned, or raised."""

    def begin(cluster: Cluster) -> Any:
        try:
            with TorchrunSession(cluster=cluster, liveness_seconds=LIVENESS_SECONDS, **options) as session:
                return work(session)
        except Exception as error:
            return error

    return run_workers(3, begin)


def train_kept(
    session: TorchrunSession, place: Any, epoch: int | None = None, **options: Any
) -> tuple[hf.JobRunner, hf.jobs.Task, hf.MultiNodeCheckpointManager]:
    job = make_job(None)
    total = job.exit_group.add(lambda workspace: float(workspace["total"][0]))
    manager = hf.MultiNodeCheckpointManager(place, **options)
    runner = hf.JobRunner(job, manager, epoch)
    assert runner.train(session) == 4
    return runner, total, manager


def test_without_a_manager_a_job_just_runs_and_outputs_are_known_to_all() -> None:
    def work(session: TorchrunSession) -> None:
        job = make_job(None)
        total = job.exit_group.add(lambda workspace: float(workspace["total"][0]))
        array = job.exit_group.add(lambda workspace: workspace["total"])
        assert hf.JobRunner(job).train(session) == 4
        assert total.results() == ALL
        for node in NODES:
            output = array.output_on(node).fetch()
            if node == session.node:
                assert output.sum() == 145_000.0
            else:
                assert repr(output) == f"RemoteOutput(on {node})", "what is not plain stays where it is"
                assert not output, "an array of several elements is neither true nor false"

    assert run_three(work) == [None] * 3


def test_the_canonical_job_is_kept_and_goes_on_from_each_epoch(tmp_path: Path) -> None:
    def work(session: TorchrunSession) -> None:
        for epoch in (None, 0, 1, 2, 3, 4):
            runner, total, manager = train_kept(session, tmp_path, epoch)
            assert total.results() == ALL
            assert (runner.result.resumed_from, runner.result.saves_failed) == (epoch, 0)
            assert runner.load_blobs_from_checkpoints("total", 2, session) == dict.fromkeys(NODES, ("total",))
            assert session.workspace()["total"][0] == 115.0
            assert session.workspace()["where"]["node"] == session.node, "equal names are kept apart"
            reports = getattr(manager.metadata_handler, "reports", {})
            assert bool(reports) == session.is_master
            assert all(set(one.node_seconds) == set(NODES) for stats in reports.values() for one in stats)
            if session.is_master:
                assert len(reports.get("checkpoint_save", ())) == (5 if epoch is None else 4 - epoch)

    assert run_three(work) == [None] * 3
    manager = hf.MultiNodeCheckpointManager(tmp_path)
    assert manager.epochs() == (0, 1, 2, 3, 4)
    assert manager.get_ckpt_db_name("worker_2", 4) != manager.get_ckpt_db_name("worker_1", 4), "each has its own file"
    # What workers have saved can be gone on from in one process, and the other way round.
    with hf.LocalSession(NODES) as session:
        runner = hf.JobRunner(make_job(NODES), manager, 1)
        assert runner.train(session) == 4
        assert totals_of(session) == [145.0] * 3
    assert run_three(lambda session: dict(train_kept(session, tmp_path, 2)[1].results())) == [ALL] * 3


def test_a_disk_that_is_full_for_one_worker_loses_that_epoch_for_all() -> None:
    storage = FullForSteps("full for one")
    storage.full, storage.file = frozenset({3}), "data-00001"

    def work(session: TorchrunSession) -> Any:
        runner, total, _ = train_kept(session, storage)
        return runner.result.failed_epochs, dict(total.results())

    assert run_three(work) == [((3,), ALL)] * 3
    assert epochs_of(storage) == (0, 1, 2, 4)


def test_a_disk_that_is_always_full_for_one_worker_ends_the_job_on_all() -> None:
    storage = FullForSteps("always full for one")
    storage.full, storage.file = None, "data-00001"
    runners: dict[str, hf.JobRunner] = {}

    def work(session: TorchrunSession) -> None:
        manager = hf.MultiNodeCheckpointManager(storage)
        runners[session.node] = hf.JobRunner(make_job(None), manager, failures_allowed=2)
        runners[session.node].train(session)

    for error in run_three(work):
        assert isinstance(error, SaveFailedError)
        assert "no room" in error.message
    assert {runner.result.failed_epochs for runner in runners.values()} == {(0, 1, 2)}
    assert epochs_of(storage) == ()


def test_workers_whose_state_is_not_kept_take_part(tmp_path: Path) -> None:
    own = ["worker_0", "worker_2"]

    def work(session: TorchrunSession) -> dict[str, float]:
        job = make_job(own)
        total = job.exit_group.add(lambda workspace: float(workspace["total"][0]), on=own)
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path)).train(session)
        return dict(total.results())

    assert run_three(work) == [dict.fromkeys(own, 145.0)] * 3


def test_two_sessions_of_the_same_workers_do_not_mix(tmp_path: Path) -> None:
    def begin(cluster: Cluster) -> list[float]:
        totals = []
        for name in ("a", "b"):
            with TorchrunSession(cluster=cluster, liveness_seconds=LIVENESS_SECONDS) as session:
                train_kept(session, tmp_path / name)
                totals.append(float(session.workspace()["total"][0]))
        # Two at once, one within the other.
        outer = TorchrunSession(["a", "b", "c"], cluster=cluster, liveness_seconds=LIVENESS_SECONDS)
        with outer, TorchrunSession(cluster=cluster, liveness_seconds=LIVENESS_SECONDS) as inner:
            train_kept(inner, tmp_path / "inner")
            train_kept(outer, tmp_path / "outer")
            totals += [float(session.workspace()["total"][0]) for session in (inner, outer)]
        return totals

    assert run_workers(3, begin) == [[145.0] * 4] * 3
    assert {epochs_of(tmp_path / name) for name in ("a", "b", "inner", "outer")} == {(0, 1, 2, 3, 4)}


def test_the_last_epoch_is_uploaded(tmp_path: Path) -> None:
    def work(session: TorchrunSession) -> None:
        manager = hf.MultiNodeCheckpointManager(tmp_path / "run")
        hf.JobRunner(make_job(None), manager, upload_task_group_builder=UploadTo(tmp_path / "there")).train(session)

    assert run_three(work) == [None] * 3
    assert epochs_of(tmp_path / "there") == (4,)
    with hf.LocalSession(NODES) as session:
        assert hf.JobRunner(make_job(NODES), hf.MultiNodeCheckpointManager(tmp_path / "there")).train(session) == 4
        assert totals_of(session) == [145.0] * 3


class Stubborn:
    """An object that cannot be made, or whose state cannot be had, in the thread of worker 1."""

    def __init__(self, which: str, *, is_broken: bool) -> None:
        self.is_broken = is_broken
        if which == "made" and is_broken:
            raise ZeroDivisionError("cannot be made")

    def state_dict(self) -> dict[str, Any]:
        if self.is_broken:
            raise ZeroDivisionError("has no state")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_failure_outside_of_tasks_is_raised_on_all_workers(tmp_path: Path) -> None:
    def work(session: TorchrunSession, which: str) -> None:
        job = make_job(None)
        job.add_object("stubborn", lambda: Stubborn(which, is_broken=session.node == "worker_1"))
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / which)).train(session)

    for error in run_three(lambda session: work(session, "made")):
        assert isinstance(error, TaskFailedError)
        assert (error.group, error.task, error.node) == ("objects", "make stubborn", "worker_1")
        assert "cannot be made" in error.message
    first, own, third = run_three(lambda session: work(session, "state"))
    assert isinstance(own, UnsupportedValueError)
    for error in (first, third):
        assert isinstance(error, AbsentError)
        assert error.ranks == (1,)
        assert "UnsupportedValueError: worker_1/stubborn: the state of Stubborn" in error.message


def test_after_an_error_of_one_worker_the_session_is_refused_on_all(tmp_path: Path) -> None:
    def work(session: TorchrunSession) -> list[Exception]:
        job = make_job(None)
        job.add_object("stubborn", lambda: Stubborn("state", is_broken=session.node == "worker_1"))
        errors: list[Exception] = []
        # The program catches the error and goes on, as if nothing were.
        for number, again in enumerate((job, make_job(None), make_job(None))):
            try:
                hf.JobRunner(again, hf.MultiNodeCheckpointManager(tmp_path / str(number))).train(session)
            except Exception as error:
                errors.append(error)
        with pytest.raises(ClosedError):
            session.run(Task(lambda workspace: None))
        assert "total" in session.workspace(), "what a worker has can still be looked at"
        return errors

    for rank, errors in enumerate(run_three(work)):
        first, *later = errors
        if rank == 1:
            assert isinstance(first, UnsupportedValueError)
        else:
            assert isinstance(first, AbsentError)
            assert first.ranks == (1,)
            assert "UnsupportedValueError" in first.message
        assert [type(error) for error in later] == [ClosedError] * 2
        assert "no longer together" in str(later[0])
        assert "Create a new TorchrunSession" in str(later[0])


def test_after_an_error_of_all_workers_the_session_can_be_used(tmp_path: Path) -> None:
    def fail(workspace: Workspace) -> None:
        if workspace.node == "worker_2":
            raise ZeroDivisionError("no more")

    def work(session: TorchrunSession) -> None:
        job = hf.Job()
        job.epoch_group.add(fail)
        hf.epoch_limiter(job, 1)
        with pytest.raises(TaskFailedError, match="no more"):
            hf.JobRunner(job).train(session)
        with pytest.raises(NoCheckpointError, match="epoch 7 was not saved"):
            hf.JobRunner(make_job(None), hf.MultiNodeCheckpointManager(tmp_path), 7).train(session)
        assert hf.JobRunner(make_job(None), hf.MultiNodeCheckpointManager(tmp_path)).train(session) == 4

    assert run_three(work) == [None] * 3


def test_workers_with_different_calls_are_refused(tmp_path: Path) -> None:
    train = partial(train_kept, place=tmp_path)
    assert run_three(lambda session: train(session)[0].result.last_epoch) == [4] * 3
    epochs = {"worker_0": 3, "worker_1": 2}
    for error in run_three(lambda session: train(session, epoch=epochs.get(session.node))):
        assert isinstance(error, UsageError)
        assert "worker_0 from epoch 3, worker_1 from epoch 2, worker_2 from the newest epoch" in error.message

    def run_one_more(session: TorchrunSession) -> None:
        if session.node == "worker_1":
            session.run(Task(lambda workspace: None, name="one more"))
        session.run(Task(lambda workspace: None, name="the same"))

    for error in run_three(run_one_more):
        assert isinstance(error, ClusterError)
        assert "rank 0 for the group the same; rank 1 for the group one more" in error.message


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="liveness_seconds"):
        TorchrunSession(cluster="alone", liveness_seconds=0.1)
    with pytest.raises(UsageError, match="2 names for 1 workers"):
        TorchrunSession(["a", "b"], cluster="alone")
    with pytest.raises(UsageError, match="cluster must be"):
        TorchrunSession(cluster="here")  # type: ignore[arg-type]


def test_nothing_is_left_when_sessions_are_closed(tmp_path: Path) -> None:
    before = count_threads()

    def work(session: TorchrunSession) -> None:
        runner, _, _ = train_kept(session, tmp_path)
        runner.load_blobs_from_checkpoints("total", 2, session)
        assert runner.save_checkpoints(5, session)

    assert run_three(work) == [None] * 3
    wait_for_threads(before)
