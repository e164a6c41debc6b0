"""Memory as the first tier: what a dead process has copied comes back, whole and checked, and nothing is left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.catalog import StoredRun
from holdfast.errors import UsageError
from holdfast.events import Event, Warned
from holdfast.storage import LocalStorage
from holdfast.storage.kept_memory import KeptMemory
from holdfast.supervise.launch import KEEPER
from patience import PATIENCE_SECONDS, wait_until
from places import TESTS

PROGRAM = """
import os, sys
import numpy as np
import holdfast as hf
from holdfast.storage import LocalStorage

steps, blocked, *options = sys.argv[1:]


class Slow(LocalStorage):
    def create(self, path, size_bytes):
        if path.startswith(f"step-{int(blocked):09d}."):
            print("blocked", flush=True)
            os.read(0, 1)
        return super().create(path, size_bytes)


state = {"w": np.zeros(300_000), "n": 0}
tell = lambda event: print("restored", event.step, *event.tiers, flush=True)
sinks = [lambda event: tell(event) if type(event).__name__ == "Restored" else None]
places = hf.Tiers(hf.HostMemory(keep_seconds=int((options or [60])[0])), hf.Tier(Slow("run")))
with hf.CheckpointManager(places, hf.Checkpoint(state=state), sinks=sinks, keep=2) as manager:
    restored = manager.restore()
    first = 1 if restored is None else restored.step + 1
    assert restored is None or (state["w"] == restored.step).all()
    for step in range(first, int(steps) + 1):
        state["w"][:] = state["n"] = step
        manager.save(step).wait_committed()
    print("saved", step if first <= int(steps) else first - 1, flush=True)
    if len(options) > 1:
        os.kill(os.getpid(), getattr(__import__("signal"), options[1]))
"""


RUN = """
import os, sys
import numpy as np
import holdfast as hf

state = {"w": np.zeros(300_000)}
with hf.resumable(hf.Tiers(hf.HostMemory(), "run"), state=state, save_every=hf.Steps(1)) as run:
    for step in run.steps(6):
        state["w"][:] += 1
        if step == int(sys.argv[1]):
            os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of its own: what keeps memory is found in the user's directory, whose path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Path(runtime)
        for pid in list_keepers(Path(runtime)):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the program runs in."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    return tmp_path


