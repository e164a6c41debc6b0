"""Jobs whose nodes are actors of Ray."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from epoch_jobs import make_job, totals_of
from holdfast.errors import NodeLostError, TaskFailedError, UsageError
from holdfast.events import Committed, Event, NodesTimed
from holdfast.jobs import Task, Workspace

ray = pytest.importorskip("ray")

NODES = ["trainer_0", "trainer_1", "trainer_2"]


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    """Ray on this machine; its workers find holdfast and the modules of the tests where this process does."""
    source = Path(hf.__file__).parent.parent
    path = os.pathsep.join([str(source), str(Path(__file__).parent)])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


class Deadly:
    """An object whose node dies when its state is read for the epoch that it is set to, but once only."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.is_due = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_due and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def add_total(job: hf.Job) -> Task:
    return job.exit_group.add(lambda workspace: float(workspace["total"][0]))


def test_the_canonical_job_from_scratch_and_from_each_epoch(tmp_path: Path) -> None:
    events: list[Event] = []
    with hf.RaySession(NODES) as session:
        for epoch in (None, 0, 1, 2, 3, 4):
            job = make_job(NODES)
            total = add_total(job)
            runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path, sinks=[events.append]), epoch)
            assert runner.train(session) == 4
            assert total.results() == dict.fromkeys(NODES, 145.0)
            assert runner.result.resumed_from == epoch
        assert runner.load_blobs_from_checkpoints("total", 2, session) == dict.fromkeys(NODES, ("total",))
        loaded = Task(lambda workspace: float(workspace["total"][0]))
        session.run(loaded)
        assert loaded.results() == dict.fromkeys(NODES, 115.0)
    timed = [event for event in events if isinstance(event, NodesTimed)]
    assert all(set(event.node_seconds) == set(NODES) for event in timed)
    assert sum(isinstance(event, Committed) for event in events) == 5 + 4 + 3 + 2 + 1, "each is told of once"
    # What actors have saved can be gone on from in one process.
    with hf.LocalSession(NODES) as local:
        assert hf.JobRunner(make_job(NODES), hf.MultiNodeCheckpointManager(tmp_path), 2).train(local) == 4
        assert totals_of(local) == [145.0] * 3


def test_a_node_killed_while_an_epoch_is_saved_is_replaced(tmp_path: Path) -> None:
    marker = str(tmp_path / "died")
    job = make_job(NODES)
    job.add_object("deadly", lambda: Deadly(marker), on="trainer_1")

    @job.epoch_group(on="trainer_1")
    def set_it(workspace: Workspace) -> None:
        workspace["deadly"].is_due = workspace.epoch == 3

    total = add_total(job)
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / "run", keep=hf.Latest(2)))
    with hf.RaySession(NODES) as session:
        assert runner.train(session) == 4
    assert Path(marker).exists()
    assert total.results() == dict.fromkeys(NODES, 145.0)
    assert (runner.result.replacements, runner.result.resumed_from) == (1, 2)
    assert hf.MultiNodeCheckpointManager(tmp_path / "run").epochs() == (3, 4)
    assert all((step / "manifest.json").exists() for step in (tmp_path / "run").glob("step-*")), "nothing partial"


def test_a_node_is_not_replaced_for_ever(tmp_path: Path) -> None:
    def die(workspace: Workspace) -> None:
        if workspace.node == "trainer_1" and workspace.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0 if workspace.epoch < 2 else 600)

    job = hf.Job()
    job.epoch_group.add(die)
    hf.epoch_limiter(job, 3)
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path))
    with hf.RaySession(NODES, replacements_allowed=1) as session, pytest.raises(NodeLostError) as raised:
        runner.train(session)
    assert raised.value.nodes == ("trainer_1",)
    assert (runner.result.replacements, runner.result.last_saved_epoch) == (1, 1)
    with hf.RaySession(["trainer_1"]) as session, pytest.raises(NodeLostError):
        hf.JobRunner(job).train(session)


def test_a_task_that_fails_says_where() -> None:
    def fail(workspace: Workspace) -> None:
        if workspace.node == "trainer_1":
            raise ZeroDivisionError("no more")

    with hf.RaySession(NODES) as session, pytest.raises(TaskFailedError, match="no more") as raised:
        session.run(Task(fail))
    assert (raised.value.task, raised.value.node) == ("fail", "trainer_1")
    assert "in fail" in raised.value.__notes__[0]


def test_checkpoints_have_to_lie_where_all_nodes_see_them(tmp_path: Path) -> None:
    with hf.RaySession(NODES) as session, pytest.raises(UsageError, match="cannot be seen"):
        hf.JobRunner(make_job(NODES), hf.MultiNodeCheckpointManager("memory://here")).train(session)


def test_too_much_asked_of_ray_is_said() -> None:
    with pytest.raises(NodeLostError, match="no place for a, b"):
        hf.RaySession(["a", "b"], actor_options={"num_gpus": 99}, start_seconds=2)
