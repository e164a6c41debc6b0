"""Jobs whose nodes are actors of Ray."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from epoch_jobs import epochs_of, make_job, totals_of
from holdfast.errors import MissingPackageError, NodeLostError, TaskFailedError, UsageError
from holdfast.events import Committed, Event, NodesTimed
from holdfast.jobs import Task, UploadTo, Workspace
from holdfast.storage import LocalStorage
from holdfast.testing.processes import Workers, python
from mounts import fill, mounted
from places import EXAMPLES, SUPPORT

ray = pytest.importorskip("ray")

NODES = ["trainer_0", "trainer_1", "trainer_2"]
ALL = dict.fromkeys(NODES, 145.0)


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    """Ray on this machine; its workers find holdfast and the modules of the tests where this process does."""
    source = Path(hf.__file__).parent.parent
    path = os.pathsep.join([str(source), str(Path(__file__).parent), str(SUPPORT)])
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def session() -> Iterator[hf.RaySession]:
    """Three nodes that several tests share: to start actors takes the longest."""
    with hf.RaySession(NODES) as session:
        yield session


class Deadly:
    """An object whose node is killed amid the save of the epoch that it is set to, but once only."""

    def __init__(self, run: str, moment: str) -> None:
        self.run = Path(run)
        self.moment = moment
        self.is_due = False

    def state_dict(self) -> dict[str, Any]:
        marker = self.run.with_name("died")
        if self.is_due and not marker.exists():
            marker.touch()
            if self.moment == "writing":
                threading.Thread(target=self._wait_for_file, daemon=True).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def _wait_for_file(self) -> None:
        end_at = time.monotonic() + 60
        while not list(self.run.glob("step-000000003.*/data-*")) and time.monotonic() < end_at:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def add_total(job: hf.Job) -> Task:
    return job.exit_group.add(lambda workspace: float(workspace["total"][0]))


def test_the_canonical_job_from_scratch_and_from_each_epoch(session: hf.RaySession, tmp_path: Path) -> None:
    events: list[Event] = []
    for epoch in (None, 0, 1, 2, 3, 4):
        job = make_job(NODES)
        total = add_total(job)
        runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path, sinks=[events.append]), epoch)
        assert runner.train(session) == 4
        assert total.results() == ALL
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


def set_name(name: str, workspace: Workspace) -> None:
    workspace["name"] = name


def test_managers_of_one_session_do_not_mix(session: hf.RaySession, tmp_path: Path) -> None:
    runners = {name: hf.JobRunner(make_job(NODES), hf.MultiNodeCheckpointManager(tmp_path / name)) for name in "ab"}
    for name, runner in runners.items():
        assert runner.train(session) == 4
        session.run(Task(partial(set_name, name)))
        assert runner.save_checkpoints(5, session)
    value = Task(lambda workspace: workspace["name"])
    for name in "abab":
        runners[name].load_blobs_from_checkpoints("name", 5, session)
        session.run(value)
        assert set(value.results().values()) == {name}


def test_two_jobs_in_one_process_do_not_mix(session: hf.RaySession, tmp_path: Path) -> None:
    results: dict[str, Any] = {}

    def run(name: str, own: hf.RaySession) -> None:
        job = make_job(NODES)
        job.init_group.add(partial(set_name, name), name="name")
        names = job.exit_group.add(lambda workspace: workspace["name"])
        total = add_total(job)
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / name)).train(own)
        results[name] = set(names.results().values()), dict(total.results())

    with hf.RaySession(NODES) as other:
        threads = [threading.Thread(target=run, args=pair) for pair in (("a", session), ("b", other))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert results == {"a": ({"a"}, ALL), "b": ({"b"}, ALL)}


def test_a_disk_that_is_full_for_one_epoch(session: hf.RaySession, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:

        def make_room(workspace: Workspace) -> None:
            if workspace.node == NODES[0]:
                (disk / "filler").unlink(missing_ok=True)
                if workspace.epoch == 2:
                    fill(disk)

        job = make_job(NODES, before_epoch=make_room)
        total = add_total(job)
        runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(disk / "run", keep=hf.Latest(2)))
        assert runner.train(session) == 4
        assert total.results() == ALL
        assert (runner.result.failed_epochs, runner.result.last_saved_epoch) == ((2,), 4)
        assert epochs_of(disk / "run") == (3, 4)


@pytest.mark.parametrize("moment", ["reading the state", "writing"])
def test_a_node_killed_while_an_epoch_is_saved_is_replaced(tmp_path: Path, moment: str) -> None:
    run = tmp_path / "run"
    job = make_job(NODES)
    job.add_object("deadly", lambda: Deadly(str(run), moment), on="trainer_1")
    job.init_group.add(lambda workspace: workspace.update(large=np.zeros(4_000_000)), on=NODES)

    @job.epoch_group(on="trainer_1")
    def set_it(workspace: Workspace) -> None:
        workspace["deadly"].is_due = workspace.epoch == 3

    total = add_total(job)
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(run, keep=hf.Latest(2)))
    with hf.RaySession(NODES) as session:
        assert runner.train(session) == 4
    assert (tmp_path / "died").exists()
    assert total.results() == ALL
    # One that is writing may have done so when it is killed.
    committed = {2} if moment == "reading the state" else {2, 3}
    assert runner.result.replacements == 1
    assert runner.result.resumed_from in committed
    assert epochs_of(run) == (3, 4)
    assert len(list(run.glob("step-*"))) == 2, "nothing partial is left"


def find_processes(name: str) -> set[int]:
    """The processes of actors of a class: Ray names processes for what they do."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(f"ray::{name}".encode()):
                found.add(int(path.parent.name))
    return found


