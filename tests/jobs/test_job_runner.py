"""`JobRunner`: the order of things, where it goes on, what it counts, and what it refuses."""

from __future__ import annotations

import collections
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
import preloaded
from epoch_jobs import TOTALS, FullForSteps, Rows, count_threads, epochs_of, make_job, totals_of, wait_for_threads
from holdfast.catalog import StoredRun
from holdfast.errors import (
    DamageError,
    FencedError,
    MismatchError,
    NoCheckpointError,
    NoWholeCheckpointError,
    SaveFailedError,
    TaskFailedError,
    UnsupportedValueError,
    UsageError,
)
from holdfast.events import Event, Failed, GroupEnded, NodesTimed, PassedOver, Warned
from holdfast.jobs import (
    Counter,
    ManifestMetadataHandler,
    NodeCheckpointManager,
    NodeDurations,
    Task,
    TaskGroup,
    UploadTo,
    Workspace,
)
from holdfast.storage import LocalStorage
from patience import PATIENCE_SECONDS, killed_after, read_line
from places import SUPPORT

NODES = ["trainer_0", "trainer_1", "trainer_2"]


def train(place: Any, epoch: int | None = None, **options: Any) -> tuple[int, list[float], hf.jobs.JobResult]:
    runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(place, **options), epoch)
    with hf.LocalSession(NODES) as session:
        return runner.train(session), totals_of(session), runner.result


def _note(log: list[str], name: str, workspace: Workspace) -> None:
    log.append(f"{name} {workspace.epoch}")


def log_job(log: list[str], limit: int, **options: Any) -> hf.Job:
    job = hf.Job(**options)
    for name in ("init", "epoch", "download", "exit"):
        group: TaskGroup = getattr(job, f"{name}_group")
        group.add(partial(_note, log, name), on="a", name=name)
    hf.epoch_limiter(job, limit)
    return job


def test_the_canonical_job_from_scratch_and_from_each_epoch(tmp_path: Path) -> None:
    assert train(tmp_path)[:2] == (4, [145.0] * 3)
    assert epochs_of(tmp_path) == (0, 1, 2, 3, 4)
    for epoch in (0, 1, 2, 3, 4, 2):
        last, totals, result = train(tmp_path, epoch)
        assert (last, totals) == (4, [145.0] * 3)
        assert (result.resumed_from, result.saves_committed, result.last_saved_epoch) == (epoch, 4 - epoch, 4)


def test_each_epoch_holds_what_it_should(tmp_path: Path) -> None:
    train(tmp_path)
    for epoch, total in enumerate(TOTALS):
        runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path))
        with hf.LocalSession(NODES) as session:
            assert runner.load_blobs_from_checkpoints(["total", "where"], epoch, session) == dict.fromkeys(
                NODES, ("total", "where")
            )
            assert totals_of(session) == [total] * 3
            assert [session.workspace(node)["where"]["node"] for node in NODES] == NODES, "equal names are kept apart"
            assert session.workspace("trainer_0")["rows"].at == 0, "nothing else is loaded"


def test_a_job_of_one_node(tmp_path: Path) -> None:
    job = make_job(None)
    manager = NodeCheckpointManager(tmp_path)
    runner = hf.JobRunner(job, manager)
    with hf.LocalSession() as session:
        assert runner.train(session) == 4
        assert totals_of(session) == [145.0]
    with hf.LocalSession() as session:
        assert runner.load_blobs_from_checkpoints("total", 2, session) == {"local": ("total",)}
        assert totals_of(session) == [115.0]
    with pytest.raises(UsageError, match="one node"), hf.LocalSession(["a", "b"]) as session:
        hf.JobRunner(make_job(["a", "b"]), NodeCheckpointManager(tmp_path / "other")).train(session)


def test_the_order_of_the_groups_and_of_the_saves(tmp_path: Path) -> None:
    log: list[str] = []

    class Handler(ManifestMetadataHandler):
        def set_params(self, directory: str, node_names: Sequence[str]) -> None:
            super().set_params(directory, node_names)
            log.append(f"set {list(node_names)}")

        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            log.append(f"last {user_epoch}")
            return super().last_epoch(user_epoch)

        def write(self, epoch: int) -> None:
            super().write(epoch)
            log.append(f"write {epoch}")

    class Builder(hf.UploadTaskGroupBuilder):
        def build(self, epoch: int, checkpoint_manager: hf.MultiNodeCheckpointManager) -> TaskGroup:
            group = TaskGroup("upload")
            group.add(lambda workspace: log.append(f"upload {epoch}"), on="a")
            return group

    events: list[Event] = []
    manager = hf.MultiNodeCheckpointManager(tmp_path, metadata_handler=Handler())
    runner = hf.JobRunner(log_job(log, 2), manager, upload_task_group_builder=Builder(), sinks=[events.append])
    with hf.LocalSession() as session:
        assert runner.train(session) == 2
    assert log == [
        "set ['a']",
        "last None",
        "init 0",
        "write 0",
        "epoch 1",
        "write 1",
        "epoch 2",
        "write 2",
        "upload 2",
        "download 2",
        "exit 2",
    ]
    ended = [(event.group, event.epoch) for event in events if isinstance(event, GroupEnded)]
    assert ended == [("init", 0), ("epoch", 1), ("epoch", 2), ("upload", 2), ("download", 2), ("exit", 2)]


