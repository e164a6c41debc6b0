"""Jobs, tasks, groups, workspaces and the session in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from command_line import run_python
from holdfast.errors import ClosedError, OutOfRangeError, TaskFailedError, UsageError
from holdfast.jobs import Counter, Task, TaskGroup, Workspace


def nothing(workspace: Workspace) -> None:
    pass


def test_tasks_are_added_by_call_by_decorator_and_within_with() -> None:
    with hf.Job() as job:
        assert hf.Job.current() is job
        bare = Task(nothing, on="a")

        @job.init_group
        def first(workspace: Workspace) -> None: ...

        @job.exit_group(on=["a", "b", "a"], name="leaving")
        def last(workspace: Workspace) -> None: ...

        called = job.download_group.add(nothing)
        with job.init_group:
            Task(nothing, on="c", name="second")
        with hf.Job() as inner:
            assert hf.Job.current() is inner
            Task(nothing)
        assert hf.Job.current() is job
    assert job.epoch_group.tasks == (bare,)
    assert [task.name for task in job.init_group] == ["first", "second"]
    assert (first.on, last.on, last.name) == (None, ("a", "b"), "leaving")
    assert job.download_group.tasks == (called,)
    assert len(inner.epoch_group) == 1
    assert job.named_nodes() == ("c", "a", "b")
    with pytest.raises(UsageError, match="no current job"):
        hf.Job.current()
    Task(nothing)
    assert len(job.epoch_group) == 1, "outside of with a task is in no group"


def test_error_inside_a_with_block_leaves_no_current_job() -> None:
    with pytest.raises(ZeroDivisionError), hf.Job():
        raise ZeroDivisionError
    with pytest.raises(UsageError):
        hf.Job.current()
    group = TaskGroup()
    hf.LocalSession().run(Task(nothing))
    assert len(group) == 0


def test_the_nodes_whose_state_is_kept() -> None:
    assert hf.Job(nodes_to_checkpoint=["b", "a"]).nodes_to_checkpoint() == ("b", "a")
    job = hf.Job(nodes_to_checkpoint=[])
    job.epoch_group.add(nothing, on="z")
    job.init_group.add(nothing, on=["b", "a"])
    job.init_group.add(nothing, on=["a", "c"])
    assert job.nodes_to_checkpoint(["a", "b", "c", "z"]) == ("b", "a", "c"), "those of the init tasks, in order, once"
    job.add_object("reader", list, on="d")
    assert job.nodes_to_checkpoint() == ("b", "a", "c", "d")
    job.init_group.add(nothing)
    assert job.nodes_to_checkpoint(["x", "y"]) == ("x", "y"), "one that runs everywhere means all"
    assert hf.Job().nodes_to_checkpoint(["x"]) == ("x",)


def test_outputs_are_fetched_when_the_task_has_run() -> None:
    one = Task(lambda workspace: f"here {workspace.node}", on="a")
    all_of_them = Task(lambda workspace: workspace.node, name="everywhere")
    with pytest.raises(UsageError, match="has not run"):
        one.output.fetch()
    with hf.LocalSession(["a", "b"]) as session:
        group = TaskGroup("both")
        group.include(one)
        group.include(all_of_them)
        session.run(group)
        assert one.output.fetch() == "here a"
        assert all_of_them.output_on("b").fetch() == "b"
        with pytest.raises(UsageError, match="ran on a, b"):
            all_of_them.output.fetch()
        with pytest.raises(UsageError, match="does not run on b"):
            one.output_on("b")
        with pytest.raises(UsageError, match="already run"):
            group.add(nothing)
        session.run(Task(nothing))
    with pytest.raises(ClosedError):
        session.run(group)
    session.close()


def test_the_tasks_of_a_group_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4)

    def meet(workspace: Workspace) -> int:
        return barrier.wait(60)

    group = TaskGroup()
    for _ in range(2):
        group.add(meet)
    with hf.LocalSession(["a", "b"]) as session:
        session.run(group)
    places = [place for task in group for place in task.results().values()]
    assert sorted(places) == [0, 1, 2, 3]


def test_a_task_that_fails_says_where_and_names_the_others() -> None:
    gate = threading.Event()
    group = TaskGroup("work")

    def fail(workspace: Workspace) -> None:
        raise KeyError(workspace.node)

    group.add(fail, on=["a", "b"])
    group.add(lambda workspace: gate.wait(600), on="a", name="slow")
    with hf.LocalSession(["a", "b"], grace_seconds=0.2) as session, pytest.raises(TaskFailedError) as raised:
        session.run(group)
    gate.set()
    error = raised.value
    assert (error.group, error.task) == ("work", "fail")
    assert isinstance(error.__cause__, KeyError)
    notes = "\n".join(error.__notes__)
    assert "fail on" in notes
    assert "slow on a was still running" in notes
    with hf.LocalSession() as session, pytest.raises(TaskFailedError, match="fail on local"):
        session.run(Task(fail))


def test_a_task_that_hangs_does_not_keep_a_job_alive_that_has_failed() -> None:
    done = run_python(
        """
        import threading
        import holdfast as hf

        def hang(workspace):
            threading.Event().wait()

        def fail(workspace):
            raise ZeroDivisionError("no more")

        group = hf.jobs.TaskGroup("work")
        group.add(hang)
        group.add(fail)
        with hf.LocalSession(grace_seconds=0) as session:
            session.run(group)
        """
    )
    assert done.returncode == 1, "it has not ended"
    assert "TaskFailedError: fail on local failed" in done.stderr
    assert "hang on local was still running after 0 s" in done.stderr


def test_ctrl_c_in_a_task_is_one(tmp_path: Path) -> None:
    def interrupt(workspace: Workspace) -> None:
        raise KeyboardInterrupt

    with hf.LocalSession(["a", "b"]) as session:
        for nodes in ("a", ["a", "b"]):
            with pytest.raises(KeyboardInterrupt):
                session.run(Task(interrupt, on=nodes))


def test_an_unknown_node_is_named() -> None:
    with hf.LocalSession(["a"]) as session:
        with pytest.raises(UsageError, match="b, c"):
            session.run(Task(nothing, on=["a", "b", "c"]))
        with pytest.raises(UsageError, match="no node 'z'"):
            session.workspace("z")


def test_a_session_without_nodes_takes_over_those_of_its_first_job() -> None:
    with hf.LocalSession() as session:
        assert list(session.nodes) == ["local"]
        session.bind(["a", "b"])
        assert list(session.nodes) == ["a", "b"]
        with pytest.raises(UsageError, match="no node c"):
            session.bind(["b", "c"])


def test_workspaces_hold_named_values() -> None:
    workspace = Workspace("a")
    workspace["x"] = 1
    workspace["x"] += 1
    assert (dict(workspace), len(workspace), "x" in workspace, "y" in workspace) == ({"x": 2}, 1, True, False)
    assert workspace.setdefault("y", 3) == 3
    with pytest.raises(KeyError, match=r"no value 'z'; the names are x, y"):
        workspace["z"]
    del workspace["x"]
    assert repr(workspace) == "Workspace('a': y)"
    for name in ("", "a/b", "$x", "w*", "__metadata__", "two\nlines", 3):
        with pytest.raises(UsageError, match="cannot name"):
            workspace[name] = 1  # type: ignore[index]
    with pytest.raises(UsageError, match="cannot name a node"):
        Workspace("a/b")


def test_workspaces_are_saved_and_restored_like_any_object(tmp_path: Path) -> None:
    before = Workspace("a")
    before.update(number=7, text="seven", tree={"array": np.arange(6.0), "list": [1, (2, 3)]}, count=Counter(5))
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(a=before)) as manager:
        manager.save(1)
    after = Workspace("a")
    counter = Counter()
    after.update(count=counter, number=0, left_over=1)
    hf.CheckpointManager(tmp_path, hf.Checkpoint(a=after)).restore()
    assert set(after) == {"number", "text", "tree", "count"}
    assert (after["number"], after["text"], after["tree"]["list"]) == (7, "seven", [1, (2, 3)])
    assert after["tree"]["array"].tolist() == [0, 1, 2, 3, 4, 5]
    assert after["count"] is counter
    assert counter.value == 5
    part = Workspace("a")
    part["own"] = 1
    hf.CheckpointManager(tmp_path, hf.Checkpoint(a=part)).restore(only=["a/number"])
    assert dict(part) == {"own": 1, "number": 7}
    with pytest.raises(hf.errors.MismatchError, match="a/count"):
        hf.CheckpointManager(tmp_path, hf.Checkpoint(a=Workspace("a"))).restore()
    extra = Workspace("a")
    extra.update(count=Counter(), other=Counter())
    with pytest.raises(hf.errors.MismatchError, match="a/other"):
        hf.CheckpointManager(tmp_path, hf.Checkpoint(a=extra)).restore()


def test_counters_count_from_many_threads() -> None:
    counter = Counter(100)
    with hf.LocalSession([f"n{number}" for number in range(8)]) as session:
        taken = Task(lambda workspace: sum(counter.try_take() for _ in range(50)))
        session.run(taken)
    assert sum(taken.results().values()) == 100
    assert (counter.value, counter.try_take(), counter.add(2)) == (0, False, 2)
    with pytest.raises(UsageError):
        counter.load_state_dict({"value": "9"})


@pytest.mark.parametrize("number", [0, -1])
def test_a_limit_below_one_is_an_error_when_it_is_made(number: int) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1") as raised:
        hf.epoch_limiter(hf.Job(), number)
    assert isinstance(raised.value, OutOfRangeError)


@pytest.mark.parametrize("number", [True, 1.0, "3", None])
def test_a_limit_is_a_whole_number(number: Any) -> None:
    with pytest.raises(UsageError):
        hf.epoch_limiter(hf.Job(), number)


def test_a_limit_is_one_of_a_job() -> None:
    with pytest.raises(UsageError, match="expected a Job, got 'x'"):
        hf.epoch_limiter("x", 2)  # type: ignore[arg-type]


def test_nodes_have_names_of_their_own() -> None:
    with pytest.raises(UsageError, match="twice"):
        hf.LocalSession(["a", "b", "a"])
    with hf.LocalSession("node") as session:
        assert session.nodes == ("node",)


def test_a_part_whose_package_is_missing_is_an_error_only_where_it_is_used() -> None:
    # Where they are installed, a process that does not find them.
    program = """
