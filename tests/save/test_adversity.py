"""What users, signals and systems do at the worst moment."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
import preloaded
from command_line import run_file
from faulty import FullStorage
from holdfast.catalog import StoredRun
from holdfast.errors import FencedError, SaveFailedError, StorageError, UsageError
from holdfast.events import Committed, Event, Failed, Staged
from holdfast.storage import LocalStorage, MemoryStorage
from holdfast.storage.checks import as_storage_errors, lost_bytes_as_damage
from holdfast.storage.memory import MemoryWriter
from interrupts import save_struck, save_struck_after
from patience import PATIENCE_SECONDS, killed_after, read_line
from places import PROGRAMS


class WatchedStorage(MemoryStorage):
    """A storage that remembers the files in the making."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[MemoryWriter] = []

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        self.writers.append(super().create(path, size_bytes))
        return self.writers[-1]


@pytest.mark.parametrize("size", [200_000, 4_000_000])
def test_an_interrupt_anywhere_in_save_tears_nothing(tmp_path: Path, size: int) -> None:
    """The larger state is being written already while most of it is still to be copied."""
    done = run_file("interrupted", "saves", tmp_path, str(size))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "the interrupts did hit"


def test_call_from_within_a_save_is_refused_at_once() -> None:
    """As a signal handler may: two saves would share one memory, and a closed manager holds up no step."""
    told: list[str] = []

    def ask(call: Any, *arguments: Any) -> None:
        with pytest.raises(UsageError, match="call was made from inside it"):
            call(*arguments)
        told.append(call.__name__)

    class Asking:
        def state_dict(self) -> dict[str, Any]:
            signal.raise_signal(signal.SIGUSR1)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def handle(number: int, frame: Any) -> None:
        ask(manager.save, 2)
        ask(manager.restore)
        ask(manager.wait)
        ask(manager.close)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with hf.CheckpointManager(MemoryStorage(), hf.Checkpoint(asking=Asking()), timeout_seconds=20) as manager:
            manager.save(1).wait_committed()
            assert told == ["save", "restore", "wait", "close"]
            manager.save(2).wait_committed()
            assert [*manager.steps()] == [1, 2]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_that_waits_while_training_does_hangs_nothing() -> None:
    done = run_file("interrupted", "wait in handler")
    assert done.returncode == 0, done.stderr
    assert all(map(int, done.stdout.split())), "the signals did come"


@pytest.mark.parametrize("strike", [save_struck, save_struck_after])
@pytest.mark.parametrize("size", [10, 300_000])
def test_one_exception_at_any_call_of_save_leaves_it_whole_or_never(
    size: int, strike: Callable[[hf.CheckpointManager, int, int], int]
) -> None:
    """And the save after it works. The larger state is written while it is still being copied."""
    array, events, outcomes = np.ones(size), list[Event](), set[bool]()
    storage = WatchedStorage()
    options: dict[str, Any] = {"keep": hf.Latest(3), "threads": 3, "timeout_seconds": PATIENCE_SECONDS}
    with hf.CheckpointManager(storage, hf.Checkpoint(a=array), sinks=[events.append], **options) as manager:
        manager.save(1)
        step, calls, struck = 1, 0, 1
        while struck:
            step, calls = step + 2, calls + 1
            array[:] = step
            struck = strike(manager, step, calls)
            array[:] = step + 1
            manager.save(step + 1)
            manager.wait()  # Until what is not kept is gone as well.
            assert manager.latest_step() == step + 1
            outcomes.add(step in manager.steps())
            for kept in manager.steps():
                found = np.zeros(size)
                hf.CheckpointManager(storage, hf.Checkpoint(a=found)).restore(kept)
                assert (found == kept).all(), (kept, calls)
        assert step in manager.steps(), "the last one was not struck"
    assert calls > 20
    assert outcomes == {False, True}
    staged, committed = ([event.step for event in events if isinstance(event, kind)] for kind in (Staged, Committed))
    assert staged == committed
    assert not [event for event in events if isinstance(event, Failed)]
    for writer in storage.writers:
        with pytest.raises(UsageError, match="closed"):
            writer.write_at(0, memoryview(b""))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_second_exception_right_after_the_first_tears_and_hangs_nothing() -> None:
    array, hit = np.zeros(300_000), 0
    before = threading.active_count()
    for first in range(1, 60):
        for second in (1, 2, 3):
            options: dict[str, Any] = {"threads": 2, "timeout_seconds": PATIENCE_SECONDS}
            storage = MemoryStorage()
            with hf.CheckpointManager(storage, hf.Checkpoint(a=array), **options) as manager:
                array[:] = 1
                hit += save_struck(manager, 1, first, second) == 2
                array[:] = 2
                if first % 2:
                    manager.save(2).wait_committed()
                    assert manager.latest_step() == 2
                assert {*manager.steps()} <= {1, 2}
            for kept in manager.steps():
                found = np.zeros_like(array)
                hf.CheckpointManager(storage, hf.Checkpoint(a=found)).restore(kept)
                assert (found == kept).all()
    assert hit > 10
    assert threading.active_count() == before