def test_a_finished_job_trains_nothing_and_the_new_limit_counts(tmp_path: Path) -> None:
    for limit, begins, expected in ((3, None, [1, 2, 3]), (3, 3, []), (5, 3, [4, 5]), (2, 5, [])):
        log: list[str] = []
        runner = hf.JobRunner(log_job(log, limit), hf.MultiNodeCheckpointManager(tmp_path))
        with hf.LocalSession() as session:
            assert runner.train(session) == max(limit, begins or 0)
        assert [entry for entry in log if entry.startswith("epoch")] == [f"epoch {epoch}" for epoch in expected]
        assert ("init 0" in log) == (begins is None), "init tasks do not run when a job goes on"
        assert log[-2:] == [f"download {runner.result.last_epoch}", f"exit {runner.result.last_epoch}"]
        assert runner.result.resumed_from == begins
    assert epochs_of(tmp_path) == (0, 1, 2, 3, 4, 5)


def test_without_a_manager_a_job_just_runs() -> None:
    log: list[str] = []
    runner = hf.JobRunner(log_job(log, 2))
    with hf.LocalSession() as session:
        assert runner.train(session) == 2
        for call in (
            lambda: runner.save_checkpoints(3, session),
            lambda: runner.load_blobs_from_checkpoints("x", 1, session),
        ):
            with pytest.raises(UsageError, match="no checkpoint manager"):
                call()
    assert log == ["init 0", "epoch 1", "epoch 2", "download 2", "exit 2"]
    assert runner.result == hf.jobs.JobResult(last_epoch=2)


def test_what_cannot_be_run_is_refused_before_any_task(tmp_path: Path) -> None:
    log: list[str] = []
    job = log_job(log, 1)
    manager = hf.MultiNodeCheckpointManager(tmp_path)
    with pytest.raises(UsageError, match="resume_from_epoch=3 needs"):
        hf.JobRunner(job, resume_from_epoch=3)
    with pytest.raises(UsageError, match="needs a checkpoint manager"):
        hf.JobRunner(job, upload_task_group_builder=UploadTo(tmp_path))
    with pytest.raises(UsageError, match="failures_allowed"):
        hf.JobRunner(job, manager, failures_allowed=-1)
    for number in (-1, "2", 2.0, True):
        with pytest.raises(UsageError, match="resume_from_epoch must be a whole number"):
            hf.JobRunner(job, manager, resume_from_epoch=number)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected a Job"):
        hf.JobRunner(make_job, manager)  # type: ignore[arg-type]
    for wrong in (str(tmp_path), hf.CheckpointManager(tmp_path, hf.Checkpoint())):
        with pytest.raises(UsageError, match="expected a MultiNodeCheckpointManager"):
            hf.JobRunner(job, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected an UploadTaskGroupBuilder"):
        hf.JobRunner(job, manager, upload_task_group_builder=str(tmp_path))  # type: ignore[arg-type]
    for nothing in (None, ["a"]):
        with pytest.raises(UsageError, match="expected a session"):
            hf.JobRunner(job, manager).train(nothing)  # type: ignore[arg-type]
    with hf.LocalSession() as session:
        with pytest.raises(UsageError, match="no stop condition"):
            hf.JobRunner(hf.Job(), manager).train(session)
        with pytest.raises(NoCheckpointError, match="epoch 7 was not saved"):
            hf.JobRunner(job, manager, resume_from_epoch=7).train(session)
        hf.JobRunner(job, manager).train(session)
        log.clear()
        with pytest.raises(NoCheckpointError) as raised:
            hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path), resume_from_epoch=7).train(session)
        assert "0, 1" in raised.value.hint
        fresh = hf.MultiNodeCheckpointManager(tmp_path, begin_anew=True)
        with pytest.raises(UsageError, match="begin_anew"):
            hf.JobRunner(job, fresh, resume_from_epoch=1).train(session)
        with pytest.raises(UsageError, match="no node a"), hf.LocalSession(["b"]) as other:
            hf.JobRunner(job, manager).train(other)
    assert log == []
    with pytest.raises(UsageError, match="no nodes yet"):
        hf.MultiNodeCheckpointManager(tmp_path).load(1)


def test_each_kind_of_stop_condition_ends_the_epochs() -> None:
    def run(condition: Any, **options: Any) -> int:
        job = hf.Job()

        @job.epoch_group
        def count(workspace: Workspace) -> bool:
            workspace["done"] = workspace.epoch == 3
            return workspace.epoch == 2 and workspace.node == "b"

        job.add_stop_condition(count.output if condition is None else condition, **options)
        with hf.LocalSession(["a", "b"]) as session:
            return hf.JobRunner(job).train(session)

    assert run(None) == 2, "true on one of the nodes"
    assert run("done") == 3
    assert run("done", on="b") == 3
    assert run(lambda workspace: workspace.epoch == 4 and workspace.node == "a") == 4
    assert run(lambda workspace: workspace.epoch == 5 and workspace.node == "b", on="b") == 5


def test_a_task_that_fails_ends_the_job_which_then_goes_on(tmp_path: Path) -> None:
    def fail(workspace: Workspace) -> None:
        if workspace.epoch == 3 and workspace.node == "trainer_1":
            raise ZeroDivisionError

    runner = hf.JobRunner(make_job(before_epoch=fail), hf.MultiNodeCheckpointManager(tmp_path))
    with hf.LocalSession(NODES) as session, pytest.raises(TaskFailedError, match="add on trainer_1"):
        runner.train(session)
    assert (runner.result.last_epoch, runner.result.last_saved_epoch) == (2, 2)
    last, totals, result = train(tmp_path)
    assert (last, totals, result.resumed_from) == (4, [145.0] * 3, 2)


