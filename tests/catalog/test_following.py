"""Pins, leases, and the readers that follow a run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.catalog.holds import HOLDS_DIRECTORY, LEASE_SECONDS, Hold, HoldWatch, read_holds, wait_staying, write_hold
from holdfast.errors import MismatchError, NoCheckpointError, StorageError, UsageError
from holdfast.events import Event, Retained, Warned
from holdfast.format.names import COMMITTED_NAME, StepName
from holdfast.storage import Entry, LocalStorage
from mounts import small_disk
from patience import PATIENCE_SECONDS
from places import TESTS
from repetitions import repeated
from whole_runs import check_whole, steps_of

STATE = hf.Checkpoint(w=np.zeros(1000))


def save(run: Any, *steps: int, keep: Any = 1, **options: Any) -> None:
    """Commits these steps, as one start of a job."""
    w = np.zeros(1000)
    with hf.CheckpointManager(run, hf.Checkpoint(w=w), keep=keep, **options) as manager:
        for step in steps:
            w[:] = step
            manager.save(step).wait_ended()


def holdfast(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)


def test_a_pinned_step_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    run, events = tmp_path / "run", list[Event]()
    save(run, 1, 2)
    assert hf.pin(f"{run}@2") == StepName(2, 1)
    save(run, 3, 4, sinks=[events.append])
    assert check_whole(run) == [2, 4]
    retained = [event for event in events if isinstance(event, Retained)][-1]
    assert retained.kept[2].startswith("pinned")
    assert retained.kept_bytes > 2 * 8000
    listed = json.loads(holdfast("list", run, "--json").stdout)["steps"]
    assert [step["is_pinned"] for step in listed] == [True, False]
    assert "pinned" in holdfast("list", run, "--human").stdout
    pruned = holdfast("prune", run, "--steps", "2", "--yes")
    assert "it is pinned" in pruned.stdout
    assert steps_of(run) == [2, 4]
    assert holdfast("unpin", f"{run}@2").stdout == f"{run}@2 is no longer pinned\n"
    assert not hf.unpin(f"{run}@2")
    save(run, 5)
    assert steps_of(run) == [5]
    assert holdfast("pin", f"{run}@latest").stdout.startswith("step 5 is pinned\n")
    with pytest.raises(NoCheckpointError):
        hf.pin(f"{run}@2")
    with pytest.raises(UsageError, match="which step"):
        hf.unpin(run)


def test_pin_of_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    save(tmp_path / "gpt", 1)
    for verb in ("pin", "unpin"):
        missing = holdfast(verb, tmp_path / "gtp@1")
        assert missing.returncode == 3
        assert f"there is no directory {tmp_path}/gtp" in missing.stderr
        assert f"Did you mean {tmp_path}/gpt?" in missing.stderr
        step = holdfast(verb, tmp_path / "gpt" / "step-000000001.g0001")
        assert step.returncode == 2
        assert "Write RUN@STEP" in step.stderr
    other = holdfast("pin", tmp_path / "gpt@7")
    assert other.returncode == 3
    assert "step 7" in other.stderr
    assert not hf.unpin(tmp_path / "gpt@1")


def test_a_lease_ends_when_the_job_has_seen_no_change_for_a_minute(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    watch, name = HoldWatch(storage), StepName(5, 1)
    write_hold(storage, Hold(name, "a-1", 100))
    write_hold(storage, Hold(name, "b-2", 999))  # A clock that is far ahead.
    watch.look(1000.0)
    assert watch.held == {name: "read by b"}
    storage.delete([Hold(name, "a-1", 100).path])
    write_hold(storage, Hold(name, "a-1", 115))
    watch.look(1000.0 + LEASE_SECONDS)
    assert watch.held == {name: "read by b"}
    watch.look(1001.0 + LEASE_SECONDS)
    assert watch.held == {name: "read by a"}
    assert [hold.reader for hold in read_holds(storage)] == ["a-1"]
    watch.look(1001.0 + 2 * LEASE_SECONDS)
    assert (watch.held, read_holds(storage)) == ({}, [])


class CutInStorage(LocalStorage):
    """Lets another process act between two calls of a job."""

    before_holds: Callable[[], object] = staticmethod(lambda: None)
    after_holds: Callable[[], object] = staticmethod(lambda: None)

    def list(self, path: str, *, deep: bool = False) -> list[Entry]:
        if path != HOLDS_DIRECTORY or threading.current_thread() is threading.main_thread():
            return super().list(path, deep=deep)
        self.before_holds()
        entries = super().list(path, deep=deep)
        self.after_holds()
        return entries


def test_of_a_reader_and_a_removal_at_the_same_time_one_sees_the_other(tmp_path: Path) -> None:
    run, name, seen, stays = CutInStorage(tmp_path / "run"), StepName(1, 1), list[bool](), list[bool]()
    other = LocalStorage(tmp_path / "run")
    asking = threading.Thread(target=lambda: stays.append(wait_staying(StoredRun(other), name)))

    def lease() -> None:
        seen.append(StoredRun(other).step(name).has(COMMITTED_NAME))
        write_hold(other, Hold(name, "reader-1", 1))

    def lease_and_ask() -> None:
        lease()
        asking.start()

    w = np.zeros(3)
    with hf.CheckpointManager(run, hf.Checkpoint(w=w), keep=1) as manager:
        manager.save(1).wait_ended()
        # Leased when the removal is announced, and before the job looks: the step stays, and has its copy again.
        run.before_holds = lease
        manager.save(2).wait_ended()
        assert (seen, steps_of(other)) == ([False], [1, 2])
        assert StoredRun(other).step(name).has_copy()
        # Leased after it has looked: the reader sees the announcement.
        run.before_holds = lambda: other.delete([hold.path for hold in read_holds(other)])
        manager.save(3).wait_ended()
        run.before_holds, run.after_holds = (lambda: None), lease_and_ask
        manager.save(4).wait_ended()
        asking.join()
        assert (seen, stays) == ([False, False], [False])
        assert steps_of(other) == [4]


def test_a_full_disk_takes_what_is_being_read(tmp_path: Path) -> None:
    events = list[Event]()
    with small_disk(tmp_path, 24 << 20) as disk:
        w = np.zeros(1 << 20)
        with hf.CheckpointManager(
            disk / "run", hf.Checkpoint(w=w), keep=1, sinks=[events.append], reuse_space=False
        ) as manager:
            manager.save(1).wait_ended()
            write_hold(LocalStorage(disk / "run"), Hold(StepName(1, 1), "reader-1", 1))
            manager.save(2).wait_ended()
            assert manager.steps() == (1, 2)
            manager.save(3).wait_ended()
            assert manager.steps() == (3,)
    assert any(isinstance(event, Warned) and "step 1 was removed, although a reader" in event.text for event in events)


def read(run: Any, name: str = "test", **options: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    followed = hf.follow(run, name=name, timeout_seconds=0.05, **options)
    return [(one.generation, one.step, one.missed) for one in followed]


def test_the_newest_step_is_given_once_over_all_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = tmp_path / "run"
    assert read(run) == []  # It need not exist yet, and may be a typing error.
    assert f"{run} has no checkpoint yet: waiting for one" in caplog.text
    save(run, 10, 20, keep=hf.All())
    caplog.clear()
    assert read(run) == [(1, 20, ())]
    assert "no checkpoint yet" not in caplog.text
    assert read(run) == []
    assert read(run, "other") == [(1, 20, ())]
    save(run, 30, keep=hf.All())
    assert read(run) == [(2, 30, ())]
    assert [one[:2] for one in read(run, "each", every=True)] == [(1, 10), (1, 20), (2, 30)]
    # Going back gives no older step again, and a step that is saved anew counts as another one.
    save(run, 20, keep=hf.All(), begin_anew=True)
    assert read(run) == [(3, 20, ())]
    assert read(run, "each", every=True) == [(3, 20, ())]
    assert {hold.reader for hold in read_holds(LocalStorage(run))} == set()


def test_each_step_is_given_in_order_and_the_missed_ones_are_named(tmp_path: Path) -> None:
    run, state = tmp_path / "run", np.zeros(1000)
    save(run, 1, 2, 3, 4, 5, keep=hf.All())
    assert read(run, every=True) == [(1, step, ()) for step in (1, 2, 3, 4, 5)]
    followed = hf.follow(run, every=True, name="slow", timeout_seconds=5, max_behind=2, w=state)
    assert next(followed).step == 1
    save(run, 6, 7, 8, keep=1)
    given = [next(followed) for _ in range(3)]
    assert [one.step for one in given[:2]] == [2, 3]
    assert given[2].missed == tuple(range(4, given[2].step))
    assert state[0] == given[2].step
    followed.close()
    # It was given, and the reader has not come back for the next: a restart does not give it again.
    last = given[2].step
    save(run, 9, keep=1)
    (again,) = read(run, "slow", every=True)
    assert again[:2] == (3, 9)
    # What came before it may not have been named before the end.
    assert again[2] == tuple(range(4, last + 1))


def test_a_step_that_is_read_stays(tmp_path: Path) -> None:
    run, w = tmp_path / "run", np.zeros(1000)
    save(run, 1)
    with hf.follow(run, w=w, name="") as followed:
        one = next(followed)
        save(run, 2, 3)
        assert steps_of(run) == [1, 3]
        assert (w == one.step).all()
        assert one.restored is not None
        listed = json.loads(holdfast("list", run, "--json").stdout)["steps"]
        assert [[reader["name"].rpartition("-")[0] for reader in step["readers"]] for step in listed] == [
            ["reader"],
            [],
        ]
        assert next(followed).step == 3
    save(run, 4)
    assert steps_of(run) == [4]
    assert read_holds(LocalStorage(run)) == []


class SealedStorage(LocalStorage):
    """A run that this process may not write to."""

    def make_directory(self, path: str) -> None:
        raise StorageError("permission denied", path=path)

    def publish(self, path: str, data: bytes) -> bool:
        raise StorageError("permission denied", path=path)

    def delete(self, paths: Iterable[str]) -> bool:
        raise StorageError("permission denied")


def test_who_may_not_write_follows_without_a_lease(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    caplog.set_level("INFO")
    save(run, 1)
    with hf.follow(SealedStorage(run), name="guest", timeout_seconds=5) as followed:
        assert next(followed).step == 1
        save(run, 2)
        assert next(followed).step == 2
    assert not (run / HOLDS_DIRECTORY).exists()
    assert caplog.text.count("is followed without leases: permission denied") == 1


def test_other_files_among_holds_are_ignored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1)
    (run / HOLDS_DIRECTORY).mkdir()
    for name in ("step-1.g1.pin", "step-000000001.g0001.lease-..-1", "reader-test.9x.1.done", "notes"):
        (run / HOLDS_DIRECTORY / name).touch()
    (run / HOLDS_DIRECTORY / "step-000000001.g0001.pin").mkdir()
    assert read_holds(LocalStorage(run)) == []
    assert read(run) == [(1, 1, ())]
    save(run, 2, 3)
    assert steps_of(run) == [3]


def test_a_command_is_run_for_each_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, 2, keep=hf.All())
    program = "import os, sys; print(sys.argv[1:], os.environ['HOLDFAST_GENERATION']); sys.exit(sys.argv[1] == '1')"
    command = ["--every", "--idle", "100ms", run, "--", sys.executable, "-c", program, "{step}", "{directory}"]
    first = holdfast("follow", *command)
    told = [f"['{step}', '{run}/step-00000000{step}.g0001'] 1" for step in (1, 2)]
    assert (first.returncode, first.stdout.splitlines()) == (4, told)
    assert "step 1: the command ended with exit code 1" in first.stderr
    again = holdfast("follow", *command)
    assert (again.returncode, again.stdout) == (0, "")
    # Options may come after RUN, too.
    for words in (("--idle", "100ms", "--json", run), (run, "--idle", "100ms", "--json"), ("--json", run, "--idle=1s")):
        assert json.loads(holdfast("follow", *words).stdout)["step"] == 2
    echoed = holdfast("follow", run, "--idle", "100ms", "--name", "last", "--", "echo", "--every", "{step}")
    assert (echoed.returncode, echoed.stdout) == (0, "--every 2\n")
    refused = holdfast("follow", run, "python", "evaluate.py")
    assert refused.returncode == 2
    assert "Write the command after `--`: -- python evaluate.py" in refused.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--json", "--", "echo", "{step}"], "a command is given"),
        (["--max-behind", "2"], "Add --every."),
        (["--", "echo", "{stepp}"], "Did you mean {step}?"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, words: list[str], text: str) -> None:
    save(tmp_path, 1)
    refused = holdfast("follow", tmp_path, "--idle", "100ms", *words)
    assert refused.returncode == 2
    assert text in refused.stderr


def test_braces_that_are_none_of_ours_stay_in_the_command(tmp_path: Path) -> None:
    save(tmp_path, 1)
    words = ["--", "sh", "-c", "steps={step}; echo ${steps} {x} {name}"]
    assert holdfast("follow", tmp_path, "--idle", "100ms", *words).stdout == "1 {x} {name}\n"


def test_wrong_arguments_and_objects_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(UsageError, match="name must be letters"):
        hf.follow(tmp_path, name="../x")
    with pytest.raises(MismatchError):
        next(hf.follow(tmp_path, name="x", v=np.zeros(3)))
    # Nothing was given, so the next start gives it.
    assert read(tmp_path, "x") == [(1, 1, ())]


def test_readers_and_their_job_are_killed(tmp_path: Path) -> None:
    commits = repeated(10_000, in_gate=120)
    options = ["--commits", str(commits), "--directory", str(tmp_path / "run")]
    options += ["--slow-seconds", "0.2", "--pause-seconds", "0.6"] if commits < 1000 else []
    command = [sys.executable, "-m", "crash.following", *options]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none gone while it was read" in done.stdout
