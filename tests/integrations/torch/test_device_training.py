"""Whole trainings on a device: killed and resumed, asked to leave, sharded, compiled; and arrays of JAX."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
import preloaded
from on_device import on_each_device
from places import PROGRAMS

on_cuda_or_long = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda", marks=pytest.mark.cuda)]
)


def run(mode: str, device: str, *more: str | Path) -> subprocess.CompletedProcess[str]:
    """CUDA does not live on in a fork, so that there a fresh interpreter runs it."""
    command = [sys.executable, str(PROGRAMS / "device_training.py"), mode, device, *map(str, more)]
    if device == "cuda" or mode == "shard":
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        env = os.environ | place
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    return preloaded.run(command, capture_output=True, text=True, timeout=120, check=False, preload=preloaded.TRAINING)


@on_each_device
def test_a_gpt_that_was_killed_ends_with_the_same_bits(device: str, tmp_path: Path) -> None:
    whole = run("gpt", device, tmp_path / "whole", "")
    assert whole.returncode == 0, whole.stderr
    killed = run("gpt", device, tmp_path / "killed", "7")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run("gpt", device, tmp_path / "killed", "")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[0] == "begun 6"
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@on_each_device
def test_a_notice_while_the_device_computes_saves_the_step(device: str, tmp_path: Path) -> None:
    ended = run("leave", device, tmp_path)
    assert ended.returncode == 42, ended.stderr
    assert ended.stdout.splitlines()[0] == "running True"
    stored = {"w": np.zeros(1 << 16, np.float32)}
    with hf.CheckpointManager(tmp_path, hf.Checkpoint(weights=stored)) as manager:
        found = manager.restore(only="weights")
    assert found is not None
    # Steps 0 to 4, each of which takes one away.
    assert found.step == 5
    assert (stored["w"] == -5).all()


@on_cuda_or_long
def test_fsdp_on_one_worker_saves_and_restores(device: str, tmp_path: Path) -> None:
    ended = run("shard", device, tmp_path)
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["same"]), ended.stderr


@on_cuda_or_long
def test_compiled_models_are_saved_while_they_train(device: str, tmp_path: Path) -> None:
    ended = run("compile", device, tmp_path)
    if "Failed to find C compiler" in ended.stderr or "InvalidCxxCompiler" in ended.stderr:
        pytest.skip("torch.compile needs a compiler for C, and there is none")
    assert (ended.returncode, ended.stdout.split()[-1:]) == (0, ["same"]), ended.stderr


@on_each_device
def test_arrays_of_jax_that_are_donated_after_the_save(device: str, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    ended = run("jax", device, tmp_path)
    assert ended.returncode == 0, ended.stderr
    if "JAX computes on" in ended.stdout:
        pytest.skip(ended.stdout.strip())
    assert ended.stdout.split()[-1:] == ["same"]