def test_a_damaged_epoch_is_passed_over_aloud_unless_it_was_asked_for(tmp_path: Path) -> None:
    train(tmp_path)
    (data,) = tmp_path.glob("step-000000004.*/data-*")
    data.write_bytes(data.read_bytes()[:-8] + b"\xff" * 8)
    with pytest.raises(hf.errors.NoWholeCheckpointError):
        train(tmp_path, 4)
    last, totals, result = train(tmp_path)
    assert (last, totals, result.resumed_from) == (4, [145.0] * 3, 3)
    (manifest,) = tmp_path.glob("step-000000004.g0002/manifest.json")
    manifest.write_bytes(b"{}")
    assert train(tmp_path)[2].resumed_from == 3


def test_an_epoch_whose_records_are_damaged_is_passed_over_aloud_as_well(tmp_path: Path) -> None:
    train(tmp_path)
    for index in tmp_path.glob("step-000000004.*/index-*"):
        index.write_bytes(b"{}")
    events: list[Event] = []
    runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path, sinks=[events.append]))
    with hf.LocalSession(NODES) as session:
        runner.train(session)
    assert runner.result.resumed_from == 3
    passed = [event for event in events if isinstance(event, PassedOver)]
    assert [(event.step, Path(event.file).name[:5]) for event in passed] == [(4, "index")]


def test_a_full_disk_for_one_epoch_and_for_all() -> None:
    storage = FullForSteps("full")
    storage.full = frozenset({2})
    last, totals, result = train(storage)
    assert (last, totals) == (4, [145.0] * 3)
    assert (result.saves_committed, result.saves_failed, result.failed_epochs) == (4, 1, (2,))
    assert epochs_of(storage) == (0, 1, 3, 4)
    storage = FullForSteps("always full")
    storage.full = None
    job = make_job()
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(storage))
    with hf.LocalSession(NODES) as session, pytest.raises(SaveFailedError, match="no room") as raised:
        runner.train(session)
    assert "4 saves in a row" in raised.value.__notes__[0]
    assert (runner.result.saves_failed, runner.result.last_epoch) == (4, 3)
    runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(storage), failures_allowed=9)
    exits = job.exit_group.tasks
    with hf.LocalSession(NODES) as session, pytest.raises(SaveFailedError):
        runner.train(session)
    assert exits == ()
    assert (runner.result.last_epoch, runner.result.saves_failed, runner.result.last_saved_epoch) == (4, 5, None)


def test_a_last_save_that_fails_is_raised_when_all_else_is_done() -> None:
    storage = FullForSteps("full")
    storage.full = frozenset({2})
    log: list[str] = []
    runner = hf.JobRunner(log_job(log, 2), hf.MultiNodeCheckpointManager(storage))
    with hf.LocalSession() as session, pytest.raises(SaveFailedError):
        runner.train(session)
    assert log[-1] == "exit 2"
    assert runner.result.last_saved_epoch == 1


def test_saves_in_the_background_come_to_the_same() -> None:
    storage = FullForSteps("full")
    storage.full = frozenset({1, 3})
    last, totals, result = train(storage, background=True)
    assert (last, totals) == (4, [145.0] * 3)
    assert (result.saves_committed, result.failed_epochs) == (3, (1, 3))
    assert epochs_of(storage) == (0, 2, 4)


def test_a_handler_without_access_and_one_that_fails() -> None:
    class Handler(ManifestMetadataHandler):
        def cp_accessible(self, epoch: int | None = None) -> bool:
            if self.epoch == 1:
                raise OSError("no database")
            return self.epoch != 2

        def write(self, epoch: int) -> None:
            raise OSError("no database")

        def report(self, action: str, stats: NodeDurations) -> None:
            raise OSError("no database")

        epoch = 0

    handler = Handler()
    storage = FullForSteps("place")
    events: list[Event] = []
    log: list[str] = []
    job = log_job(log, 3)
    job.epoch_group.add(lambda workspace: setattr(handler, "epoch", workspace.epoch), on="a", name="note")
    manager = hf.MultiNodeCheckpointManager(storage, metadata_handler=handler, sinks=[events.append])
    runner = hf.JobRunner(job, manager)
    with hf.LocalSession() as session:
        assert runner.train(session) == 3
    assert runner.result.failed_epochs == (1, 2)
    assert epochs_of(storage) == (0, 3)
    warnings = [event.text for event in events if isinstance(event, Warned)]
    assert sum("is saved, but the metadata handler failed" in text for text in warnings) == 4
    assert sum(isinstance(event, Failed) and event.save_lost for event in events) == 2


def test_a_handler_decides_where_the_job_goes_on(tmp_path: Path) -> None:
    class Handler(ManifestMetadataHandler):
        answer: int | None = 1

        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            return self.answer

    train(tmp_path)
    handler = Handler()
    assert train(tmp_path, 3, metadata_handler=handler)[2].resumed_from == 1
    handler.answer = 9
    with pytest.raises(NoCheckpointError):
        train(tmp_path, metadata_handler=handler)
    with pytest.raises(UsageError, match="metadata handler"):
        hf.MultiNodeCheckpointManager(tmp_path, metadata_handler=print)  # type: ignore[arg-type]


