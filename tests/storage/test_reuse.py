"""Saves into the room of checkpoints that retention has removed: what a restore finds, and what nobody else notices."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
import preloaded
from command_line import call, call_json, complaint
from faulty import FaultyStorage
from holdfast.catalog import StoredRun
from holdfast.errors import FencedError, SaveFailedError, UsageError
from holdfast.format.names import SPARE_NAME
from holdfast.policies import RetentionPolicy
from holdfast.restore.verify import open_step, verify_data
from holdfast.storage import LocalStorage, MemoryStorage, Storage
from holdfast.storage.local.streams import LocalWriter
from mounts import small_disk
from spare_files import can_reuse, identity, reader_of
from tracing import STRACE, needs_strace

DATA = "data-00000-of-00001.safetensors"
LENGTH = 300_000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    if not can_reuse(tmp_path):
        pytest.skip("this file system does not write over files in place, or cannot tell who has them open")
    return tmp_path / "run"


def number_of(run: Path, step: int) -> tuple[int, int]:
    """Which file a step's data file is."""
    (data,) = run.glob(f"step-{step:09d}.*/{DATA}")
    return identity(data)


def has_spare(run: Path) -> bool:
    return os.path.lexists(run / SPARE_NAME)


def check_all_whole(storage: Storage) -> None:
    for name in StoredRun(storage).look().committed:
        assert verify_data(storage, open_step(storage, name.directory, name)) == [], name


def save_steps(manager: hf.CheckpointManager, array: np.ndarray, steps: range) -> None:
    for step in steps:
        array[:] = step
        # What is removed for it is there for the next one, unless that comes right behind it.
        manager.save(step).wait_ended(60)
    manager.wait(60)


def restored_value(run: Path | Storage) -> tuple[int, float]:
    array = np.zeros(LENGTH)
    restored = hf.CheckpointManager(run, hf.Checkpoint(a=array)).restore()
    assert restored is not None
    assert restored.passed_over == ()
    assert (array == array[0]).all()
    return restored.step, float(array[0])


# What is restored.


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
@pytest.mark.parametrize(
    "keep",
    [hf.Latest(1), hf.Latest(2), hf.Best("loss") | hf.Latest(1), hf.EveryN(4) | hf.Latest(1)],
    ids=["latest-1", "latest-2", "best", "every-4"],
)
def test_every_checkpoint_is_whole_and_what_it_was(
    run: Path, keep: RetentionPolicy, incremental: bool, direct: bool
) -> None:
    """Against the truth: what was saved, for sizes that grow and shrink and arrays that change or do not."""
    dice = random.Random(f"{keep}{incremental}{direct}")
    storage = LocalStorage(run, direct=direct)
    state: dict[str, np.ndarray] = {}
    saved: dict[int, dict[str, np.ndarray]] = {}
    files: set[tuple[int, int]] = set()
    reused = 0
    with hf.CheckpointManager(storage, hf.Checkpoint(state=state), keep=keep, incremental=incremental) as manager:
        for step in range(1, 26):
            for name in ("frozen", "slow", "fast", "odd"):
                if name not in state or dice.random() < {"frozen": 0.05, "slow": 0.3}.get(name, 1):
                    length = dice.choice((150_000, 150_000, 150_000, 151_111, 40_000, 400_000, 7))
                    state[name] = np.full(length, float(step))
            saved[step] = {name: array.copy() for name, array in state.items()}
            manager.save(step, metrics={"loss": dice.random()})
            for array in state.values():
                array += 0  # What comes after may come at any time.
            manager.wait(60)
            check_all_whole(storage)
            number = number_of(run, step)
            reused += number in files
            files = {identity(data) for data in run.glob(f"step-*/{DATA}")}
            if has_spare(run):
                files.add(identity(run / SPARE_NAME))
        assert reused > 0
        for step in manager.steps():
            target: dict[str, np.ndarray] = {name: np.zeros_like(array) for name, array in saved[step].items()}
            with hf.CheckpointManager(storage, hf.Checkpoint(state=target)) as reader:
                assert reader.restore(step) is not None
            assert target.keys() == saved[step].keys()
            assert all((target[name] == saved[step][name]).all() for name in target)
    assert not has_spare(run)


