"""How much memory a save and a restore take beyond the state itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
import resource, sys, numpy as np, holdfast as hf

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def reset_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

state_bytes = 0
state = {}
count, size = (8, 3_000_001) if "neighbours" in sys.argv[2] else (12, 2_000_000)
for number in range(count):
    state[f"a{number}"] = np.full(size, float(number))
    state_bytes += state[f"a{number}"].nbytes
incremental = "incrementally" in sys.argv[2]
changed = range(count // 2, count) if "neighbours" in sys.argv[2] else range(1, count, 2)
manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state), keep=hf.Latest(1), incremental=incremental)
if sys.argv[2] != "restore":
    reset_peak()
    before = peak_bytes()
    for step in range(1, 6):
        for number in changed:
            state[f"a{number}"][:] = step
        manager.save(step)
    manager.close()
else:
    manager.save(1)
    manager.close()
    del manager
    manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state))
    reset_peak()
    before = peak_bytes()
    manager.restore()
print((peak_bytes() - before) / state_bytes)
"""


def measure(directory: Path, mode: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(directory), mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_saves_take_one_copy_of_the_state_however_many_there_are(tmp_path: Path) -> None:
    assert measure(tmp_path, "save") < 1.02


def test_incremental_saves_take_a_few_mebibytes_more(tmp_path: Path) -> None:
    assert measure(tmp_path, "save incrementally") < 1.06


def test_neighbours_that_lie_elsewhere_in_their_pages_are_written_in_small_pieces(tmp_path: Path) -> None:
    """Each of the threads gathers one."""
    assert measure(tmp_path, "save neighbours incrementally") < 1.06


def test_a_restore_in_place_takes_almost_nothing(tmp_path: Path) -> None:
    assert measure(tmp_path, "restore") < 0.25


SCARCE = """
import resource, sys, numpy as np, holdfast as hf
import holdfast.state.numpy_arrays  # What is imported later may lack the memory for that.
from holdfast.errors import SaveFailedError

state = np.ones(30_000_000, np.float32)
with open("/proc/self/status") as status:
    taken = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken + 90_000_000, resource.getrlimit(resource.RLIMIT_AS)[1]))
events = []
manager = hf.CheckpointManager(
    sys.argv[1], hf.Checkpoint(state=state), threads=1, sinks=[events.append],
    failures_allowed=int(sys.argv[2]), reserve_bytes=int(sys.argv[3]),
)
handle = manager.save(1)
manager.save(2)
resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[1],) * 2)
manager.save(3)
manager.close()
assert manager.latest_step() == 3
kinds = [type(event).__name__ for event in events]
assert kinds.count("Failed") == 2 and "Warned" * bool(int(sys.argv[3])) in kinds + [""], events
try:
    handle.wait_committed()
except SaveFailedError as error:
    assert isinstance(error.__cause__, MemoryError)
    print(error)
"""


def save_with_little_memory(
    directory: Path, failures_allowed: int, reserve_bytes: int
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCARCE), str(directory), str(failures_allowed), str(reserve_bytes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_save_without_memory_for_it_fails_like_any_other(tmp_path: Path) -> None:
    done = save_with_little_memory(tmp_path, failures_allowed=2, reserve_bytes=0)
    assert done.returncode == 0, done.stderr
    assert "step 1 was not saved: no memory for a copy of the state, 120,0" in done.stdout
    assert "hint" in done.stdout


def test_memory_that_cannot_be_made_ready_beforehand_is_said_and_left_to_the_save(tmp_path: Path) -> None:
    done = save_with_little_memory(tmp_path, failures_allowed=2, reserve_bytes=10**12)
    assert done.returncode == 0, done.stderr


def test_a_save_without_memory_is_raised_by_the_next_one(tmp_path: Path) -> None:
    done = save_with_little_memory(tmp_path, failures_allowed=0, reserve_bytes=0)
    assert done.returncode == 74, done.stderr
    assert "SaveFailedError: step 1 was not saved: no memory" in done.stderr