def test_a_handler_may_say_to_begin_from_nothing(tmp_path: Path) -> None:
    class Handler(ManifestMetadataHandler):
        def last_epoch(self, user_epoch: int | None = None) -> int | None:
            return None

    events: list[Event] = []
    options: dict[str, Any] = {"metadata_handler": Handler(), "sinks": [events.append]}
    assert train(tmp_path / "new", **options)[:2] == (4, [145.0] * 3)
    assert not any(isinstance(event, Warned) for event in events)
    train(tmp_path)
    # In spite of the epochs that are there, which stay on the disk.
    assert train(tmp_path, **options)[:2] == (4, [145.0] * 3)
    texts = [event.text for event in events if isinstance(event, Warned)]
    assert texts == ["the metadata handler says to start from the beginning: epochs 0, 1, 2, 3, 4 are not used"]
    assert epochs_of(tmp_path) == (0, 1, 2, 3, 4)
    assert len(StoredRun(LocalStorage(tmp_path)).look().committed) == 10
    # No task has run if the user asked for an epoch all the same.
    log: list[str] = []
    runner = hf.JobRunner(log_job(log, 3), hf.MultiNodeCheckpointManager(tmp_path, **options), 2)
    with hf.LocalSession() as session, pytest.raises(UsageError, match="epoch 2"):
        runner.train(session)
    assert log == []


def test_times_of_each_node_are_reported_and_events(tmp_path: Path) -> None:
    handler = ManifestMetadataHandler()
    events: list[Event] = []
    job = make_job()
    job.init_group.add(lambda workspace: workspace.update(large=np.ones(500_000)), on="trainer_1", name="large")
    manager = hf.MultiNodeCheckpointManager(tmp_path, metadata_handler=handler, sinks=[events.append])
    with hf.LocalSession(NODES) as session:
        runner = hf.JobRunner(job, manager)
        runner.train(session)
        runner.load_blobs_from_checkpoints("total", 2, session)
    with hf.LocalSession(NODES) as session:
        hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path, metadata_handler=handler), 2).train(session)
    counts = {action: len(reports) for action, reports in handler.reports.items()}
    assert counts == {"checkpoint_save": 5 + 2, "checkpoint_load": 1, "checkpoint_partial_load": 1}
    timed = [event for event in events if isinstance(event, NodesTimed) and event.action == "checkpoint_save"]
    assert [event.epoch for event in timed] == [0, 1, 2, 3, 4]
    for event in timed:
        assert set(event.node_seconds) == set(NODES)
        assert event.slowest == "trainer_1"
        assert all(seconds > 0 for seconds in event.node_seconds.values())
    assert set(handler.reports["checkpoint_load"][0].node_seconds) == set(NODES)
    assert NodeDurations({}).slowest == ""


def test_single_values_are_loaded_and_wrong_names_reported(tmp_path: Path) -> None:
    job = make_job()
    job.init_group.add(lambda workspace: workspace.update(only_here=7), on="trainer_2", name="more")
    with hf.LocalSession(NODES) as session:
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path)).train(session)
    runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path))
    with hf.LocalSession(NODES) as session:
        assert runner.load_blobs_from_checkpoints("only_here", 3, session) == {"trainer_2": ("only_here",)}
        assert session.workspace("trainer_2")["only_here"] == 7
        assert "only_here" not in session.workspace("trainer_0")
        with pytest.raises(UsageError, match="'totl', 'x'") as raised:
            runner.load_blobs_from_checkpoints(["total", "totl", "x"], 3, session)
        assert "only_here" in raised.value.hint
        assert "total" not in session.workspace("trainer_0"), "nothing was loaded"
        with pytest.raises(NoCheckpointError):
            runner.load_blobs_from_checkpoints("total", 5, session)
        with pytest.raises(UsageError):
            runner.load_blobs_from_checkpoints([], 3, session)
        assert runner.load_blobs_from_checkpoints("rows", 2, session) == dict.fromkeys(NODES, ("rows",))
        assert session.workspace("trainer_0")["rows"].at == 6


def test_names_of_files(tmp_path: Path) -> None:
    train(tmp_path)
    manager = hf.MultiNodeCheckpointManager(tmp_path)
    for node in NODES:
        path = manager.get_ckpt_db_name(node, 3)
        assert path is not None
        assert Path(path).is_file()
        assert Path(path).is_relative_to(tmp_path)
    assert manager.get_ckpt_db_name("someone", 3) is None
    with pytest.raises(NoCheckpointError):
        manager.get_ckpt_db_name(NODES[0], 9)


def test_a_manager_used_again_saves_what_was_added_between(tmp_path: Path) -> None:
    log: list[str] = []
    manager = hf.MultiNodeCheckpointManager(tmp_path)
    with hf.LocalSession() as session:
        hf.JobRunner(log_job(log, 2), manager).train(session)
        session.workspace()["added"] = np.arange(3.0)
        session.workspace()["counter"] = Counter(3)
        runner = hf.JobRunner(log_job(log, 4), manager)
        assert runner.train(session) == 4
        assert runner.result.resumed_from == 2
    job = log_job(log, 4)
    job.add_object("counter", Counter)
    with hf.LocalSession() as session:
        hf.JobRunner(job, manager, resume_from_epoch=3).train(session)
        assert session.workspace()["added"].tolist() == [0, 1, 2]
        assert session.workspace()["counter"].value == 3
    with hf.LocalSession() as session:
        hf.JobRunner(log_job(log, 2), manager, resume_from_epoch=2).train(session)
        assert "added" not in session.workspace()