def test_it_is_the_same_file_from_save_to_save(run: Path) -> None:
    array = np.zeros(LENGTH)
    with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
        save_steps(manager, array, range(1, 3))
        numbers = {number_of(run, 2), identity(run / SPARE_NAME)}
        save_steps(manager, array, range(3, 9))
        assert {number_of(run, 8), identity(run / SPARE_NAME)} == numbers
        assert call_json("verify", run)["is_whole"]
    assert restored_value(run) == (8, 8.0)
    assert not has_spare(run)


def test_it_can_be_switched_off(run: Path) -> None:
    array = np.zeros(LENGTH)
    with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1), reuse_space=False) as manager:
        save_steps(manager, array, range(1, 5))
        assert not has_spare(run)
    with hf.resumable(run.with_name("other"), a=array, keep=hf.Latest(1), reuse_space=False) as other:
        for step in other.steps(4):
            array[:] = step
            other.save()
            other.manager.wait(60)
            assert not has_spare(run.with_name("other"))
    with pytest.raises(UsageError, match="reuse_space must be True or False, got 1"):
        hf.CheckpointManager(run, hf.Checkpoint(a=array), reuse_space=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["memory", "faulty"])
def test_other_storages_do_without(run: Path, place: str) -> None:
    storage = MemoryStorage() if place == "memory" else FaultyStorage(LocalStorage(run))
    array = np.zeros(LENGTH)
    with hf.CheckpointManager(storage, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
        save_steps(manager, array, range(1, 5))
        assert StoredRun(storage).look().spare_bytes is None
    assert restored_value(storage) == (4, 4.0)


def test_what_others_rely_on_is_not_taken(run: Path) -> None:
    """The source of an incremental step, a step that was replaced, and the rest of an attempt that failed."""
    frozen, head = np.full(LENGTH, 7.0), np.zeros(LENGTH)
    checkpoint = hf.Checkpoint(frozen=frozen, head=head)
    with hf.CheckpointManager(run, checkpoint, keep=hf.Latest(1), incremental=True) as manager:
        save_steps(manager, head, range(1, 2))
        source = number_of(run, 1)
        save_steps(manager, head, range(2, 7))
        assert number_of(run, 1) == source
        assert identity(run / SPARE_NAME) != source
        head[:] = 66
        manager.save(6, replace=True)
        manager.wait(60)
        check_all_whole(LocalStorage(run))
    unfinished = run / "step-000000009.g0001"
    unfinished.mkdir()
    (unfinished / DATA).write_bytes(bytes(3_000_000))
    with hf.CheckpointManager(run, checkpoint, keep=hf.All()) as manager:
        manager.restore()
        save_steps(manager, head, range(10, 11))
        assert not unfinished.exists()
        assert not has_spare(run)


# Who else has the file.


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_a_job_that_reads_a_removed_step_reads_on(run: Path, how: str) -> None:
    from hashlib import sha256

    array = np.zeros(LENGTH)
    with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
        save_steps(manager, array, range(1, 2))
        data = run / "step-000000001.g0001" / DATA
        expected = sha256(data.read_bytes()).hexdigest()
        with reader_of(data, how) as reader:
            save_steps(manager, array, range(2, 6))
            assert not data.exists()
            assert reader.communicate("go\n", timeout=60)[0].strip() == expected
        assert restored_value(run) == (5, 5.0)


def test_a_copy_by_hard_links_stays_whole(run: Path, tmp_path: Path) -> None:
    """What `cp -al` makes, of the steps and of all that lies beside them, at any moment."""
    array = np.zeros(LENGTH)
    copies = []
    with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
        for step in range(1, 8):
            save_steps(manager, array, range(step, step + 1))
            if step % 3:
                copies.append((step, tmp_path / f"copy-{step}"))
                shutil.copytree(run, copies[-1][1], copy_function=os.link)
    for step, copy in copies:
        assert restored_value(copy) == (step, float(step))
        check_all_whole(LocalStorage(copy))


def test_a_job_that_was_fenced_leaves_what_is_the_newer_ones(run: Path) -> None:
    array, other = np.zeros(LENGTH), np.zeros(LENGTH)
    zombie = hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1))
    save_steps(zombie, array, range(1, 4))
    assert has_spare(run)
    with hf.CheckpointManager(run, hf.Checkpoint(a=other), keep=hf.Latest(1)) as living:
        living.restore()
        save_steps(living, other, range(4, 7))
        assert has_spare(run)
        with pytest.raises(SaveFailedError) as failed:
            zombie.save(4).wait_committed(60)
        assert isinstance(failed.value.__cause__, FencedError)
        zombie.close()
        assert has_spare(run), "it is the living job's"
        save_steps(living, other, range(7, 9))
        check_all_whole(LocalStorage(run))
    assert not has_spare(run)
    assert restored_value(run) == (8, 8.0)


