"""`hf.keras` with the backends torch and JAX: what was interrupted goes on bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS, killed_after

PROGRAMS = Path(__file__).parent / "programs"
BACKENDS = ["torch", "jax"]

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)
# Keras looks at it when it is imported, for the tests that need no process of their own.
os.environ.setdefault("KERAS_BACKEND", "torch")


def start(backend: str, name: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-W", "ignore", str(PROGRAMS / name), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def follow(
    process: subprocess.Popen[str], strike: Callable[[list[str]], int | None] = lambda _: None
) -> tuple[list[str], int, str]:
    """What it prints, its exit code, and its errors; sends the signal that `strike` gives for the lines so far."""
    lines: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    with killed_after(PATIENCE_SECONDS, process):
        for line in process.stdout:
            lines.append(line.rstrip())
            number = strike(lines)
            if number is not None:
                process.send_signal(number)
        return lines, process.wait(), process.stderr.read()


def list_steps(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("step")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["dataset", "arrays"])
def test_killed_five_times_a_fit_ends_the_same(backend: str, case: str, tmp_path: Path) -> None:
    whole, code, problems = follow(start(backend, "keras_fit.py", tmp_path / "whole", "--case", case))
    assert code == 0, problems
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    seen: list[str] = []
    for _ in range(5):
        at = chance.randrange(2, 25)
        process = start(backend, "keras_fit.py", tmp_path / "killed", "--case", case)
        lines, _, _ = follow(process, lambda lines, at=at: signal.SIGKILL if len(lines) == at else None)  # type: ignore[misc]
        seen += lines
    last, code, problems = follow(start(backend, "keras_fit.py", tmp_path / "killed", "--case", case))
    assert code == 0, problems
    assert last[-1] == whole[-1], f"seed {seed}"
    assert set(seen + last) <= set(whole), f"seed {seed}"
    steps, left = list_steps(whole), list_steps(last)
    assert left == steps[len(steps) - len(left) :]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_fit_that_is_asked_to_leave_says_so_and_goes_on(backend: str, tmp_path: Path) -> None:
    whole, _, problems = follow(start(backend, "keras_fit.py", tmp_path / "whole"))
    steps = list_steps(whole)
    assert len(steps) == 36, problems
    done: list[str] = []
    for begin in ("step 1 2", "test 2 1", "step 4 5"):
        process = start(backend, "keras_fit.py", tmp_path / "asked")
        lines, code, problems = follow(
            process,
            lambda lines, begin=begin: signal.SIGTERM if lines[-1].startswith(begin) else None,  # type: ignore[misc]
        )
        assert code == 42, problems
        done += list_steps(lines)
        assert done == steps[: len(done)]
    last, code, problems = follow(start(backend, "keras_fit.py", tmp_path / "asked"))
    assert code == 0, problems
    assert done + list_steps(last) == steps
    assert last[-1] == whole[-1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("freq", ["epoch", "4"])
def test_a_backup_goes_on_behind_its_batch(backend: str, freq: str, tmp_path: Path) -> None:
    whole, _, problems = follow(start(backend, "keras_fit.py", tmp_path / "whole", "--backup", freq))
    assert whole[-1].startswith("end"), problems
    arguments = (tmp_path / "killed", "--backup", freq)
    process = start(backend, "keras_fit.py", *arguments)
    follow(process, lambda lines: signal.SIGKILL if lines[-1].startswith("step 3 3") else None)
    last, code, problems = follow(start(backend, "keras_fit.py", *arguments))
    assert code == 0, problems
    assert last[-1] == whole[-1]
    assert len(list_steps(last)) < 36
    assert set(last) <= set(whole)


@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        (
            "torch",
            ["shuffled in batches", "fewer steps than batches", "dataset with threads", "loader with a generator"],
        ),
        ("torch", ["loader with workers", "loader with lasting workers", "loader, fewer steps", "generator"]),
        ("jax", ["fewer steps than batches", "dataset with processes"]),
        ("jax", ["loader", "shuffled in batches"]),
    ],
)
def test_each_kind_of_data_is_taken_up_where_it_stood(backend: str, cases: list[str], tmp_path: Path) -> None:
    lines, code, problems = follow(start(backend, "keras_cases.py", tmp_path, *cases))
    assert code == 0, problems
    for line, case in zip(lines, cases, strict=True):
        found = json.loads(line)
        assert found.pop("case") == case
        # Workers of a PyDataset have looked at an epoch before the first one, and Keras trains what they have found.
        assert found.pop("as without") or case.startswith("dataset with"), line
        assert found, line
        assert all(found.values()), (line, problems)


def test_a_disk_that_is_full_ends_no_fit(tmp_path: Path) -> None:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs to mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=False).returncode:
        pytest.skip("may not mount")
    try:
        process = start("torch", "keras_fit.py", place / "backup", "--backup", "4")
        filled: list[int] = []

        def fill(lines: list[str]) -> int | None:
            if lines[-1].startswith("step 2 2"):
                with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
                    while True:
                        filled.append(file.write(bytes(4096)))
            if lines[-1].startswith("step 4 0"):
                (place / "filler").unlink()
            return None

        lines, code, problems = follow(process, fill)
        assert lines[-1].startswith("end"), problems
        assert code == 0, problems
        assert filled
        assert "No space" in problems or "room" in problems or "full" in problems
    finally:
        subprocess.run(["umount", place], check=True)


def test_bad_arguments_are_value_errors_of_keras(tmp_path: Path) -> None:
    import holdfast as hf

    for arguments in (
        {"backup_dir": ""},
        {"backup_dir": None},
        {"backup_dir": tmp_path, "save_freq": "batch"},
        {"backup_dir": tmp_path, "save_freq": 1.5},
        {"backup_dir": tmp_path, "save_freq": 0},
        {"backup_dir": tmp_path, "save_freq": True},
        {"backup_dir": tmp_path, "save_freq": False},
        {"backup_dir": tmp_path, "delete_checkpoint": "no"},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            hf.keras.BackupAndRestore(**arguments)
    with pytest.raises(ValueError, match="did you mean save_every"):
        hf.keras.Resumable(tmp_path, save_evry=3)
    with pytest.raises(ValueError, match="no policy for saving"):
        hf.keras.Resumable(tmp_path, save_every=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kept already"):
        hf.keras.Resumable(tmp_path, model=1)


def test_a_second_fit_is_left_alone(tmp_path: Path) -> None:
    process = start("torch", "keras_second.py", tmp_path)
    lines, code, problems = follow(process)
    assert code == 0, problems
    assert [json.loads(line) for line in lines] == [
        {"a backup that was finished is gone": True, "what is not its own stays": True},
        {"epochs of a fit without a callback": 3, "epochs of the same callback again": 2},
        {"a changed model is refused": True, "the error of a step comes through": True, "signals are as before": True},
        {"stopped early, it stays so": 0, "more epochs go on": [3, 4]},
    ]