def test_other_nodes_are_refused_or_taken_over(tmp_path: Path) -> None:
    manager = hf.MultiNodeCheckpointManager(tmp_path)
    job = make_job(["a", "b"], before_epoch=lambda workspace: 1 // (3 - workspace.epoch))
    with hf.LocalSession() as session, pytest.raises(TaskFailedError):
        hf.JobRunner(job, manager).train(session)
    with hf.LocalSession() as session, pytest.raises(UsageError, match="has saved the nodes a, b"):
        hf.JobRunner(make_job(["b", "c"]), manager).train(session)
    with hf.LocalSession() as session, pytest.raises(MismatchError, match="nodes a, b") as raised:
        hf.JobRunner(make_job(["b", "c"]), hf.MultiNodeCheckpointManager(tmp_path)).train(session)
    assert (raised.value.differences.missing, raised.value.differences.extra) == (["c"], ["a"])
    taking = hf.MultiNodeCheckpointManager(tmp_path, take_over_nodes=True)
    seen: list[tuple[str, int, float]] = []
    later = make_job(
        ["b", "c"],
        before_epoch=lambda workspace: seen.append((workspace.node, workspace.epoch, workspace["total"][0])),
    )
    with hf.LocalSession() as session:
        assert hf.JobRunner(later, taking).train(session) == 4
        assert totals_of(session) == [145.0, 100.0 + 3 + 12]
    assert set(seen) == {("b", 3, 115.0), ("c", 3, 100.0), ("b", 4, 136.0), ("c", 4, 103.0)}


def test_a_new_object_is_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    train(tmp_path)
    job = make_job()
    job.add_object("averages", Counter)
    with hf.LocalSession(NODES) as session, pytest.raises(MismatchError, match="averages"):
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path)).train(session)
    with hf.LocalSession(NODES) as session:
        assert hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path, strict=False)).train(session) == 4


def test_run_without_a_checkpoint_makes_fresh_objects(tmp_path: Path) -> None:
    with hf.LocalSession(NODES) as session:
        own = session.workspace(NODES[1])["own"] = Counter(7)
        for name in ("a", "b"):
            assert hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path / name)).train(session) == 4
            assert totals_of(session) == [145.0] * 3
        manager = hf.MultiNodeCheckpointManager(tmp_path / "a", begin_anew=True)
        assert hf.JobRunner(make_job(), manager).train(session) == 4
        assert hf.JobRunner(make_job()).train(session) == 4
        assert totals_of(session) == [145.0] * 3
        assert session.workspace(NODES[1])["own"] is own
        job = make_job()
        job.add_object("own", Counter, on=NODES[1])
        hf.JobRunner(job).train(session)
        assert session.workspace(NODES[1])["own"] is own, "what was put there by hand is left"


def test_job_that_starts_over_trains_all_epochs_again(tmp_path: Path) -> None:
    train(tmp_path)
    last, totals, result = train(tmp_path, begin_anew=True)
    assert (last, totals, result.resumed_from, result.saves_committed) == (4, [145.0] * 3, None, 5)
    assert epochs_of(tmp_path) == (0, 1, 2, 3, 4)


def test_retention_spares_the_resumed_epoch_until_the_end(tmp_path: Path) -> None:
    train(tmp_path, keep=hf.Latest(2))
    assert epochs_of(tmp_path) == (3, 4)
    place = tmp_path / "resumed"
    train(place)
    seen: list[tuple[int, ...]] = []
    job = make_job(before_epoch=lambda workspace: seen.append(epochs_of(place)) if workspace.node == NODES[0] else None)
    with hf.LocalSession(NODES) as session:
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(place, keep=hf.Latest(1)), 0).train(session)
    assert seen[1:] == [(0, 1), (0, 2), (0, 3)], "what the run began with is spared while it runs"
    assert epochs_of(place) == (4,), "and not when it has come to its end"
    train(tmp_path / "finished")
    assert train(tmp_path / "finished", keep=hf.Latest(2))[2].saves_committed == 0
    assert epochs_of(tmp_path / "finished") == (3, 4), "also one that trains nothing more"
    half = tmp_path / "finished" / "step-000000002.g0001"
    half.mkdir()
    (half / "data-00000-of-00001.safetensors").write_bytes(b"half")
    train(tmp_path / "finished", keep=hf.Latest(2))
    assert len(list((tmp_path / "finished").glob("step-*"))) == 2, "nothing partial is left"


def test_saving_by_hand(tmp_path: Path) -> None:
    runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path))
    with hf.LocalSession(NODES) as session:
        runner.train(session)
        session.workspace("trainer_0")["total"][:] = 7
        assert runner.save_checkpoints(9, session)
    assert epochs_of(tmp_path)[-1] == 9
    runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path))
    with hf.LocalSession(NODES) as session:
        assert runner.train(session) == 9, "what ended the epochs is known of it too"
        assert totals_of(session) == [7.0, 145.0, 145.0]


def test_a_job_may_be_run_again_on_other_nodes(tmp_path: Path) -> None:
    job = hf.Job()
    job.init_group.add(lambda workspace: workspace.update(count=0), name="begin")
    job.epoch_group.add(lambda workspace: workspace.update(count=workspace.epoch), name="count")
    hf.epoch_limiter(job, 2)
    for nodes in (["a", "b"], ["c"]):
        with hf.LocalSession(nodes) as session:
            runner = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / nodes[0]))
            assert runner.train(session) == 2
            assert [session.workspace(node)["count"] for node in nodes] == [2] * len(nodes)