# When it goes.

PROGRAM = """
import os, signal, sys, numpy as np, holdfast as hf
array = np.zeros(300_000)
manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(a=array), keep=hf.Latest(1))
restored = manager.restore()
for step in range(1, 5):
    array[:] = step + (restored.step if restored else 0)
    manager.save(int(array[0]))
if sys.argv[2] == "killed":
    manager.wait()
    assert os.path.exists(sys.argv[1] + "/.holdfast-spare")
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "abandoned":
    manager.wait()
    manager.abandon()
if sys.argv[2] == "failed":
    raise SystemExit("own error")
"""


def run_program(run: Path, how: str) -> int:
    command = [sys.executable, "-c", PROGRAM, str(run), how]
    return preloaded.run(command, capture_output=True, timeout=60, check=False).returncode


@pytest.mark.parametrize("how", ["ended", "failed"])
def test_a_program_that_ends_without_closing_leaves_none(run: Path, how: str) -> None:
    assert run_program(run, how) == (0 if how == "ended" else 1)
    assert restored_value(run) == (4, 4.0)
    assert not has_spare(run)


def test_a_program_that_leaves_at_once_leaves_it_as_a_kill_does(run: Path) -> None:
    assert run_program(run, "abandoned") == 0
    assert has_spare(run)
    assert run_program(run, "ended") == 0
    assert not has_spare(run)
    assert restored_value(run) == (8, 8.0)


def test_a_manager_that_restores_in_between_leaves_none(run: Path) -> None:
    array = np.zeros(LENGTH)
    for steps in (0, 1, 3):
        with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1), begin_anew=True) as manager:
            save_steps(manager, array, range(1, 4))
            assert has_spare(run)
            manager.restore()
            save_steps(manager, array, range(4, 4 + steps))
        assert not has_spare(run)
        assert restored_value(run) == (3 + steps, 3.0 + steps)


def test_a_storage_of_ones_own_is_still_asked(run: Path) -> None:
    class Counting(LocalStorage):
        opened = 0

        def create(self, path: str, size_bytes: int) -> LocalWriter:
            self.opened += 1
            return super().create(path, size_bytes)

    storage, array = Counting(run), np.zeros(LENGTH)
    with hf.CheckpointManager(storage, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
        save_steps(manager, array, range(1, 6))
        assert has_spare(run)
    assert storage.opened == 5


@pytest.mark.parametrize("reuse_space", [True, False])
def test_what_a_killed_job_left_is_used_or_swept(run: Path, reuse_space: bool) -> None:
    assert run_program(run, "killed") < 0
    left = identity(run / SPARE_NAME)
    assert restored_value(run) == (4, 4.0)
    assert has_spare(run), "who only reads removes nothing"
    array = np.zeros(LENGTH)
    with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1), reuse_space=reuse_space) as manager:
        manager.restore()
        save_steps(manager, array, range(5, 6))
        assert (number_of(run, 5) == left) == reuse_space
        assert has_spare(run) is False, "the step that the run goes on from is kept"
        save_steps(manager, array, range(6, 8))
        assert has_spare(run) == reuse_space
    assert restored_value(run) == (7, 7.0)
    assert not has_spare(run)


