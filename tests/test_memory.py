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
for number in range(12):
    state[f"a{number}"] = np.full(2_000_000, float(number))
    state_bytes += state[f"a{number}"].nbytes
incremental = sys.argv[2] == "save incrementally"
manager = hf.CheckpointManager(sys.argv[1], hf.Checkpoint(state=state), keep=hf.Latest(1), incremental=incremental)
if sys.argv[2] != "restore":
    reset_peak()
    before = peak_bytes()
    for step in range(1, 6):
        for number in range(1, 12, 2):
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
    assert measure(tmp_path, "save") < 1.05


def test_incremental_saves_take_a_few_mebibytes_more(tmp_path: Path) -> None:
    assert measure(tmp_path, "save incrementally") < 1.10


def test_a_restore_in_place_takes_almost_nothing(tmp_path: Path) -> None:
    assert measure(tmp_path, "restore") < 0.25