def test_a_job_is_run_once_at_a_time() -> None:
    job = hf.Job()

    @job.epoch_group
    def run_it_again(workspace: Workspace) -> None:
        with hf.LocalSession() as other:
            hf.JobRunner(job).train(other)

    hf.epoch_limiter(job, 1)
    with hf.LocalSession() as session:
        for _ in range(2):
            with pytest.raises(TaskFailedError, match="already running"):
                hf.JobRunner(job).train(session)


def test_a_session_runs_one_job_at_a_time() -> None:
    tried: list[UsageError] = []

    def run_others(workspace: Workspace) -> None:
        own = hf.Job()
        hf.epoch_limiter(own, 1)
        with pytest.raises(UsageError, match="session is already running a job") as raised:
            hf.JobRunner(own).train(session)
        tried.append(raised.value)
        # What was refused can be run elsewhere meanwhile.
        with hf.LocalSession() as another:
            assert hf.JobRunner(own).train(another) == 1

    job = hf.Job()
    job.epoch_group.add(run_others)
    hf.epoch_limiter(job, 1)
    with hf.LocalSession() as session:
        assert hf.JobRunner(job).train(session) == 1
        assert len(tried) == 1
        with pytest.raises(UsageError, match="expected a session"):
            hf.JobRunner(job).train([])  # type: ignore[arg-type]
        again = hf.Job()
        hf.epoch_limiter(again, 2)
        assert hf.JobRunner(again).train(session) == 2, "when the first is over, it is free"


@pytest.mark.parametrize("background", [False, True])
def test_ctrl_c_during_a_save_does_not_hide_its_commit(tmp_path: Path, background: bool) -> None:
    class Interrupted(ManifestMetadataHandler):
        def report(self, action: str, stats: NodeDurations) -> None:
            if action == "checkpoint_save" and manager.committed == 2:
                raise KeyboardInterrupt

    manager = hf.MultiNodeCheckpointManager(tmp_path, metadata_handler=Interrupted(), background=background)
    runner = hf.JobRunner(make_job(), manager)
    with hf.LocalSession(NODES) as session, pytest.raises(KeyboardInterrupt):
        runner.train(session)
    assert (runner.result.last_saved_epoch, runner.result.saves_committed) == (2, 3)
    assert epochs_of(tmp_path)[-1] == runner.result.last_epoch - background


def remove_manifests(place: Path) -> None:
    for manifest in place.glob("step-*/manifest.json"):
        manifest.unlink()


def test_job_without_manifests_does_not_begin_again_in_silence(tmp_path: Path) -> None:
    assert train(tmp_path)[0] == 4
    remove_manifests(tmp_path)
    before = sorted(tmp_path.glob("step-*/*"))
    for keep in (None, hf.Latest(1)):
        with pytest.raises(NoWholeCheckpointError, match=r"steps 0, 1, 2, 3, 4 were committed") as raised:
            train(tmp_path, keep=keep)
        assert "begin_anew=True" in raised.value.hint
        assert len(raised.value.damages) == 5
        with hf.LocalSession() as session, pytest.raises(NoWholeCheckpointError, match="step 2 was committed"):
            hf.JobRunner(log_job([], 1), hf.MultiNodeCheckpointManager(tmp_path), resume_from_epoch=2).train(session)
        assert sorted(tmp_path.glob("step-*/*")) == before, "nothing is swept"
    events: list[Event] = []
    assert train(tmp_path, begin_anew=True, sinks=[events.append])[0] == 4, "on purpose it does"
    (warned,) = [event.text for event in events if isinstance(event, Warned)]
    assert "steps 0, 1, 2, 3, 4 were committed, and their manifests are gone" in warned


Place = collections.namedtuple("Place", ["row"])


def test_objects_that_a_restart_cannot_make_are_reported_at_first_save(tmp_path: Path) -> None:
    events: list[Event] = []

    def make_it(epochs: int) -> hf.Job:
        with hf.Job() as job:
            job.add_object("rows", Rows)

            @job.init_group
            def begin(workspace: Workspace) -> None:
                workspace.update(total=1, model=Rows(), deep={"of": [Rows()]}, place=[Place(1)], known=Path("x"))

            @job.epoch_group
            def add(workspace: Workspace) -> None:
                if workspace.epoch == 2:
                    workspace["late"] = Counter()

        hf.epoch_limiter(job, epochs)
        return job

    def run(job: hf.Job, **options: Any) -> int:
        manager = hf.MultiNodeCheckpointManager(tmp_path, sinks=[events.append], **options)
        with hf.LocalSession("a") as session:
            # The program puts this one there at each start.
            session.workspace("a")["mine"] = Counter()
            return hf.JobRunner(job, manager).train(session)

    assert run(make_it(3)) == 3
    texts = [event.text for event in events if isinstance(event, Warned)]
    assert len(texts) == 4
    assert "a/model is an object with state (Rows)" in texts[0]
    assert "job.add_object('model', ...)" in texts[0]
    assert "a/deep/of/0 is an object" in texts[1]
    assert "test_job_runner.Place" in texts[2]
    assert "register_type" in texts[2]
    assert "a/late is" in texts[3]
    with pytest.raises(UnsupportedValueError, match="Place is not known") as caught:
        run(make_it(4))
    assert "register_type" in caught.value.hint
    hf.register_type(Place)
    with pytest.raises(MismatchError) as mismatch:
        run(make_it(4))
    assert "Nothing created model, deep, late on a" in mismatch.value.hint
    assert "job.add_object('model', ...)" in mismatch.value.hint
    # With what makes them the job goes on from what was saved.
    events.clear()
    job = make_it(4)
    job.add_object("model", Rows)
    job.add_object("late", Counter)
    job.add_object("deep", lambda: {"of": [Rows()]})
    assert run(job) == 4
    assert not any(isinstance(event, Warned) for event in events)