def test_one_of_a_small_state_is_not_kept_for_ever(run: Path) -> None:
    """A spare is for files of about its size: a large one goes when the state has become small."""
    state = {"a": np.zeros(5 * LENGTH)}
    with hf.CheckpointManager(run, hf.Checkpoint(state=state), keep=hf.Latest(1)) as manager:
        manager.save(1)
        manager.save(2)
        manager.wait(60)
        assert has_spare(run)
        state["a"] = np.zeros(LENGTH)
        manager.save(3)
        manager.wait(60)
        assert not has_spare(run), "the file of step 2 is much too large"
        manager.save(4)
        manager.wait(60)
        assert (run / SPARE_NAME).stat().st_size < 2 * state["a"].nbytes
        state["a"] = np.zeros(7)
        manager.save(5)
        manager.wait(60)
        assert not has_spare(run)


def test_a_full_disk_gets_the_room_back(tmp_path: Path) -> None:
    """The state grows until old, new and spare do not fit beside each other, and beyond what the disk holds."""
    with small_disk(tmp_path, 64 << 20) as root:
        run = root / "run"
        state = {"a": np.zeros(0)}
        manager = hf.CheckpointManager(run, hf.Checkpoint(state=state), keep=hf.Latest(1), failures_allowed=1)
        sizes = (1, 1, 1, 8, 8, 16, 16, 24, 28, 2, 16)
        for step, size in enumerate(sizes, 1):
            state["a"] = np.full(size << 17, float(step))
            manager.save(step).wait_committed(60)
            manager.wait(60)
            check_all_whole(LocalStorage(run))
        state["a"] = np.full(60 << 17, 1.0)
        manager.save(50).wait_ended(60)
        state["a"] = np.full(20 << 17, 1.0)
        manager.save(51).wait_committed(60)
        manager.close()
        assert manager.steps() == (51,)
        assert not has_spare(run)


# Killed at each system call.