def test_the_actor_through_which_nodes_agree_is_replaced_with_them(tmp_path: Path) -> None:
    before = find_processes("StoreActor")
    with hf.RaySession(NODES[:2]) as session:
        (store,) = find_processes("StoreActor") - before

        def kill(workspace: Workspace) -> None:
            if workspace.epoch == 2 and workspace.node == NODES[0]:
                with suppress(ProcessLookupError):
                    os.kill(store, signal.SIGKILL)

        job = make_job(NODES[:2], before_epoch=kill)
        total = add_total(job)
        runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path))
        assert runner.train(session) == 4
    assert total.results() == dict.fromkeys(NODES[:2], 145.0)
    assert (runner.result.replacements, runner.result.resumed_from) == (1, 1)


def test_a_node_is_not_replaced_for_ever(tmp_path: Path) -> None:
    def die(workspace: Workspace) -> None:
        if workspace.node == "trainer_1" and workspace.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0 if workspace.epoch < 2 else 600)  # Work that would last: it ends with the other node.

    job = hf.Job()
    job.epoch_group.add(die)
    hf.epoch_limiter(job, 3)
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path))
    with hf.RaySession(NODES[:2], replacements_allowed=1) as session, pytest.raises(NodeLostError) as raised:
        runner.train(session)
    assert raised.value.nodes == ("trainer_1",)
    assert (runner.result.replacements, runner.result.last_saved_epoch) == (1, 1)
    with hf.RaySession(["trainer_1"]) as session, pytest.raises(NodeLostError):
        hf.JobRunner(job).train(session)


def test_a_task_that_fails_says_where(session: hf.RaySession) -> None:
    def fail(workspace: Workspace) -> None:
        if workspace.node == "trainer_1":
            raise ZeroDivisionError("no more")

    with pytest.raises(TaskFailedError, match="no more") as raised:
        session.run(Task(fail))
    assert (raised.value.task, raised.value.node) == ("fail", "trainer_1")
    assert "in fail" in raised.value.__notes__[0]


def test_a_node_that_is_still_at_work_when_another_failed_is_ended(tmp_path: Path) -> None:
    def work(workspace: Workspace) -> None:
        if workspace.node == "trainer_1":
            raise ZeroDivisionError("no more")
        time.sleep(600)  # Work that would last: it is ended.

    job = hf.Job()
    job.epoch_group.add(work)
    hf.epoch_limiter(job, 1)
    with hf.RaySession(NODES[:2], grace_seconds=0.1) as session, pytest.raises(TaskFailedError) as raised:
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path)).train(session)
    assert any("trainer_0 was still running after" in note for note in raised.value.__notes__)
    assert epochs_of(tmp_path) == (0,)


class Stubborn:
    """An object that cannot be made, or whose state cannot be had."""

    def __init__(self, which: str) -> None:
        if which == "made":
            raise ZeroDivisionError("cannot be made")

    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("has no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_what_fails_outside_of_tasks_says_where(tmp_path: Path) -> None:
    with hf.RaySession(NODES[:2]) as session:
        for which, kind, text in (
            ("made", TaskFailedError, "make stubborn on trainer_1"),
            ("state", UsageError, "trainer_1: .*ZeroDivisionError.*has no state"),
        ):
            job = make_job(NODES[:2])
            job.add_object("stubborn", partial(Stubborn, which), on="trainer_1")
            with pytest.raises(kind, match=text):
                hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / which)).train(session)