def test_an_object_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    job = make_job()
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Counter())
        return Counter(1 // (2 - len(made)))

    job.add_object("model", make)
    with hf.LocalSession(NODES) as session, pytest.raises(TaskFailedError, match="make model on trainer_1") as raised:
        hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path)).train(session)
    assert raised.value.group == "objects"
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len(made) == 2, "one after the other, so that chance is the same"


def test_nothing_is_left_when_a_session_is_closed(tmp_path: Path) -> None:
    before = count_threads()
    runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path))
    with hf.LocalSession(NODES) as session:
        runner.train(session)
        runner.load_blobs_from_checkpoints("total", 2, session)
        assert runner.save_checkpoints(5, session)
        assert runner.save_checkpoints(6, session)
    wait_for_threads(before)
    assert epochs_of(tmp_path) == (0, 1, 2, 3, 4, 5, 6)


def test_of_two_jobs_in_one_directory_the_newer_one_counts(tmp_path: Path) -> None:
    seen: list[Any] = []

    def start_another(workspace: Workspace) -> None:
        if workspace.node == NODES[0] and workspace.epoch == 2:
            seen.append(train(tmp_path, keep=hf.Latest(2)))

    runner = hf.JobRunner(make_job(before_epoch=start_another), hf.MultiNodeCheckpointManager(tmp_path))
    with hf.LocalSession(NODES) as session, pytest.raises(SaveFailedError) as raised:
        runner.train(session)
    assert isinstance(raised.value.__cause__, FencedError)
    assert (runner.result.last_epoch, runner.result.last_saved_epoch) == (2, 1)
    ((last, totals, result),) = seen
    assert (last, totals, result.resumed_from) == (4, [145.0] * 3, 1)
    assert epochs_of(tmp_path) == (3, 4)


def test_an_epoch_whose_manifest_is_gone_is_passed_over_by_name_and_kept(tmp_path: Path) -> None:
    train(tmp_path)
    next(tmp_path.glob("step-000000004.*/manifest.json")).unlink()
    with pytest.raises(NoWholeCheckpointError, match="step 4 was committed, and its manifest is gone"):
        train(tmp_path, 4)
    events: list[Event] = []
    last, totals, result = train(tmp_path, sinks=[events.append])
    assert (last, totals, result.resumed_from) == (4, [145.0] * 3, 3)
    assert [event.step for event in events if isinstance(event, PassedOver)] == [4]
    assert len(list(tmp_path.glob("step-*"))) == 6, "its data is still there"