def test_interrupt_after_a_failing_copy_leaves_a_manager_that_saves() -> None:
    done = run_file("interrupted", "after failing copy")
    assert done.returncode == 0, done.stderr
    failed, interrupted = map(int, done.stdout.split())
    assert failed >= 1
    assert interrupted > 4


class Refusing(MemoryStorage):
    """A storage that refuses to write while it is told to; notes which events came before files were made to last."""

    refuses = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.told_before_last: list[str] = []

    def create(self, path: str, size_bytes: int) -> MemoryWriter:
        if self.refuses:
            raise StorageError("refused", path=path)
        return super().create(path, size_bytes)

    def sync_directory(self, path: str) -> None:
        self.told_before_last = [*self.told]
        super().sync_directory(path)

    def hear(self, event: Event) -> None:
        self.told.append(type(event).__name__)


def test_failure_during_the_copy_is_reported_after_the_copy() -> None:
    storage = Refusing()
    manager = hf.CheckpointManager(storage, hf.Checkpoint(a=np.zeros(8_000_000)), sinks=[storage.hear])
    storage.refuses = True
    handle = manager.save(1)
    handle.wait_staged()
    with pytest.raises(SaveFailedError, match="refused"):
        handle.wait_committed()
    handle.wait_ended()
    assert storage.told == ["Staged", "GenerationOpened", "Failed"]
    storage.refuses = False
    storage.told.clear()
    manager.save(2).wait_committed()
    # What the background takes counts from the end of the copy, which is long before all is written.
    assert storage.told_before_last == ["Staged"]
    manager.close()


@pytest.mark.parametrize("mode", ["fail by hand", "fail in loop"])
def test_save_that_failed_before_sys_exit_0_is_reported(tmp_path: Path, mode: str) -> None:
    done = run_file("unsaved_ends", mode, tmp_path)
    assert done.returncode == 74
    assert "was not saved: no room" in done.stderr


def test_failed_save_without_a_listener_sets_the_exit_code(tmp_path: Path) -> None:
    assert run_file("unsaved_ends", "fail without listener", tmp_path).returncode == 74


def test_a_save_tried_again_after_a_failure_saves() -> None:
    storage = FullStorage()
    with hf.resumable(storage, a=np.zeros(3), save_every=hf.Steps(1000)) as run:
        for step in run.steps(10):
            if step == 9:
                handle = run.save()
                assert handle is not None
                with pytest.raises(SaveFailedError):
                    handle.wait_committed(60)
                storage.is_full = False
                assert run.save() is not None
    assert [name.step for name in StoredRun(storage).look().living] == [10]


def test_a_save_that_reports_an_earlier_failure_counts() -> None:
    storage = FullStorage()
    with hf.resumable(storage, a=np.zeros(3), save_every=hf.Steps(1000)) as run:
        for step in run.steps(10):
            if step == 5:
                handle = run.save()
                assert handle is not None
                handle.wait_ended(60)
                storage.is_full = False
            if step == 9:
                with pytest.raises(SaveFailedError) as caught:
                    run.save()
                caught.value.next_save.wait_committed(60)
    assert [name.step for name in StoredRun(storage).look().living] == [10]


@pytest.mark.parametrize("begin_anew", [False, True])
def test_a_second_job_that_began_beside_the_first_is_refused(tmp_path: Path, begin_anew: bool) -> None:
    a, b = np.zeros(1), np.zeros(1)
    first = hf.CheckpointManager(tmp_path, hf.Checkpoint(x=a))
    second = hf.CheckpointManager(tmp_path, hf.Checkpoint(x=b), keep=hf.Latest(1), begin_anew=begin_anew)
    a[:] = 100
    first.save(100).wait_committed(60)
    b[:] = 10
    for _ in range(2):
        with pytest.raises(SaveFailedError, match="generation 1 was opened by process") as caught:
            second.save(10).wait_committed(60)
        assert isinstance(caught.value.__cause__, FencedError)
    first.save(200).wait_committed(60)
    found = np.zeros(1)
    restored = hf.CheckpointManager(tmp_path, hf.Checkpoint(x=found)).restore()
    assert restored is not None
    assert (restored.step, found[0]) == (200, 100)
    first.close(60)
    second.close(60)