def test_the_last_epoch_is_uploaded(session: hf.RaySession, tmp_path: Path) -> None:
    manager = hf.MultiNodeCheckpointManager(tmp_path / "run")
    runner = hf.JobRunner(make_job(NODES), manager, upload_task_group_builder=UploadTo(tmp_path / "there"))
    assert runner.train(session) == 4
    assert epochs_of(tmp_path / "there") == (4,)


def test_a_manager_outlives_its_session(tmp_path: Path) -> None:
    manager = hf.MultiNodeCheckpointManager(tmp_path)
    for epoch in (None, 2):
        runner = hf.JobRunner(make_job(["a"]), manager, epoch)
        with hf.RaySession("a") as session:
            assert runner.train(session) == 4
            runner.load_blobs_from_checkpoints("total", 2, session)
    manager.close()


def test_value_that_cannot_be_sent_to_a_node_is_refused(session: hf.RaySession) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent to its node"):
        session.run(Task(lambda workspace: lock.locked()))
    with pytest.raises(UsageError, match=r"trainer_\d cannot send a task's result"):
        session.run(Task(lambda workspace: threading.Lock()))
    fine = Task(lambda workspace: workspace.node)
    session.run(fine)
    assert set(fine.results()) == set(NODES)


class _Local(LocalStorage):
    """A directory that only this process can open: a node gets what `opened` does."""

    opened: Any = None

    def __reduce__(self) -> Any:
        if self.opened is None:
            raise TypeError("it holds a connection")
        return self.opened, (str(self.location),)


def _lack(location: str) -> LocalStorage:
    raise MissingPackageError(f"{location} needs obstore, which is not installed", hint="Install obstore.")


def test_the_nodes_open_the_storage_that_was_given(session: hf.RaySession, tmp_path: Path) -> None:
    """They open it as the program did, or the job ends before its first task, with what to do."""
    for opened, expected in (
        (None, (UsageError, r"cannot be opened by the nodes: it holds a connection\n.*holdfast.open_storage")),
        (_lack, (MissingPackageError, r"trainer_0: .* needs obstore, which is not installed\n.*Install obstore")),
        (LocalStorage, None),
    ):
        storage = _Local(str(tmp_path / "run"))
        storage.opened = opened
        runner = hf.JobRunner(make_job(NODES), hf.MultiNodeCheckpointManager(storage))
        if expected is None:
            assert runner.train(session) == 4
        else:
            with pytest.raises(expected[0], match=expected[1]):
                runner.train(session)


def test_wrong_calls_are_refused(session: hf.RaySession, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="other processes cannot see"):
        hf.JobRunner(make_job(NODES), hf.MultiNodeCheckpointManager("memory://here")).train(session)
    with pytest.raises(NodeLostError, match="did not place a, b"):
        hf.RaySession(["a", "b"], actor_options={"num_gpus": 99}, start_seconds=1)
    for nodes in ([], ["a/b"], None):
        with pytest.raises(UsageError):
            hf.RaySession(nodes)  # type: ignore[arg-type]
    for options in ({"actor_options": 3}, {"replacements_allowed": "3"}):
        with pytest.raises(UsageError):
            hf.RaySession(NODES, **options)


EXAMPLE = EXAMPLES / "recipes" / "ray_job.py"


def test_recipe_that_loses_a_node_and_then_its_machine_ends_the_same(tmp_path: Path) -> None:
    def popen(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(arguments, cwd=tmp_path, **options)

    told = {"PYTHONPATH": str(Path(hf.__file__).parent.parent)}
    before = find_processes("NodeActor")
    with Workers(tmp_path) as workers:
        asked = workers.start(python(EXAMPLE), told, popen)
        workers.wait_line(asked, "epoch 2 is saved", 120)
        os.kill(min(find_processes("NodeActor") - before), signal.SIGKILL)
        workers.wait_line(asked, "epoch 8 is saved", 120)
        workers.kill(asked, signal.SIGTERM)
        assert workers.wait(60, [asked]) == [42], workers.report(asked)
        again = workers.start(python(EXAMPLE), told, popen)
        assert workers.wait(120, [again]) == [0], workers.report(again)
        begun, ended = workers.text(again).splitlines()[-2:]
    assert begun in [f"began with epoch {epoch}, replaced nodes 0 times" for epoch in range(8, 20)]
    job, result = runpy.run_path(str(EXAMPLE))["describe"]()
    with hf.LocalSession(["trainer_0", "trainer_1"]) as session:
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / "untouched")).train(session)
    assert ended == f"epoch 20: {result.results()}"