def test_two_jobs_in_one_process_do_not_mix(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    results: dict[str, tuple[int, list[float]]] = {}

    def run(name: str, first: float) -> None:
        job = make_job(before_epoch=lambda workspace: barrier.wait(60) if workspace.node == "trainer_0" else None)
        job.init_group.add(lambda workspace: workspace.update(name=name, own=first), name="name")
        with hf.LocalSession(NODES) as session:
            last = hf.JobRunner(job, hf.MultiNodeCheckpointManager(tmp_path / name)).train(session)
            results[name] = last, [session.workspace(node)["own"] for node in NODES]

    threads = [threading.Thread(target=run, args=(name, float(place))) for place, name in enumerate("ab")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"a": (4, [0.0] * 3), "b": (4, [1.0] * 3)}
    for name in "ab":
        runner = hf.JobRunner(make_job(), hf.MultiNodeCheckpointManager(tmp_path / name))
        with hf.LocalSession(NODES) as session:
            runner.load_blobs_from_checkpoints("name", 4, session)
            assert [session.workspace(node)["name"] for node in NODES] == [name] * 3


# The upload.


def upload(tmp_path: Path, builder: hf.UploadTaskGroupBuilder, storage: Any = None) -> tuple[hf.JobRunner, Task, Any]:
    job = make_job()
    last = job.exit_group.add(lambda workspace: "the end", on=NODES[0])
    manager = hf.MultiNodeCheckpointManager(tmp_path / "run" if storage is None else storage)
    runner = hf.JobRunner(job, manager, upload_task_group_builder=builder)
    error = None
    with hf.LocalSession(NODES) as session:
        try:
            runner.train(session)
        except Exception as raised:
            error = raised
    return runner, last, error


def test_the_last_saved_epoch_is_uploaded_and_can_be_restored_there(tmp_path: Path) -> None:
    for _ in range(2):
        runner, _, error = upload(tmp_path, UploadTo(tmp_path / "there"))
        assert error is None
        assert runner.result.upload_error is None
    assert epochs_of(tmp_path / "there") == (4,)
    assert train(tmp_path / "there")[1] == [145.0] * 3


def test_the_last_epoch_really_saved_is_uploaded(tmp_path: Path) -> None:
    storage = FullForSteps("full")
    storage.full = frozenset({3, 4})
    runner, last, error = upload(tmp_path, UploadTo(tmp_path / "there"), storage)
    assert isinstance(error, SaveFailedError)
    assert runner.result.upload_error is None
    assert last.output.fetch() == "the end"
    assert epochs_of(tmp_path / "there") == (2,)


def test_what_a_dead_upload_left_is_replaced(tmp_path: Path) -> None:
    train(tmp_path / "run")
    name = next((tmp_path / "run").glob("step-000000004.*")).name
    (tmp_path / "there" / name).mkdir(parents=True)
    (tmp_path / "there" / name / "data-00000-of-00001.safetensors").write_bytes(b"half")
    assert upload(tmp_path, UploadTo(tmp_path / "there"))[2] is None
    (data,) = (tmp_path / "there" / name).glob("data-*")
    data.write_bytes(data.read_bytes()[:-8] + b"\xff" * 8)
    _, last, error = upload(tmp_path, UploadTo(tmp_path / "there"))
    assert isinstance(error, TaskFailedError), "what lies there is checked, though it was uploaded before"
    assert isinstance(error.__cause__, DamageError)
    assert last.output.fetch() == "the end"


def test_an_upload_that_fails_is_raised_and_the_exit_tasks_still_run(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("a file in its place")
    runner, last, error = upload(tmp_path, UploadTo(tmp_path / "there"))
    assert isinstance(error, TaskFailedError)
    assert error.group == "upload"
    assert runner.result.upload_error is error
    assert last.output.fetch() == "the end"
    runner, last, error = upload(tmp_path, hf.UploadTaskGroupBuilder())
    assert isinstance(error, NotImplementedError)
    assert last.output.fetch() == "the end"
    storage = FullForSteps("full")
    storage.full = None
    runner, last, error = upload(tmp_path, UploadTo(tmp_path / "nowhere"), storage)
    assert isinstance(error, SaveFailedError)
    assert not (tmp_path / "nowhere").exists()


# Kills.

KILLED = """
import sys, holdfast as hf
from epoch_jobs import make_job, totals_of

manager = hf.MultiNodeCheckpointManager(sys.argv[1], keep=hf.Latest(2))
runner = hf.JobRunner(make_job(), manager)
with hf.LocalSession(["trainer_0", "trainer_1", "trainer_2"]) as session:
    print("begun", flush=True)
    runner.train(session)
    print("ended", *totals_of(session), flush=True)
"""


def test_kills_of_one_process_end_at_the_same_total_with_two_epochs_kept(tmp_path: Path) -> None:
    moments = random.Random(11)
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    found: tuple[int, ...] = ()
    for kill in [True] * 6 + [False]:
        with preloaded.Popen(command, stdout=subprocess.PIPE, text=True, cwd=SUPPORT) as program:
            assert program.stdout is not None
            assert read_line(program) == "begun\n"
            if kill:
                with suppress(subprocess.TimeoutExpired):
                    program.wait(moments.uniform(0.0, 0.06))
                program.kill()
            with killed_after(PATIENCE_SECONDS, program):
                rest = program.stdout.read()
        assert rest == "ended 145.0 145.0 145.0\n" or (kill and rest == "")
        # A life that is killed between its first commit and what it would remove leaves one more than it found.
        most = max(4, len(found) + 1)
        found = epochs_of(tmp_path)
        assert len(found) <= most, "two, the one that was gone on from, and one just committed"
    assert epochs_of(tmp_path) == (3, 4)
    assert len(list(tmp_path.glob("step-*"))) == 2


LEAVING = """
import os, signal, sys, threading, holdfast as hf
from holdfast.events import NoticeHeard
from holdfast.storage import LocalStorage

place, way = sys.argv[1:]
heard = threading.Event()

class Slow(LocalStorage):
    def create(self, path, size_bytes):
        if way != "run" and path.startswith("step-000000002"):
            if way == "save":
                os.kill(os.getpid(), signal.SIGTERM)
            assert heard.wait(100)  # The notice comes while this save is in flight.
        return super().create(path, size_bytes)

with hf.Job() as job:
    @job.init_group
    def begin(workspace):
        workspace["total"] = 0

    @job.epoch_group
    def add(workspace):
        workspace["total"] += workspace.epoch
        if workspace.epoch == 3 and way == "task":
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigwait([signal.SIGUSR1])

hf.epoch_limiter(job, 4)
options = {"sinks": [lambda event: heard.set() if isinstance(event, NoticeHeard) else None]}
manager = hf.MultiNodeCheckpointManager(Slow(place), background=way == "task")
with hf.LocalSession("a") as session:
    runner = hf.JobRunner(job, manager, **options)
    last = runner.train(session)
    print(last, runner.result.resumed_from, session.workspace()["total"])
"""


@pytest.mark.parametrize("way", ["save", "task"])
def test_a_job_that_is_asked_to_leave_ends_the_save_in_flight(way: str, tmp_path: Path) -> None:
    def run(way: str) -> tuple[int, str, str]:
        program = [sys.executable, "-c", LEAVING, str(tmp_path), way]
        ran = preloaded.run(program, check=False, capture_output=True, text=True, timeout=120)
        return ran.returncode, ran.stdout.strip(), ran.stderr

    code, _, log = run(way)
    assert code == 42, log
    assert "epoch 2 is saved; leaving with exit code 42" in log
    assert epochs_of(tmp_path) == (0, 1, 2)
    assert run("run")[:2] == (0, "4 2 10")