KILLED = """
import numpy as np, holdfast as hf, sys
array = np.full(300_000, 11.0)
manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(a=array), keep=hf.Latest(1), threads=1)
manager.save(11).wait_committed(60)
print("promised", flush=True)
manager.close()
"""
OF_THE_SPARE = ("renameat", "ftruncate", "fallocate")
CALLS = ("renameat", "unlinkat", "fsync", "ftruncate", "fallocate", "pwrite64", "linkat", "mkdirat")


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize(
    ("call_name", "fault"),
    [
        # Who dies at a sync leaves what one leaves who dies at the next of the other calls.
        *(pytest.param(name, "signal=KILL", marks=pytest.mark.long if name == "fsync" else []) for name in CALLS),
        # Errors of the others end the attempt, which more tests show.
        *(pytest.param(name, "error=EIO", marks=[] if name in OF_THE_SPARE else pytest.mark.long) for name in CALLS),
    ],
)
def test_death_at_any_call_leaves_a_whole_checkpoint(run: Path, tmp_path: Path, call_name: str, fault: str) -> None:
    """The save takes the spare that lies there, and its retention leaves another one."""
    array = np.zeros(LENGTH)
    ground, log = tmp_path / "ground", tmp_path / "log"
    with hf.CheckpointManager(ground, hf.Checkpoint(a=array), keep=hf.Latest(2)) as manager:
        save_steps(manager, array, range(1, 4))
        shutil.copytree(ground, tmp_path / "copy")
    faults = 0
    # In the gate every other call: each time a Python is started under strace.
    for number in range(1, 100, 1 if "HOLDFAST_LONG" in os.environ else 2):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(tmp_path / "copy", run)
        where = f"{fault} at {call_name} {number}"
        options = ["-e", f"trace={call_name}", "-e", f"inject={call_name}:{fault}:when={number}"]
        command = [*STRACE, "-qq", "-o", str(log), *options, sys.executable, "-B", "-c", KILLED, str(run)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if "INJECTED" not in log.read_text() and done.returncode == 0:
            break
        faults += 1
        names = [entry.name for entry in LocalStorage(run).list("") if not entry.is_directory]
        assert set(names) <= {SPARE_NAME, "events.jsonl"} or fault == "error=EIO", where
        check_all_whole(LocalStorage(run))
        step, value = restored_value(run)
        assert value == step, where
        assert step == 11 if "promised" in done.stdout else step in (3, 11), where
        with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
            manager.restore()
            save_steps(manager, array, range(20, 23))
        check_all_whole(LocalStorage(run))
        assert restored_value(run) == (22, 22.0), where
        catalog = StoredRun(LocalStorage(run)).look()
        assert (catalog.unfinished, catalog.trash, catalog.spare_bytes) == ((), (), None), where
    assert done.returncode == 0, done.stderr
    assert faults > 0, "the save makes that call"


# What the command line says of it.


def make_left(run: Path) -> None:
    assert run_program(run, "killed") < 0


def test_list_names_it(run: Path) -> None:
    make_left(run)
    assert "a spare file of 2.4 MB (--all shows them)" in call("list", run).stderr
    shown = call("list", run, "--all")
    last = shown.stdout.splitlines()[-1].split()
    assert last == [
        "-",
        "-",
        "spare",
        "-",
        str((run / SPARE_NAME).stat().st_size),
        "-",
        SPARE_NAME,
        "may_be_in_progress",
    ]
    document = call_json("list", run)
    assert [spare["state"] for spare in document["spare"]] == ["spare"]
    assert call("show", run).exit_code == 0
    assert call_json("verify", run, "--all")["is_whole"]


def test_prune_removes_it_when_no_job_can_be_alive(run: Path) -> None:
    make_left(run)
    left_alone = call("prune", run, "--unfinished", "--yes")
    assert f"skipped: a job may use {SPARE_NAME}" in left_alone.stdout
    assert has_spare(run)
    code, words = complaint("prune", run)
    assert code == 2
    assert "--unfinished or --lost" in words
    document = call_json("prune", run, "--unfinished", "--job-is-dead", "--dry-run")
    assert [(one["directory"], one["state"]) for one in document["remove"]] == [(SPARE_NAME, "spare")]
    assert has_spare(run)
    done = call("prune", run, "--unfinished", "--job-is-dead", "--yes")
    assert done.exit_code == 0
    size_bytes = document["remove"][0]["size_bytes"]
    assert f"to remove: the spare file, {size_bytes} bytes" in done.stdout, "in a pipe sizes have all of their digits"
    assert f"removed the spare file, {size_bytes} bytes" in done.stdout
    assert not has_spare(run)
    assert restored_value(run) == (4, 4.0)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), Path.mkdir])
def test_foreign_file_under_the_spare_name_does_no_harm(run: Path, make: Callable[[Path], None]) -> None:
    array = np.zeros(LENGTH)
    before = Path("/etc/passwd").read_bytes()
    with hf.CheckpointManager(run, hf.Checkpoint(a=array), keep=hf.Latest(1)) as manager:
        save_steps(manager, array, range(1, 2))
        make(run / SPARE_NAME)
        save_steps(manager, array, range(2, 5))
    assert restored_value(run) == (4, 4.0)
    assert call("list", run).exit_code == 0
    assert (run / SPARE_NAME).is_dir() == (make is Path.mkdir)
    assert Path("/etc/passwd").read_bytes() == before
    make_again = not has_spare(run)
    if make_again:
        make(run / SPARE_NAME)
        assert call("prune", run, "--unfinished", "--job-is-dead", "--yes").exit_code == 0
        assert not has_spare(run)
    assert Path("/etc/passwd").read_bytes() == before