def test_a_warm_start_from_a_part_leaves_the_policy_alone(tmp_path: Path) -> None:
    weights = np.ones(3)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(model=weights)) as manager:
        manager.save(1000)
    with hf.CheckpointManager(
        tmp_path, hf.Checkpoint(model=weights), begin_anew=True, save_every=hf.Steps(10), keep=hf.Latest(1)
    ) as manager:
        manager.restore(1000, only="model")
        assert [step for step in range(1, 31) if manager.save_if_due(step)] == [10, 20, 30]
    assert 1000 in {name.step for name in StoredRun(LocalStorage(tmp_path)).look().committed}


def test_an_odd_old_manifest_troubles_no_save(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(a=np.zeros(3)), keep=hf.Latest(2)) as manager:
        manager.save(1)
        manager.wait(60)
        manifest = tmp_path / "step-000000001.g0001" / "manifest.json"
        manifest.unlink()
        manifest.symlink_to(tmp_path / "elsewhere")
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(a=np.zeros(3)), keep=hf.Latest(2)) as manager:
        for step in range(2, 6):
            manager.save(step)
        manager.wait(60)
        assert manager.steps()[-2:] == (4, 5)


def test_what_cannot_be_removed_is_a_warning_once() -> None:
    class Stubborn(MemoryStorage):
        def delete(self, paths: Iterable[str]) -> bool:
            every = [*paths]
            if any(path.startswith("step-000000001") and path.endswith("manifest.json") for path in every):
                raise StorageError("cannot remove", path=every[0])
            return super().delete(every)

    events: list[Event] = []
    manager = hf.CheckpointManager(
        Stubborn("s"), hf.Checkpoint(a=np.zeros(3)), keep=hf.Latest(1), sinks=[events.append]
    )
    manager.save(1)
    manager.save(2).wait_ended(60)
    for step in (3, 4):
        manager.save(step)
    manager.close(60)
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert "step 2 is committed, but" in str(failed)


def test_a_device_that_lost_bytes_counts_as_damage() -> None:
    def read(code: int) -> None:
        with lost_bytes_as_damage("data"), as_storage_errors("read", "data", Path("/run")):
            raise OSError(code, os.strerror(code))

    with pytest.raises(hf.errors.DamageError, match="data"):
        read(errno.EIO)
    with pytest.raises(StorageError):
        read(errno.EACCES)


def restore_with_fault(run: Path, data: Path, fault: str) -> subprocess.CompletedProcess[str]:
    """Restores in a process whose reads of one file go wrong in the system's own calls."""
    calls = "pread64,preadv,preadv2"
    inject = ["-P", str(data), "-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    done = subprocess.run(
        ["strace", "-f", "-o", f"{run}.log", *inject, sys.executable, PROGRAMS / "restores.py", str(run)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0 and "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    return done


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_bad_sector_sends_a_restore_to_the_step_before(tmp_path: Path) -> None:
    array = np.zeros(100_000)
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(a=array)) as manager:
        for step in (1, 2):
            array[:] = step
            manager.save(step)
    (data,) = tmp_path.glob("step-000000002.*/data-*")
    done = restore_with_fault(tmp_path, data, "error=EIO:when=1")
    assert done.stdout == "1 1.0 1.0 1 100000.0\n", done.stderr


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("signal_name", ["", "SIGINT"])
def test_short_read_continues_unless_interrupted(tmp_path: Path, signal_name: str) -> None:
    """As on a file system whose server does not answer, where a read returns when a signal comes."""
    array = np.arange(100_000.0)
    with hf.CheckpointManager(tmp_path / "run", hf.Checkpoint(a=array)) as manager:
        manager.save(1)
    (data,) = (tmp_path / "run").glob("step-*/data-*")
    fault = "error=EINTR" + (f":signal={signal_name}:when=2+" if signal_name else ":when=2..4")
    done = restore_with_fault(tmp_path / "run", data, fault)
    if signal_name:
        assert done.stdout == "interrupted\n", done.stdout + done.stderr
    else:
        assert done.stdout == f"1 0.0 99999.0 0 {array.sum()}\n", done.stderr


def test_sink_that_raises_system_exit_hangs_no_caller() -> None:
    def sink(event: Event) -> None:
        raise SystemExit(3)

    manager = hf.CheckpointManager(FullStorage(), hf.Checkpoint(a=np.zeros(3)), sinks=[sink])
    with pytest.raises(SaveFailedError, match="no room"):
        manager.save(1).wait_committed(60)
    manager.close(60)
    with hf.CheckpointManager(MemoryStorage("x"), hf.Checkpoint(a=np.zeros(3)), sinks=[sink]) as manager:
        manager.save(1).wait_committed(60)


def test_a_number_that_no_generation_may_have_is_an_error(tmp_path: Path) -> None:
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(a=np.zeros(3))) as manager:
        manager.save(1)
    (tmp_path / "generations" / "1000000000.json").touch()
    manager = hf.CheckpointManager(tmp_path, hf.Checkpoint(a=np.zeros(3)))
    with pytest.raises(SaveFailedError, match="no generation can follow"):
        manager.save(9).wait_committed(60)
    manager.close(60)


