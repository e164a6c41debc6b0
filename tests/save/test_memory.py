"""How much memory a save and a restore take beyond the state itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from places import PROGRAMS


def measure(directory: Path, mode: str) -> float:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "peak_memory.py", directory, mode],
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


def test_neighbors_with_other_page_offsets_are_written_in_small_pieces(tmp_path: Path) -> None:
    """Each of the threads gathers one."""
    assert measure(tmp_path, "save neighbours incrementally") < 1.06


def test_a_restore_in_place_takes_almost_nothing(tmp_path: Path) -> None:
    assert measure(tmp_path, "restore") < 0.25


def save_with_little_memory(
    directory: Path, failures_allowed: int, reserve_bytes: int
) -> subprocess.CompletedProcess[str]:
    numbers = (str(failures_allowed), str(reserve_bytes))
    command: list[str | Path] = [sys.executable, PROGRAMS / "scarce_memory.py", directory, *numbers]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_save_without_memory_for_it_fails_like_any_other(tmp_path: Path) -> None:
    done = save_with_little_memory(tmp_path, failures_allowed=2, reserve_bytes=0)
    assert done.returncode == 0, done.stderr
    assert "step 1 was not saved: no memory for a copy of the state, 120,0" in done.stdout
    assert "hint" in done.stdout


def test_failed_reservation_is_reported_and_left_to_the_save(tmp_path: Path) -> None:
    done = save_with_little_memory(tmp_path, failures_allowed=2, reserve_bytes=10**12)
    assert done.returncode == 0, done.stderr


def test_a_save_without_memory_is_raised_by_the_next_one(tmp_path: Path) -> None:
    done = save_with_little_memory(tmp_path, failures_allowed=0, reserve_bytes=0)
    assert done.returncode == 74, done.stderr
    assert "SaveFailedError: step 1 was not saved: no memory" in done.stderr
