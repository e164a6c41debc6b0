"""Who owns a run: a job that has opened it, for as long as it is there."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest

import holdfast as hf
import preloaded
from holdfast.errors import SaveFailedError, StorageError
from mounts import mounted
from places import PROGRAMS

PROGRAM = PROGRAMS / "owners.py"
CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--mount-proc", "--fork", "--kill-child"]


def empty(run: Path) -> None:
    for entry in run.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


WAYS: dict[str, Callable[[Path], object]] = {
    "moved": lambda run: run.rename(f"{run}-elsewhere"),
    "removed": shutil.rmtree,
    "emptied": empty,
}


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_a_run_that_goes_while_it_is_trained_is_not_made_again(tmp_path: Path, how: str, incremental: bool) -> None:
    run, state = tmp_path / "run", {"w": np.zeros(30), "still": np.ones(30)}
    with hf.CheckpointManager(run, hf.Checkpoint(state=state), incremental=incremental, failures_allowed=9) as manager:
        manager.save(1)
        manager.wait()
        WAYS[how](run)
        state["w"] += 1
        with pytest.raises(SaveFailedError, match="moved, removed or unmounted"):
            manager.save(2).wait_committed()
        assert not run.exists() or {entry.name for entry in run.iterdir()} <= {"events.jsonl"}
        if how == "moved":
            run.with_name("run-elsewhere").rename(run)
            manager.save(3).wait_committed()
            assert manager.steps() == (1, 3)


def test_a_run_that_goes_before_the_first_save_is_not_made_again(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "run", hf.Checkpoint(w=np.zeros(3))
    with hf.CheckpointManager(run, checkpoint) as manager:
        manager.save(1)
    with hf.CheckpointManager(run, checkpoint) as manager:
        manager.restore()
        run.rename(tmp_path / "elsewhere")
        with pytest.raises(SaveFailedError, match="moved, removed or unmounted"):
            manager.save(2).wait_committed()
    assert not (run / "generations").exists()


def test_a_run_that_was_replaced_by_another_job_is_not_written_to(tmp_path: Path) -> None:
    run, checkpoint = tmp_path / "run", hf.Checkpoint(w=np.zeros(3))
    with hf.CheckpointManager(run, checkpoint) as old:
        old.save(1)
        old.wait()
        run.rename(tmp_path / "elsewhere")
        with hf.CheckpointManager(run, checkpoint) as new:
            new.save(1).wait_committed()
        with pytest.raises(SaveFailedError, match="was replaced by one"):
            old.save(2).wait_committed()
        assert old.steps() == (1,)


def test_what_is_below_a_volume_that_was_unmounted_is_not_written(tmp_path: Path) -> None:
    """The mount point stays, as an empty directory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(tmp_path / "mount", "--bind", str(disk)) as mount:
        with hf.CheckpointManager(mount / "run", hf.Checkpoint(w=np.zeros(3))) as manager:
            manager.save(1)
            manager.wait()
            subprocess.run(["umount", "--lazy", str(mount)], check=True)
            try:
                with pytest.raises(SaveFailedError, match="moved, removed or unmounted"):
                    manager.save(2).wait_committed()
                assert not any(mount.iterdir())
            finally:
                subprocess.run(["mount", "--bind", str(disk), str(mount)], check=True)
            manager.save(3).wait_committed()
            assert manager.steps() == (1, 3)


def test_backups_are_not_made_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    weights = np.zeros(3)
    state = hf.WorkerTrainingState(tmp_path / "run", hf.Checkpoint(weights=weights))
    state.restore()
    state.back_up(0).wait_ended()
    shutil.rmtree(tmp_path / "run")
    state.back_up(1)
    with pytest.raises(SaveFailedError, match="moved, removed or unmounted"):
        state.close()
    assert not (tmp_path / "run").exists()


def holdfast_list(run: Path, prefix: list[str] | None = None) -> dict[str, object]:
    command = [*(prefix or []), sys.executable, "-m", "holdfast", "list", str(run.parent), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)["runs"]
    return dict(found)