def test_steps_rise_over_failed_saves_too() -> None:
    storage = FullStorage()
    manager = hf.CheckpointManager(storage, hf.Checkpoint(a=np.zeros(3)), failures_allowed=9)
    manager.save(4).wait_ended(60)
    storage.is_full = False
    with pytest.raises(UsageError, match="older than step 4"):
        manager.save(3)
    manager.save(4)
    manager.close(60)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": hf.Steps(2)},
        {"keep": 0},
        {"save_every": hf.Latest(2)},
        {"save_every": 0},
        {"threads": "2"},
        {"threads": 1.5},
        {"timeout_seconds": "1"},
        {"timeout_seconds": float("inf")},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": 1e12},
        {"failures_allowed": -1},
        {"when_busy": "drop"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(tmp_path: Path, options: Any) -> None:
    with pytest.raises(UsageError):
        hf.CheckpointManager(tmp_path, hf.Checkpoint(a=1), **options)


@pytest.mark.parametrize(
    "notes",
    [
        {"metrics": {"\ud800": 1.0}},
        {"metrics": {"x": 10**400}},
        {"metrics": {"x": "high"}},
        {"metadata": {"x": float("nan")}},
        {"metadata": {"x": b"bytes"}},
        {"metadata": {"x": {1, 2}}},
        {"metadata": {"x": "\ud800"}},
    ],
    ids=ascii,
)
def test_notes_that_would_not_come_back_are_refused_at_the_call(notes: Any) -> None:
    with hf.CheckpointManager(MemoryStorage("x"), hf.Checkpoint(a=1)) as manager, pytest.raises(UsageError):
        manager.save(1, **notes)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_run_directory_that_is_none_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "run"
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="not a directory"):
        hf.CheckpointManager(place, hf.Checkpoint(a=1))


@pytest.mark.parametrize("mode", ["hang", "hang in block", "hang in close"])
def test_ctrl_c_while_a_program_waits_at_its_end_says_what_is_lost(mode: str) -> None:
    code, errors = signal_at_the_end(mode, signal.SIGINT)
    assert code == 130, errors
    assert errors.endswith("end of the program: step 2 is not saved; leaving with exit code 130.\n"), errors


def test_own_signal_handler_that_exits_during_a_wait_does_not_exit_with_0() -> None:
    code, errors = signal_at_the_end("exit from handler", signal.SIGTERM)
    assert code == 74, errors
    assert "step 2 is not saved" in errors


def signal_at_the_end(mode: str, number: signal.Signals) -> tuple[int, str]:
    """Sends a signal to a program that waits for its save; gives its exit code, and what it says after that."""
    program: list[str | Path] = [sys.executable, PROGRAMS / "unsaved_ends.py", mode]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        with killed_after(PATIENCE_SECONDS, process):
            line = process.stderr.readline()
            assert line.startswith("holdfast: waiting for the save of step 2 into memory://"), line
            process.send_signal(number)
            errors = process.stderr.read()
        return process.wait(PATIENCE_SECONDS), errors


@pytest.mark.parametrize(("mode", "waits"), [("hang in block for 3 s", 1), ("close in time", 0)])
def test_a_program_on_a_stuck_disk_waits_once_at_its_end(mode: str, waits: int) -> None:
    done = run_file("unsaved_ends", mode)
    assert done.returncode == 74, done.stderr
    assert done.stderr.count("waiting for the save of step 2") == waits
    assert "step 2 is not saved: the program ended before its save did" in done.stderr


@pytest.mark.parametrize("mode", ["fork one that saves", "start one that saves"])
def test_a_forked_child_with_a_manager_of_its_own_drains(tmp_path: Path, mode: str) -> None:
    done = run_file("forked_children", mode, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().living] == [1]


def test_a_forked_child_does_not_wait_for_its_parents_save() -> None:
    done = run_file("forked_children", "fork one that waits")
    assert done.returncode == 2, done.stderr


def test_a_forked_child_leaves_its_parents_run_alone(tmp_path: Path) -> None:
    done = run_file("forked_children", "fork in loop", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "belongs to process" in done.stdout
    assert StoredRun(LocalStorage(tmp_path)).look().living[-1].step == 3


def test_ctrl_c_after_the_loop_ends_what_goes_on_there(tmp_path: Path) -> None:
    program = preloaded.Popen(
        [sys.executable, PROGRAMS / "resumable_runs.py", "evaluate", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert read_line(program) == "evaluating\n"
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode in (130, -signal.SIGINT)
    assert "KeyboardInterrupt" in errors
    assert [name.step for name in StoredRun(LocalStorage(tmp_path)).look().living][-1] == 3
