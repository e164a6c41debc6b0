"""`holdfast.keras` with the backends torch, JAX and TensorFlow: what was interrupted goes on bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from lives import compiled  # noqa: F401

import preloaded
from patience import PATIENCE_SECONDS, killed_after

PROGRAMS = Path(__file__).parent / "programs"
BATCH = 8
NEEDS_TENSORFLOW = pytest.mark.skipif(
    find_spec("tensorflow") is None, reason="needs TensorFlow: `make test-tensorflow` runs it"
)
BACKENDS = ["torch", "jax", pytest.param("tensorflow", marks=NEEDS_TENSORFLOW)]
MODULES = (
    "numpy.random",
    "keras",
    "holdfast.manager",
    "holdfast.training.resumable",
    "holdfast.training.run",
    "holdfast.integrations.frameworks.keras.callbacks",
)
TORCH = ("torch", "holdfast.integrations.torch")
PRELOADED = {
    "torch": (*MODULES, "keras.src.backend.torch.trainer", "torch._dynamo", *TORCH),
    "jax": (*MODULES, "keras.src.backend.jax.trainer", *preloaded.JAX, "holdfast.integrations.jax", *TORCH),
}

if find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)
# Keras looks at it when it is imported, for the tests that need no process of their own.
os.environ.setdefault("KERAS_BACKEND", "torch")


def start(backend: str, program: str | Path, *arguments: object) -> subprocess.Popen[Any]:
    command = [sys.executable, str(PROGRAMS / program), *map(str, arguments)]
    pipe = subprocess.PIPE
    # The interpreter that is forked imports Keras, which looks at the variable then.
    with mock.patch.dict(os.environ, KERAS_BACKEND=backend, OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2"):
        if backend == "tensorflow":  # It has threads as soon as it is imported, so it is not forked.
            return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        return preloaded.Popen(
            command, preload=PRELOADED[backend], stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )


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
            if number == signal.SIGKILL:
                # The workers of a dataset too: they may wait for ever for one that is gone, and hold these pipes.
                os.killpg(process.pid, number)
            elif number is not None:
                process.send_signal(number)
        return lines, process.wait(), process.stderr.read()


def list_steps(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith('{"step"')]


def list_saved(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """The steps that are there, each with its metrics, the newest last."""
    bodies = [json.loads(path.read_text())["body"] for path in sorted(directory.glob("step-*/manifest.json"))]
    return [(body["step"], body["metrics"]) for body in bodies]


@cache
def train_without(backend: str, case: str) -> tuple[str, ...]:
    """What a program tells that trains without holdfast and is left alone."""
    with TemporaryDirectory() as place:
        lines, code, problems = follow(start(backend, "keras_fit.py", f"{place}/run", "--without", "--case", case))
    assert code == 0, problems
    assert len(list_steps(lines)) == 36, problems
    return tuple(lines)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("torch", []), ("jax", ["--at-epochs"]), pytest.param("tensorflow", [], marks=NEEDS_TENSORFLOW)],
)
def test_a_step_whose_epoch_is_left_in_its_evaluation_counts_once(
    backend: str, options: list[str], tmp_path: Path
) -> None:
    whole, run = train_without(backend, "dataset"), tmp_path / "run"
    told: list[str] = []
    for leave, step in (("test 1 1", 12), ("test 1 1", 12), ("step 2 2", 15), ("test 5 3", 36), ("", 36)):
        lines, code, problems = follow(start(backend, "keras_fit.py", run, *options, "--leave", leave))
        assert code == (42 if leave else 0), problems
        told += lines
        assert list_saved(run)[-1][0] == step
        if step == 15:
            # What is saved at the end of an epoch has what its evaluation has found.
            assert ("val_loss" in dict(list_saved(run))[12]) == bool(options)
    assert list_steps(told) == list_steps(list(whole))
    assert told[-1] == whole[-1]
    assert set(told) == set(whole)
    assert "val_loss" in list_saved(run)[-1][1]
    again, code, problems = follow(start(backend, "keras_fit.py", run, *options))
    assert code == 0, problems
    assert again == [whole[-1]]  # It is not evaluated again.


@pytest.mark.parametrize(
    ("backend", "freq", "begins"),
    [
        ("torch", "epoch", range(12, 36, 6)),
        ("jax", "4", range(16, 36, 4)),
        pytest.param("tensorflow", "4", range(16, 36, 4), marks=NEEDS_TENSORFLOW),
    ],
)
def test_backup_resumes_after_its_batch(backend: str, freq: str, begins: range, tmp_path: Path) -> None:
    whole = train_without(backend, "dataset")
    arguments = (tmp_path / "run", "--backup", freq)
    process = start(backend, "keras_fit.py", *arguments)
    follow(process, lambda lines: signal.SIGKILL if lines[-1].startswith('{"step": "3 3"') else None)
    last, code, problems = follow(start(backend, "keras_fit.py", *arguments))
    assert code == 0, problems
    assert last[-1] == whole[-1]
    steps, left = list_steps(list(whole)), list_steps(last)
    assert left == steps[len(steps) - len(left) :]
    # The newest backup may have been on its way, and the process may have got further than it was heard.
    assert len(steps) - len(left) in begins


def test_a_backup_for_preemption_alone_is_taken_up(tmp_path: Path) -> None:
    arguments = (tmp_path / "run", "--backup", "0")
    process = start("torch", "keras_fit.py", *arguments)
    first, code, problems = follow(
        process, lambda lines: signal.SIGTERM if lines[-1].startswith('{"step": "1 2"') else None
    )
    assert code == 42, problems
    last, code, problems = follow(start("torch", "keras_fit.py", *arguments))
    assert code == 0, problems
    whole = train_without("torch", "dataset")
    assert list_steps(first) + list_steps(last) == list_steps(list(whole))
    assert last[-1] == whole[-1]


READ_AGAIN = ("generator", "stream of unknown length", "pipeline of a generator", "pipeline with a cache file")
LOADED_AHEAD = {
    "loader with workers": 32,
    "loader with lasting workers": 32,
    "dataset with threads": 2,
    "dataset with processes": 2,
}
"""How much more or less workers load that `fit` has no use for: two batches of four rows before it begins, and as many
after each of three epochs; or two batches before it begins. One interruption spares forty rows within its epoch."""


@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        ("torch", ["shuffled in batches", "fewer steps than batches", "dataset with threads", "generator"]),
        ("torch", ["loader with a generator", "loader with a sampler", "loader with workers"]),
        ("torch", ["loader with lasting workers"]),
        ("torch", ["dataset", "loader, fewer steps", "dataset with processes", "stream of unknown length"]),
        ("jax", ["fewer steps than batches", "dataset", "loader"]),
        pytest.param(
            "tensorflow",
            ["unshuffled", "shuffled in batches", "weighted"],
            marks=NEEDS_TENSORFLOW,
        ),
        pytest.param("tensorflow", ["fewer steps than batches", "pipeline, repeated"], marks=NEEDS_TENSORFLOW),
        pytest.param("tensorflow", ["pipeline that counts", "pipeline with a cache"], marks=NEEDS_TENSORFLOW),
        pytest.param(
            "tensorflow", ["pipeline of a generator", "generator", "pipeline with a cache file"], marks=NEEDS_TENSORFLOW
        ),
    ],
)
def test_each_kind_of_data_is_taken_up_where_it_stood(backend: str, cases: list[str], tmp_path: Path) -> None:
    lines, code, problems = follow(start(backend, "keras_cases.py", tmp_path, *cases))
    assert code == 0, problems
    assert ("can only be read from its beginning" in problems) == any(case in READ_AGAIN for case in cases)
    for line, case in zip(lines, cases, strict=True):
        found = json.loads(line)
        assert found["case"] == case
        # Workers of a PyDataset have looked at an epoch before the first one, and Keras trains what they have found.
        assert found["is as without"] or case.startswith("dataset with"), line
        for one in found["interrupted"]:
            assert one["differs"] == [], (case, one)
            assert one["begun behind"] == one["saved behind"], (case, one)
            if case == "pipeline that counts":
                # What was trained is not loaded again; what was loaded ahead is in the checkpoint as well.
                assert one["spared loads"] >= BATCH * one["saved behind"] - BATCH, (case, one)
            if case.startswith(("loader", "dataset")):
                ahead = LOADED_AHEAD.get(case, 0)
                assert abs(one["spared loads"] - one["loads of what was trained"]) <= ahead, (case, one)


def test_a_disk_that_is_full_ends_no_fit(tmp_path: Path) -> None:
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("needs to mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], check=False).returncode:
        pytest.skip("may not mount")
    try:
        process = start("torch", "keras_fit.py", place / "backup", "--backup", "4", "--log", tmp_path / "log")
        filled: list[int] = []

        def fill(lines: list[str]) -> int | None:
            if lines[-1].startswith('{"step": "2 2"'):
                with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
                    while True:
                        filled.append(file.write(bytes(4096)))
            return None

        lines, code, problems = follow(process, fill)
        assert lines[-1].startswith('{"ended"'), problems
        assert code == 0, problems
        assert lines[-1] == train_without("torch", "dataset")[-1]
        assert filled
        assert "No space" in problems or "room" in problems or "full" in problems
        (place / "filler").unlink()
        # The backup from before the disk was full has stayed.
        last, code, problems = follow(start("torch", "keras_fit.py", place / "backup", "--backup", "4"))
        assert code == 0, problems
        assert 0 < len(list_steps(last)) < 36
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
    with pytest.raises(ValueError, match="an object named model is already saved"):
        hf.keras.Resumable(tmp_path, model=1)


def test_another_backend_is_refused_where_the_callback_is_made(tmp_path: Path) -> None:
    program = "import sys, holdfast as hf; hf.keras.BackupAndRestore(sys.argv[1])"
    environment = {**os.environ, "KERAS_BACKEND": "numpy"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "Keras uses the numpy backend" in ended.stderr


@pytest.mark.parametrize(
    ("saved", "used"),
    [
        ("torch", "jax"),
        ("jax", "torch"),
        *(
            pytest.param(*pair, marks=NEEDS_TENSORFLOW)
            for pair in (("torch", "tensorflow"), ("jax", "tensorflow"), ("tensorflow", "torch"), ("tensorflow", "jax"))
        ),
    ],
)
def test_another_backend_is_refused_and_a_new_run_takes_the_weights(saved: str, used: str, tmp_path: Path) -> None:
    lines, code, problems = follow(start(saved, "keras_backends.py", tmp_path / "run"))
    assert code == 0, problems
    _, code, problems = follow(start(used, "keras_backends.py", tmp_path / "run"))
    assert code == 1
    assert f"the run was saved with the {saved} backend of Keras, and this process uses {used}" in problems
    assert f"Set KERAS_BACKEND={saved} to resume it" in problems
    others, code, problems = follow(start(used, "keras_backends.py", tmp_path / "new", tmp_path / "run"))
    assert code == 0, problems
    assert others[0] == lines[1] != lines[0]
    assert others[1] != others[0]
    # Nothing has happened to the run.
    again, code, problems = follow(start(saved, "keras_backends.py", tmp_path / "run"))
    assert code == 0, problems
    assert again[1] == lines[1]


@NEEDS_TENSORFLOW
def test_what_tensorflow_cannot_take_up_is_refused(tmp_path: Path) -> None:
    lines, code, problems = follow(start("tensorflow", "keras_refused.py", tmp_path))
    assert code == 0, problems
    strategy, workers, steps = lines
    assert "MirroredStrategy trains this model on several devices" in strategy
    assert "the position of a PyDataset with workers or steps_per_epoch cannot be saved" in workers
    assert workers == steps


@NEEDS_TENSORFLOW
@pytest.mark.parametrize("kind", ["gan", "encoder"])
def test_tensorflow_model_with_only_a_train_step_resumes(kind: str, tmp_path: Path) -> None:
    whole, code, problems = follow(start("tensorflow", "keras_models.py", tmp_path / "whole", kind))
    assert code == 0, problems
    assert len(whole) == 18
    for last in (4, 5):
        lines, code, problems = follow(start("tensorflow", "keras_models.py", tmp_path / "run", kind, last))
        assert code == -signal.SIGKILL, problems
        assert set(lines) <= set(whole)
    lines, code, problems = follow(start("tensorflow", "keras_models.py", tmp_path / "run", kind))
    assert code == 0, problems
    assert lines == whole[-len(lines) :]
    assert len(lines) < len(whole)


@NEEDS_TENSORFLOW
def test_tensorflow_warns_of_other_data_than_the_checkpoint_has(tmp_path: Path) -> None:
    arguments = ("keras_fit.py", tmp_path / "run", "--case")
    # By itself: a signal from here may come when the epoch has ended, where there is no place in the data to compare.
    _, code, problems = follow(start("tensorflow", *arguments, "pipeline", "--leave", "step 1 2"))
    assert code == 42, problems
    _, code, problems = follow(start("tensorflow", *arguments, "pipeline with a cache"))
    assert code == 0, problems
    assert "the data is not that of the checkpoint" in problems


@NEEDS_TENSORFLOW
def test_tensorflow_warns_of_two_shuffles(tmp_path: Path) -> None:
    warning = "the tf.data pipeline shuffles twice"
    case = ("--case", "pipeline with two shuffles")
    whole = list_steps(list(train_without("tensorflow", case[1])))
    first, code, problems = follow(start("tensorflow", "keras_fit.py", tmp_path / "run", *case, "--leave", "step 1 2"))
    assert code == 42, problems
    assert warning in problems
    last, code, problems = follow(start("tensorflow", "keras_fit.py", tmp_path / "run", *case))
    assert code == 0, problems
    assert warning in problems
    # As it says: the epoch goes on with the same elements, and later ones have another order.
    steps = list_steps(first + last)
    assert steps[:12] == whole[:12]
    assert len(steps) == len(whole)
    assert steps[12:] != whole[12:]
    _, code, problems = follow(start("tensorflow", "keras_fit.py", tmp_path / "one", "--case", "pipeline"))
    assert code == 0, problems
    assert warning not in problems


@NEEDS_TENSORFLOW
def test_tensorflow_warns_of_random_operations(tmp_path: Path) -> None:
    _, code, problems = follow(start("tensorflow", "keras_cases.py", tmp_path, "pipeline that counts"))
    assert code == 0, problems
    assert "the tf.data pipeline draws random numbers or calls Python" in problems


def test_a_second_fit_is_left_alone(tmp_path: Path) -> None:
    process = start("torch", "keras_second.py", tmp_path)
    lines, code, problems = follow(process)
    assert code == 0, problems
    assert "holdfast: a callback stopped training after epoch 2; it stays stopped" in problems.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"a backup that was finished is gone": True, "what is not its own stays": True},
        {"epochs of a fit without a callback": 3, "epochs of the same callback again": 2},
        {
            "a changed model is refused": True,
            "a second one is refused": True,
            "the error of a step comes through": True,
            "signals are as before": True,
        },
        {"stopped early, it stays so": 0, "more epochs go on": [3, 4]},
        {
            "best weights are put back again": True,
            "steps kept": [6, 24],
            "a loader with a place of its own is refused": True,
            "workers of which batches are carried over are refused": True,
        },
        {"two optimizers of a model go on": True},
        {"a log whose rows are trained again is as without": True},
    ]