def in_container(*arguments: object) -> str:
    """Runs the program as process 1 of a container with this machine's name."""
    command = [*CONTAINER, sys.executable, str(PROGRAM), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    return done.stdout + done.stderr


def test_process_1_of_one_container_is_not_that_of_another(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    assert "backed up 0" in in_container("back_up", run, 0)
    assert holdfast_list(run, CONTAINER)["state"] == "ok", "that container's process has ended"
    weights = np.zeros(3)
    with hf.WorkerTrainingState(run, hf.Checkpoint(weights=weights)) as old:
        old.restore()
        assert "backed up 1" in in_container("back_up", run, 1)
        with pytest.raises(hf.errors.FencedError, match="process 1 on"):
            old.delete_backup()
    assert "FencedError" in in_container("delete_after", run, *CONTAINER)
    assert holdfast_list(run)["newest_step"] == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_run_of_which_only_the_top_is_writable_is_refused_at_the_start() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        run = Path(directory) / "run"
        with hf.CheckpointManager(run, hf.Checkpoint(w=np.zeros(3))) as manager:
            manager.save(1)
        run.chmod(0o777)
        os.seteuid(65534)
        try:
            with pytest.raises(StorageError, match=r"no checkpoint can be saved here.*generations"):
                hf.resumable(run, w=np.zeros(3)).__enter__()
        finally:
            os.seteuid(0)


def test_process_1_of_a_container_says_what_it_may_have_missed(tmp_path: Path) -> None:
    assert "process 1 of its container" in in_container("enter", tmp_path / "run")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests start second jobs on purpose."""
    monkeypatch.delenv("HOLDFAST_TAKE_OVER")


@pytest.mark.usefixtures("refusing")
def test_a_second_job_on_one_machine_is_refused_and_the_first_trains_on(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    manager = hf.CheckpointManager(run, hf.Checkpoint(weights=np.zeros(3)))
    manager.save(1).wait_committed()
    command = [sys.executable, str(PROGRAM)]
    second = preloaded.run([*command, "enter", str(run)], capture_output=True, text=True, check=False)
    assert f"process {os.getpid()} on" in second.stderr, second.stderr
    assert "HOLDFAST_TAKE_OVER=1" in second.stderr, second.stderr
    assert second.returncode == 1
    assert holdfast_list(run)["state"] == "running"
    manager.save(3).wait_committed()
    with hf.resumable(run, weights=np.zeros(3), preemption="off") as again:
        assert again.step == 3, "this process is not another job"
    environment = {**os.environ, "HOLDFAST_TAKE_OVER": "1"}
    taken = preloaded.run([*command, "train", str(run)], env=environment, capture_output=True, text=True, check=False)
    assert taken.returncode == 0, taken.stderr
    with pytest.raises(SaveFailedError, match="can no longer save"):
        manager.save(5).wait_committed()


@pytest.mark.usefixtures("refusing")
def test_a_process_that_has_closed_its_run_holds_up_no_other(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    with hf.CheckpointManager(run, hf.Checkpoint(weights=np.zeros(3))) as manager:
        manager.save(1)
    assert holdfast_list(run)["state"] == "ok"
    command = [sys.executable, str(PROGRAM), "enter", str(run)]
    done = preloaded.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def command_of(*arguments: object) -> list[str]:
    return [sys.executable, str(PROGRAM), *map(str, arguments)]


def run_program(*arguments: object) -> subprocess.CompletedProcess[str]:
    (done,) = run_together(command_of(*arguments))
    return done


def run_together(*commands: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Those that are refused wait a while first."""
    with ThreadPoolExecutor(len(commands)) as pool:
        run = partial(preloaded.run, capture_output=True, text=True, check=False)
        return [*pool.map(run, commands)]


@contextmanager
def holding(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has a run open until its input ends, and the number that it has printed."""
    with preloaded.Popen(command_of(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout is not None
            yield first, int(first.stdout.readline())
        finally:
            first.kill()


def holdfast(*arguments: object) -> subprocess.CompletedProcess[str]:
    (done,) = run_together([sys.executable, "-m", "holdfast", *map(str, arguments)])
    return done


@pytest.mark.usefixtures("refusing")
def test_a_job_that_has_not_saved_yet_is_protected(tmp_path: Path) -> None:
    old, new = tmp_path / "runs" / "old", tmp_path / "new"
    assert run_program("train", old).returncode == 0
    before = sorted(path.name for path in old.rglob("*"))
    with holding("hold", old) as (first, number), holding("hold", new) as (other, other_number):
        programs = ("enter", "save")
        refused = run_together(*(command_of(program, run) for program in programs for run in (old, new)))
        for second, owner, is_new in zip(refused, (number, other_number) * 2, (False, True) * 2, strict=True):
            assert f"process {owner} on" in second.stderr, second.stderr
            assert "HOLDFAST_TAKE_OVER=1" in second.stderr, second.stderr
            assert ("the run was last written" in second.stderr) is not is_new
            assert "waiting up to 10 s" in second.stderr
            assert second.returncode == 1
        assert holdfast_list(old)["state"] == "running"
        assert f"process {number} on" in holdfast("rollback", f"{old}@3").stderr
        assert f"process {number} on" in holdfast("prune", old, "--unfinished", "--job-is-dead", "--yes").stderr
        assert sorted(path.name for path in old.rglob("*")) == before, "nothing was fenced, and nothing removed"
        assert not any(new.iterdir())
        for job in (first, other):
            printed, _ = job.communicate("go on")
            assert printed == "left\n"
    assert holdfast_list(old)["newest_step"] == 9


@pytest.mark.usefixtures("refusing")
def test_backups_that_a_job_has_restored_are_not_deleted_by_another(tmp_path: Path) -> None:
    run, weights = tmp_path / "run", np.zeros(3)
    assert "backed up 0" in run_program("back_up", run, 0).stdout
    with hf.WorkerTrainingState(run, hf.Checkpoint(weights=weights)) as state:
        state.restore()
        state.maybe_load_initial_epoch_from_ckpt(0, "train")
        assert f"process {os.getpid()} on" in run_program("delete_backup", run).stderr
        state.back_up(1).wait_committed()
        assert state.delete_backup()


@pytest.mark.usefixtures("refusing")
def test_of_jobs_that_start_at_the_same_moment_one_enters(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    runs = [tmp_path / "made", tmp_path / "new"] * 3
    with ExitStack() as stack:
        commands = [command_of("hold", run) for run in runs]
        jobs = [stack.enter_context(preloaded.Popen(each, stdin=PIPE, stdout=PIPE, text=True)) for each in commands]
        while sum(job.poll() is None for job in jobs) > 2:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert sum(job.poll() is None for job in jobs) >= 2
        ended = [job.communicate("go on")[0].endswith("left\n") for job in jobs]
    assert sorted(run.name for run, has_trained in zip(runs, ended, strict=True) if has_trained) == ["made", "new"]


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("how", ["fork", "multiprocessing", "exec"])
def test_what_a_killed_job_had_started_holds_up_no_other(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    with holding("start", run, how) as (first, child):
        try:
            first.kill()
            os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
            os.kill(child, 0)
            assert "entered 1" in run_program("enter", run).stdout
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("refusing")
def test_a_child_that_was_forked_without_python_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holding("start", run, "native") as (first, child):
        try:
            first.kill()
            first.wait()
            assert f"process {child} on" in run_program("enter", run).stderr
        finally:
            os.kill(child, signal.SIGKILL)
    assert "entered 1" in run_program("enter", run).stdout


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_child_of_the_program_is_not_another_job(tmp_path: Path, how: str) -> None:
    done = run_program("train_in_child", tmp_path / "run", how)
    assert "entered 4" in done.stdout, done.stderr


@pytest.mark.usefixtures("refusing")
def test_a_manager_that_was_dropped_without_close_holds_up_no_other(tmp_path: Path) -> None:
    run, weights = tmp_path / "run", np.zeros(3)
    manager = hf.CheckpointManager(run, hf.Checkpoint(weights=weights), keep=hf.Latest(1))
    for step in (1, 2, 3):
        manager.save(step).wait_committed()
    assert f"process {os.getpid()} on" in holdfast("rollback", f"{run}@3").stderr
    del manager
    gc.collect()
    assert "entered 3" in run_program("enter", run).stdout


@pytest.mark.usefixtures("refusing")
def test_a_job_waits_for_one_that_is_leaving(tmp_path: Path) -> None:
    run = tmp_path / "run"
    manager = hf.CheckpointManager(run, hf.Checkpoint(weights=np.zeros(3)))
    manager.save(1).wait_committed()
    command = [sys.executable, str(PROGRAM), "enter", str(run)]
    with preloaded.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        while "has this run open; waiting up to 10 s" not in second.stderr.readline():
            assert second.poll() is None
        manager.save(7)
        manager.close()
        printed, _ = second.communicate()
    assert "entered 7" in printed


@pytest.mark.long
@pytest.mark.usefixtures("refusing")
def test_a_second_job_that_tolerates_failures_does_not_train_in_vain(tmp_path: Path) -> None:
    """A backup that fails is only reported; each one of a directory that another process has open would fail."""
    run, weights = tmp_path / "run", np.ones(3)
    with hf.WorkerTrainingState(run, hf.Checkpoint(weights=weights)) as state:
        state.back_up(0).wait_committed()
        second = run_program("back_up_on", run)
        assert second.stdout == "trained 1\n", "the first one fails in the background"
        assert second.returncode == 1
        assert f"process {os.getpid()} on" in second.stderr
        state.delete_backup()
    assert not list(run.glob("step-*"))


@pytest.mark.usefixtures("refusing")
def test_a_job_that_was_killed_holds_up_no_other(tmp_path: Path) -> None:
    """Also while it is a zombie, and while a process that it had forked lives on."""
    run = tmp_path / "run"
    command = [sys.executable, str(PROGRAM), "die", str(run)]
    with preloaded.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        child = int(first.stdout.readline())
        try:
            os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
            with hf.resumable(run, weights=np.zeros(3)) as training:
                assert training.step == 1
        finally:
            os.kill(child, 9)