def list_keepers(user: Path) -> list[int]:
    """The processes that keep memory for runs of this test."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[-3:-1] == KEEPER and any(str(user) in word for word in words):
            found.append(int(entry.name))
    return found


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "train.py", *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(*words: object) -> tuple[list[str], str]:
    process = start(*words)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return out.splitlines(), err


def kill_in_save(step: int) -> None:
    """Runs the program until a step is whole in memory and nothing of it on the disk, and kills it."""
    process = start(100, step)
    assert process.stdout is not None
    assert "blocked\n" in iter(process.stdout.readline, "")
    process.kill()
    process.communicate()


def steps_on_disk() -> list[int]:
    return [name.step for name in StoredRun(LocalStorage("run")).look(closely=True).committed]


def flip_bits(user: Path) -> None:
    """Flips a bit in the middle of each image."""
    for pid in list_keepers(user):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if "holdfast-image" in str(entry.readlink()):
                with entry.open("r+b") as image:
                    middle = os.fstat(image.fileno()).st_size // 2
                    image.seek(middle)
                    byte = image.read(1)[0]
                    image.seek(middle)
                    image.write(bytes([byte ^ 4]))


def test_a_save_that_was_only_copied_comes_back_and_is_written() -> None:
    kill_in_save(5)
    assert steps_on_disk() == [3, 4]
    out, err = finish(6, 0)
    assert out == ["restored 5 memory", "saved 6"]
    assert "step 5 was in memory only; it is written now" in err
    assert steps_on_disk() == [5, 6]


def test_a_restart_reads_what_is_on_the_disk_too_from_memory() -> None:
    assert finish(4, 0, 60, "SIGKILL")[0] == ["saved 4"]
    assert finish(4, 0, 60, "SIGKILL")[0] == ["restored 4 memory", "saved 4"]
    assert finish(5, 0, 60, "SIGKILL")[0] == ["restored 4 memory", "saved 5"]


def test_a_step_that_a_person_has_removed_does_not_come_back_from_memory() -> None:
    finish(4, 0, 60, "SIGKILL")
    shutil.rmtree("run/step-000000004.g0001")
    assert finish(5, 0, 60, "SIGKILL")[0] == ["restored 3 memory", "saved 5"]
    kill_in_save(6)
    assert finish(6, 0, 60, "SIGKILL")[0] == ["restored 6 memory", "saved 6"]
    # It was written by a start, and not by the process that had saved it.
    shutil.rmtree("run/step-000000006.g0003")
    assert finish(5, 0)[0][0].startswith("restored 5")


def test_the_line_of_a_restart_says_where_it_was_read_from(place: Path) -> None:
    Path("train.py").write_text(RUN)
    finish(4)
    assert re.search(r"resumed run at step \d \(saved [^,]*, read from memory", finish(9)[1])
    with hf.resumable(hf.Tiers("run", "far"), state={"w": np.zeros(300_000)}) as run:
        assert run.restored is not None
        assert run.restored.tiers == (str(place / "run"),)


def test_nothing_is_left_after_a_normal_end(user: Path, place: Path) -> None:
    assert finish(3, 0)[0] == ["saved 3"]
    wait_until(lambda: not list_keepers(user))
    assert finish(3, 0)[0] == [f"restored 3 {place / 'run'}", "saved 3"]
    assert [path.name for path in user.iterdir() if not path.name.endswith(".lock")] == []


def test_a_flipped_bit_in_memory_is_found_and_the_disk_read(user: Path, place: Path) -> None:
    finish(4, 0, 60, "SIGKILL")
    flip_bits(user)
    assert finish(5, 0)[0] == [f"restored 4 memory {place / 'run'}", "saved 5"]


def test_a_flipped_bit_in_what_is_in_memory_only_is_not_restored(user: Path, place: Path) -> None:
    kill_in_save(5)
    flip_bits(user)
    out, err = finish(4, 0)
    assert out == [f"restored 4 memory {place / 'run'}", "saved 4"]
    assert "step 5 is whole in memory, but it cannot be written" in err


def test_memory_is_not_taken_from_a_process_that_lives() -> None:
    process = start(100, 5)
    assert process.stdout is not None
    assert "blocked\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGSTOP)
    try:
        memory = KeptMemory(hf.HostMemory(), str(LocalStorage("run").url))
        memory.open(0, "another start")
        assert "a process of an earlier start" in memory.problem
        assert memory.images.list_records() == []
    finally:
        process.kill()
        process.communicate()


def test_what_no_start_comes_for_is_written_and_its_memory_goes(user: Path) -> None:
    process = start(100, 5, 1)
    assert process.stdout is not None
    assert "blocked\n" in iter(process.stdout.readline, "")
    process.kill()
    process.communicate()
    wait_until(lambda: not list_keepers(user))
    assert steps_on_disk()[-1] == 5


def test_a_supervised_program_comes_back_from_memory(user: Path) -> None:
    source = PROGRAM.replace('getattr(__import__("signal"), options[1])', "9").replace(
        "if len(options) > 1:", 'if not os.path.exists("died") and open("died", "w"):'
    )
    Path("train.py").write_text(source)
    command = [sys.executable, "-m", "holdfast", "run", "train.py", "4", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    assert ended.stdout.splitlines() == ["saved 4", "restored 4 memory", "saved 4"]
    wait_until(lambda: not list_keepers(user))


def test_without_enough_memory_saves_go_to_the_disk_alone() -> None:
    events: list[Event] = []
    state = {"w": np.ones(1000)}
    places = hf.Tiers(hf.HostMemory(), "run")
    checkpoint = hf.Checkpoint(state=state)
    with hf.CheckpointManager(places, checkpoint, sinks=[events.append], reserve_bytes=1 << 50) as manager:
        manager.save(1).wait_committed()
    texts = [event.text for event in events if isinstance(event, Warned)]
    assert any(
        re.search("saves are not kept in memory: two images take .* bytes more, and .* are free", text)
        for text in texts
    )
    assert steps_on_disk() == [1]


@pytest.mark.parametrize(
    "places", [["run", hf.HostMemory()], [hf.HostMemory(), hf.HostMemory(), "run"], [hf.HostMemory()]]
)
def test_memory_comes_first_once_and_before_a_place(places: list[Any]) -> None:
    with pytest.raises(UsageError):
        hf.Tiers(*places)


def test_workers_that_are_killed_come_back_from_memory_and_disks() -> None:
    command = [sys.executable, "-m", "crash.memory", "--rounds", "4", "--seed", "1"]
    ended = subprocess.run(
        command, cwd=TESTS, check=False, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_start_while_the_rest_is_written_takes_over_and_loses_nothing(user: Path) -> None:
    kill_in_save(5)
    (keeper,) = list_keepers(user)
    os.kill(keeper, signal.SIGTERM)  # As `holdfast run` does when no start follows.
    kill_in_save(8)
    assert finish(9, 0)[0][0] == "restored 8 memory"


def test_what_cannot_be_written_now_is_written_later(user: Path, place: Path) -> None:
    process = start(100, 5, 1)
    assert process.stdout is not None
    assert "blocked\n" in iter(process.stdout.readline, "")
    (place / "run").rename(place / "away")
    (place / "run").write_text("in the way")
    process.kill()
    process.communicate()
    (keeper,) = list_keepers(user)
    seen: set[str] = set()

    def have_two_failed() -> bool:
        seen.update(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
        return len(seen) >= 2

    wait_until(have_two_failed)
    (place / "run").unlink()
    (place / "away").rename(place / "run")
    wait_until(lambda: not list_keepers(user))
    assert steps_on_disk()[-1] == 5


def test_a_run_whose_keeper_is_gone_says_so_and_goes_on(user: Path) -> None:
    process = start(8, 5)
    assert process.stdout is not None
    assert "blocked\n" in iter(process.stdout.readline, "")
    for pid in list_keepers(user):
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate("x")
    assert "saves are not kept in memory: the process that keeps them has ended" in err
    assert steps_on_disk()[-1] == 8


def test_a_second_manager_of_a_process_does_without_memory_at_once(place: Path) -> None:
    events: list[Event] = []
    state = {"w": np.ones(1000)}
    first = hf.CheckpointManager(hf.Tiers(hf.HostMemory(), "run"), hf.Checkpoint(state=state))
    first.save(1).wait_committed()
    second = hf.CheckpointManager(hf.Tiers(hf.HostMemory(), "run"), hf.Checkpoint(state=state), sinks=[events.append])
    assert any("another manager of this process has the run open" in str(event) for event in events)
    second.close()
    first.close()