import sys
sys.modules["ray"] = sys.modules["torch"] = None
import inspect, pydoc, holdfast as hf
from holdfast import *
assert {name for name, _ in inspect.getmembers(hf)} >= set(hf.__all__)
text = pydoc.plain(pydoc.render_doc(hf))
assert "class RaySession" in text and "Needs ray, which is not installed." in text and "class JobRunner" in text
assert all(hasattr(hf, name) for name in hf.__all__) and RaySession is hf.RaySession
class_of_mine = lambda: type("Mine", (hf.ResumableDataLoader,), {})
for use in (lambda: RaySession(nodes=2), lambda: hf.ResumableDataLoader([1]), class_of_mine, hf.init_process_group):
    try:
        use()
    except ImportError as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loader = ("ResumableDataLoader", "torch")
    used = [("RaySession", "ray"), loader, loader, ("init_process_group", "torch")]
    commands = {"ray": "pip install 'ray>=2.40'", "torch": "pip install 'torch>=2.6'"}
    for said, (name, package) in zip(done.stdout.split("MissingPackageError ")[1:], used, strict=True):
        assert f"holdfast.{name} needs {package}, which is not installed" in said
        assert f"Install it: {commands[package]}" in said


def test_wrong_parts_of_a_job_are_refused() -> None:
    job = hf.Job()
    other = hf.Job().epoch_group.add(nothing)
    for condition in (3, other.output, None):
        with pytest.raises(UsageError):
            job.add_stop_condition(condition)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        job.add_object("model", 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        job.init_group.add("not a function")  # type: ignore[arg-type]
    for place in ([], 3, [""], "a/b"):
        with pytest.raises(UsageError):
            job.init_group.add(nothing, on=place)  # type: ignore[arg-type]
    task = job.init_group.add(nothing)
    with pytest.raises(UsageError, match="already"):
        job.init_group.include(task)
